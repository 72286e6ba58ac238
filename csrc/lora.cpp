// LoRA updates of linear maps: scale * B (A x), where each row of a pass may have its own adapter.
//
// The rows of one adapter are multiplied with its weights together, a few rows and a few ranks or outputs at a time.
// The order of every sum depends on the map alone: over columns in 16 lanes, first to last, and over ranks, first to
// last. So a row's update does not depend on the other rows, on their number, or on the number of threads.
//
// Without an update the output is -0, as x + -0 equals x for every x, bit for bit.
#include "lora.h"

#include "ops.h"
#include "rows.h"
#include "simd.h"
#include "threads.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kTogether = 4;  // rows, and ranks or output vectors, whose sums fit in registers
#else
constexpr int kTogether = 2;
#endif
constexpr int64_t kRowsAtOnce = 32;               // of one adapter, for one work item
constexpr int64_t kOutputs = kTogether * kLanes;  // outputs of a work item
constexpr int64_t kManyRanks = 16;                // ranks of a work item

// The rows of one adapter.
struct Run {
    const LoraMap* maps;
    int64_t num_maps;
    const int32_t* rows;
    int64_t count;

    int64_t chunks() const { return (count + kRowsAtOnce - 1) / kRowsAtOnce; }
    int64_t ranks() const { return num_maps ? maps[num_maps - 1].first_rank + maps[num_maps - 1].rank : 0; }
};

Run run_of(const LoraArgs& args, int64_t index) {
    const AdapterRows& of = *args.adapters;
    const int32_t slot = of.slots[index];
    const int32_t* rows = of.rows + of.starts[index];
    const int64_t count = of.starts[index + 1] - of.starts[index];
    if (slot < 0) return {nullptr, 0, rows, count};
    return {args.slots[slot].maps, args.slots[slot].count, rows, count};
}

// One work item: a chunk of a run's rows, and a part of the work on them.
struct Item {
    Run run;
    int64_t first, last;  // of its rows
    int64_t part;
};

// Runs body(item) for every chunk of every run and each part of its work, on all threads.
template <class Parts, class Body>
void for_items(const LoraArgs& args, const Parts& parts, const Body& body) {
    const int64_t runs = args.adapters->num_runs;
    parallel([&](int64_t, int64_t) {
        int64_t count = 0;
        for (int64_t i = 0; i < runs; i++) {
            const Run run = run_of(args, i);
            count += run.chunks() * parts(run);
        }
        take_turns(count, [&](int64_t item, int64_t) {
            for (int64_t i = 0;; i++) {
                const Run run = run_of(args, i);
                const int64_t each = run.chunks(), items = each * parts(run);
                if (item >= items) {
                    item -= items;
                    continue;
                }
                const int64_t first = item % each * kRowsAtOnce;
                return body(Item{run, first, std_min(first + kRowsAtOnce, run.count), item / each});
            }
        });
    });
}

// Writes the products of N rows of x with M rows of A to `y`, whose rows are `stride` apart.
template <int N, int M, class Load>
inline __attribute__((always_inline)) void shrink(const Load& load, const void* const (&x)[kTogether], const void* a,
                                                  int64_t columns, float scale, float* const (&y)[kTogether]) {
    f32x16 sum[N][M];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++)
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) sum[n][m] = zero_f32();
    for (int64_t i = 0; i < columns; i += kLanes) {
        f32x16 weight[M];
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) weight[m] = load(a, m * columns + i, columns - i);
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
            const f32x16 value = load(x[n], i, columns - i);
#pragma GCC unroll 4
            for (int m = 0; m < M; m++) sum[n][m] = fma(weight[m], value, sum[n][m]);
        }
    }
    for (int n = 0; n < N; n++)
        for (int m = 0; m < M; m++) y[n][m] = scale * sum_lanes(sum[n][m]);
}

// Writes the products of N rows of A x with V vectors of B's outputs to `y`.
template <int N, int V, class Load>
inline __attribute__((always_inline)) void expand(const Load& load, const float* const (&h)[kTogether], const void* b,
                                                  int64_t rows, int64_t ranks, int64_t first,
                                                  float* const (&y)[kTogether]) {
    f32x16 sum[N][V];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) sum[n][v] = set_f32(-0.0f);
    for (int64_t rank = 0; rank < ranks; rank++) {
        f32x16 weight[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++)
            weight[v] = load(b, rank * rows + first + v * kLanes, rows - first - v * kLanes);
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
            const f32x16 value = set_f32(h[n][rank]);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) sum[n][v] = fma(weight[v], value, sum[n][v]);
        }
    }
    for (int n = 0; n < N; n++)
        for (int v = 0; v < V; v++)
            write_row(y[n], kFloat32, first + v * kLanes, rows - first - v * kLanes, sum[n][v]);
}

// Calls body(whole<n>) with n, from 1 to kTogether, as a compile-time constant.
template <int N>
struct Whole {
    static constexpr int value = N;
};
template <int N = kTogether, class Body>
inline void with_number(int64_t n, const Body& body) {
    if constexpr (N == 1) {
        body(Whole<1>());
    } else if (n >= N) {
        body(Whole<N>());
    } else {
        with_number<N - 1>(n, body);
    }
}

// Calls body(at, whole<n>) for `count` ranks or vectors, n from `at` on: kTogether at a time, then the rest one by one.
template <class Body>
inline void in_groups(int64_t count, const Body& body) {
    int64_t at = 0;
    for (; at + kTogether <= count; at += kTogether) body(at, Whole<kTogether>());
    for (; at < count; at++) body(at, Whole<1>());
}

// The function that loads the first `count` of 16 elements of a type.
template <class Body>
void with_type(int32_t dtype, const Body& body) {
    if (dtype == kBFloat16) {
        body([](const void* data, int64_t at, int64_t count) __attribute__((always_inline)) {
            return count >= kLanes ? load_bf16(static_cast<const uint16_t*>(data) + at)
                                   : load_some_as_f32(data, kBFloat16, at, count);
        });
    } else if (dtype == kFloat32) {
        body([](const void* data, int64_t at, int64_t count) __attribute__((always_inline)) {
            return count >= kLanes ? load_f32(static_cast<const float*>(data) + at)
                                   : load_some_as_f32(data, kFloat32, at, count);
        });
    } else {
        body([](const void* data, int64_t at, int64_t count) __attribute__((always_inline)) {
            return load_some_as_f32(data, kFloat16, at, count);
        });
    }
}

const void* element_at(const void* data, int32_t dtype, int64_t at) {
    return static_cast<const uint8_t*>(data) + at * bytes_of(dtype);
}

int64_t most_ranks(const LoraArgs& args) {
    int64_t most = 0;
    for (int64_t i = 0; i < args.adapters->num_runs; i++) most = std_max(most, run_of(args, i).ranks());
    return most;
}

// Computes scale * A x for an adapter's rows, for the ranks of all its maps.
template <class Load>
void shrink_all(const LoraArgs& args, int64_t stride, const Load& load) {
    const auto parts = [](const Run& run) {
        int64_t count = 0;
        for (int64_t i = 0; i < run.num_maps; i++) count += (run.maps[i].rank + kManyRanks - 1) / kManyRanks;
        return count;
    };
    for_items(args, parts, [&](const Item& item) {
        const LoraMap* map = item.run.maps;
        int64_t part = item.part;
        for (int64_t size; part >= (size = (map->rank + kManyRanks - 1) / kManyRanks); map++) part -= size;
        const int64_t first_rank = part * kManyRanks, ranks = std_min(map->rank - first_rank, kManyRanks);
        in_groups(ranks, [&](int64_t group, auto several) {
            const int64_t rank = first_rank + group;
            const void* a = element_at(map->a, args.dtype, rank * args.columns);
            for (int64_t row = item.first; row < item.last; row += kTogether) {
                const void* x[kTogether] = {};
                float* y[kTogether] = {};
                for (int64_t i = 0; i < kTogether && row + i < item.last; i++) {
                    const int64_t at = item.run.rows[row + i];
                    x[i] = element_at(args.x, args.dtype, at * args.x_stride);
                    y[i] = args.scratch + at * stride + map->first_rank + rank;
                }
                with_number(item.last - row, [&](auto rows) __attribute__((always_inline)) {
                    shrink<decltype(rows)::value, decltype(several)::value>(load, x, a, args.columns, map->scale, y);
                });
            }
        });
    });
}

// Computes the update of each map's outputs from A x; -0 where the adapter has no map.
template <class Load>
void expand_all(const LoraArgs& args, int64_t stride, const Load& load) {
    const LoraMap none = {nullptr, nullptr, 0, args.y_columns, 0, 0, 0.0f};
    const auto tiles = [](const LoraMap& map) { return (map.rows + kOutputs - 1) / kOutputs; };
    const auto parts = [&](const Run& run) {
        int64_t count = run.num_maps ? 0 : tiles(none);
        for (int64_t i = 0; i < run.num_maps; i++) count += tiles(run.maps[i]);
        return count;
    };
    for_items(args, parts, [&](const Item& item) {
        const LoraMap* map = item.run.num_maps ? item.run.maps : &none;
        int64_t part = item.part;
        for (int64_t size; part >= (size = tiles(*map)); map++) part -= size;
        const int64_t first = part * kOutputs, vectors = (std_min(kOutputs, map->rows - first) + kLanes - 1) / kLanes;
        for (int64_t row = item.first; row < item.last; row += kTogether) {
            const float* h[kTogether] = {};
            float* y[kTogether] = {};
            for (int64_t i = 0; i < kTogether && row + i < item.last; i++) {
                const int64_t at = item.run.rows[row + i];
                h[i] = args.scratch + at * stride + map->first_rank;
                y[i] = args.y + at * args.y_columns + map->first;
            }
            with_number(item.last - row, [&](auto rows) __attribute__((always_inline)) {
                in_groups(vectors, [&](int64_t vector, auto several) __attribute__((always_inline)) {
                    expand<decltype(rows)::value, decltype(several)::value>(load, h, map->b, map->rows, map->rank,
                                                                            first + vector * kLanes, y);
                });
            });
        }
    });
}

// Writes the update of one row from `of_ranks`, scale * A x.
template <class Load>
void expand_row(const Load& load, const LoraMap& map, const float* of_ranks, float* y) {
    const float* h[kTogether] = {of_ranks};
    float* to[kTogether] = {y};
    in_groups((map.rows + kLanes - 1) / kLanes, [&](int64_t vector, auto several) __attribute__((always_inline)) {
        expand<1, decltype(several)::value>(load, h, map.b, map.rows, map.rank, vector * kLanes, to);
    });
}

// Adds a map's update for the id of a row to the row.
void add_looked_up(const LoraLookupArgs& args, const LoraMap& map, int64_t row) {
    float of_ranks[kMostRanks];
    with_type(args.dtype, [&](const auto& load) {
        const f32x16 scale = set_f32(map.scale);
        for (int64_t rank = 0; rank < map.rank; rank += kLanes) {
            const f32x16 a = load(map.a, args.row_ids[row] * map.rank + rank, map.rank - rank);
            write_row(of_ranks, kFloat32, rank, map.rank - rank, mul(scale, a));
        }
        for (int64_t first = 0; first < args.columns; first += kLanes) {
            const int64_t at = row * args.columns + first, count = args.columns - first;
            f32x16 sum = zero_f32();
            for (int64_t rank = 0; rank < map.rank; rank++)
                sum = fma(load(map.b, rank * args.columns + first, count), set_f32(of_ranks[rank]), sum);
            write_row(args.y, args.dtype, at, count, add(load_some_as_f32(args.y, args.dtype, at, count), sum));
        }
    });
}

}  // namespace

int64_t lora_scratch_bytes(const LoraArgs& args) {
    return args.tokens * most_ranks(args) * static_cast<int64_t>(sizeof(float));
}

void lora_row(const LoraMaps& maps, int32_t dtype, const void* x, int64_t columns, float* y, int64_t y_columns) {
    float of_ranks[kMostRanks];
    if (!maps.count)
        for (int64_t i = 0; i < y_columns; i++) y[i] = -0.0f;
    with_type(dtype, [&](const auto& load) {
        for (const LoraMap* map = maps.maps; map < maps.maps + maps.count; map++) {
            in_groups(map->rank, [&](int64_t rank, auto several) __attribute__((always_inline)) {
                const void* row[kTogether] = {x};
                float* to[kTogether] = {of_ranks + rank};
                const void* a = element_at(map->a, dtype, rank * columns);
                shrink<1, decltype(several)::value>(load, row, a, columns, map->scale, to);
            });
            expand_row(load, *map, of_ranks, y + map->first);
        }
    });
}

void lora_lookup(const LoraLookupArgs& args) {
    if (!args.adapters->num_runs) return;
    parallel([&](int64_t thread, int64_t threads) {
        const int64_t end = args.rows * (thread + 1) / threads;
        for (int64_t row = args.rows * thread / threads; row < end; row++) {
            const int32_t slot = args.adapters->row_slots[row];
            if (slot >= 0 && args.slots[slot].count) add_looked_up(args, *args.slots[slot].maps, row);
        }
    });
}

void lora(const LoraArgs& args) {
    if (!args.adapters->num_runs) return;
    const int64_t stride = most_ranks(args);
    with_type(args.dtype, [&](const auto& load) {
        if (stride) shrink_all(args, stride, load);
        expand_all(args, stride, load);
    });
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
