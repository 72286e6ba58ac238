// Packing, unpacking and multiplying by a weight, for any of its kinds.
//
// Every element of y is summed in an order that depends only on the columns: integer sums are exact in any order, and
// float32 sums run from the first block to the last. So a row of y does not depend on the other rows of x, their
// number, or the number of threads.
#pragma once

#include <atomic>

#include "linear_bfloat16.h"
#include "linear_map.h"
#include "threads.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

constexpr int64_t kWindowBytes = kRunsAhead ? 16 << 10 : 8 << 10;  // of weights prefetched ahead, or one slice

template <class Kind, int R>
void accumulate(const Kind& kind, int rows, const Slice& slice, const uint8_t* opened, int64_t token,
                Fetch& prefetch, Sums* sums) {
    if constexpr (Kind::kTiledRows > 0)
        if (opened != slice.data) return kind.accumulate_tiled(rows, slice, opened, token, prefetch, sums);
    if constexpr (Kind::kRows > kMaxRowsHalf) {  // AMX tiles take any number of rows
        kind.accumulate(rows, slice, token, prefetch, sums);
    } else if constexpr (R == 0) {
        (void)rows;
    } else if (rows == R) {
        kind.template accumulate<R>(slice, opened, token, prefetch, sums);
    } else {
        accumulate<Kind, R - 1>(kind, rows, slice, opened, token, prefetch, sums);
    }
}

template <class Kind>
int64_t num_blocks(const Weight& weight) {
    return (weight.columns + Kind::kColumns - 1) / Kind::kColumns;
}

template <class Kind>
int64_t panel_bytes(const Weight& weight) {
    const int64_t blocks = Kind::offset_of(weight, num_blocks<Kind>(weight) - 1) + Kind::block_bytes(weight);
    if constexpr (Kind::kOutliers) return blocks + Outliers::bytes(weight.columns);
    return blocks;
}

// Multiplies tokens `begin` to `end` with a panel: one tile of tokens and one slice of weights at a time, and within
// the tile one group, whose sums are in registers.
template <class Kind>
struct Division {
    int64_t begin = 0, blocks = 0;
    bool opens = false;  // whether slices are unpacked first
    int64_t groups = 0, tiles = 0, slice_blocks = 0, windows = 0;

    Division() = default;
    Division(int64_t begin, int64_t end, const Weight& weight)
        : begin(begin), blocks(num_blocks<Kind>(weight)),
          opens(num_groups((end - begin) * weight.x_bytes, Kind::kRows, weight.x_bytes) > Kind::kPackedGroups),
          groups(num_groups((end - begin) * weight.x_bytes, most_rows(opens), weight.x_bytes)),
          tiles((groups * most_rows(opens) + Kind::kTileTokens - 1) / Kind::kTileTokens),
          slice_blocks(std_min(tiles > 1 || (opens && Kind::kOpensLong) ? Kind::kLongSlice : Kind::kSlice, blocks)) {
        // A single tile prefetches the panel's next window; with several, each prefetches its part of the next panel.
        const int64_t bytes = blocks * Kind::block_bytes(weight);
        const int64_t slices = (blocks + slice_blocks - 1) / slice_blocks;
        const int64_t wanted = tiles == 1 ? std_max(1, (bytes + kWindowBytes / 2) / kWindowBytes) : 1;
        const int64_t together = (slices + wanted - 1) / wanted;  // slices per window, at most
        windows = (slices + together - 1) / together;
        window_slices_ = slices / windows, smaller_windows_ = windows - slices % windows;
        smallest_ = (end - begin) / groups, larger_ = (end - begin) % groups;
        if (opens && Kind::kTiledRows) smallest_ = Kind::kTiledRows / weight.x_bytes, larger_ = 0, end_ = end;
    }

    // First token of a group: the first groups have one more than the others. Groups for tiles are full but for the last.
    int64_t group_begin(int64_t group) const {
        return std_min(begin + group * smallest_ + std_min(group, larger_), end_);
    }

    // First block of a window. The last windows may have one slice more than the others.
    int64_t window_begin(int64_t window) const {
        return std_min((window * window_slices_ + std_max(0, window - smaller_windows_)) * slice_blocks, blocks);
    }

  private:
    // Rows of a group.
    static constexpr int64_t most_rows(bool opens) { return opens && Kind::kTiledRows ? Kind::kTiledRows : Kind::kRows; }

    // Groups of at most `most` rows, of whole tokens of `per_token` rows.
    static int64_t num_groups(int64_t rows, int64_t most, int64_t per_token) {
        const int64_t together = most / per_token * per_token;
        return rows <= std_max(most, Kind::kRowsAlone) ? 1 : (rows + together - 1) / together;
    }

    int64_t smallest_ = 0, larger_ = 0, end_ = INT64_MAX, window_slices_ = 0, smaller_windows_ = 0;
};

// Prefetch where the results of tokens `begin` to `end` over a panel go: a store to memory that is not cached would
// hold up those after it.
inline void fetch_results(const LinearArgs& args, int64_t begin, int64_t end, int64_t panel) {
    const int64_t size = bytes_of(args.y_dtype), width = kPanel / (args.weight->gated ? 2 : 1) * size;
    char* results = static_cast<char*>(args.y) + panel * width;
    for (int64_t token = begin; token < end; token++)
        for (int64_t byte = 0; byte < width; byte += 64)
            __builtin_prefetch(results + token * args.y_stride * size + byte, 1);
}

// Multiply a division's tokens with a panel, prefetching from `next_data` for the next one.
template <class Kind>
void multiply(const LinearArgs& args, const Kind& kind, const Division<Kind>& of, int64_t panel,
              const uint8_t* next_data) {
    const Weight& weight = *args.weight;
    const typename Kind::Registers registers;
    const uint8_t* data = weight.data + panel * panel_bytes<Kind>(weight);
    const uint8_t* beyond_blocks = data + Kind::offset_of(weight, of.blocks);
    const int64_t passes = weight.x_bytes;
    // Prefetch the window after this one, or the next panel's first, during the steps of this one.
    const auto fetch = [&](int64_t window) {
        const bool last = window + 1 == of.windows;
        const int64_t begin = of.window_begin(window), end = of.window_begin(window + 1);
        const int64_t bytes = last ? Kind::offset_of(weight, of.window_begin(1))
                                   : Kind::offset_of(weight, of.window_begin(window + 2)) - Kind::offset_of(weight, end);
        return Fetch(last ? next_data : data + Kind::offset_of(weight, end), bytes,
                     (end - begin) * of.groups * Kind::kSteps * (kVectors / kWide),
                     of.groups <= Kind::kNearGroups && bytes <= 2 * kWindowBytes);
    };
    if (Kind::kOutliers) __builtin_prefetch(beyond_blocks);
    Fetch prefetch;
    for (int64_t tile = 0; tile < of.tiles; tile++) {
        const int64_t first_group = of.groups * tile / of.tiles, last_group = of.groups * (tile + 1) / of.tiles;
        const int64_t origin = of.group_begin(first_group);
        Sums sums[Kind::kTileTokens + std_max(Kind::kRows, Kind::kTiledRows)];
        for (int64_t block = 0, window = 0; block < of.blocks; block += of.slice_blocks) {
            const Slice slice{data + Kind::offset_of(weight, block), block, std_min(of.slice_blocks, of.blocks - block)};
            const bool first = block == 0, last = block + of.slice_blocks >= of.blocks;
            if (tile == 0 && block == of.window_begin(window)) prefetch = fetch(window++);
            alignas(64) uint8_t bytes[Kind::kOpened];
            const uint8_t* opened = of.opens ? kind.open(slice, bytes) : slice.data;
            for (int64_t group = first_group, token = origin, after; group < last_group; group++, token = after) {
                after = of.group_begin(group + 1);
                // Sums that a single slice completes use the same buffer for all groups, which stays in L1.
                Sums* of_group = sums + (first && last ? 0 : (token - origin) * passes);
                const int64_t row = token * passes, rows = (after - token) * passes;
                if (last && of.opens) fetch_results(args, token, after, panel);
                for (int64_t i = 0; first && i < rows; i++) kind.begin(row + i, of_group[i]);
                accumulate<Kind, Kind::kRowsAlone>(kind, static_cast<int>(rows), slice, opened, row, prefetch, of_group);
                if (!last) continue;
                if constexpr (Kind::kOutliers)
                    kind.add_outliers(*reinterpret_cast<const Outliers*>(beyond_blocks), token, after, of_group);
                finish(args, token, after, panel, of_group);
            }
        }
    }
}

template <class Kind>
void run(const LinearArgs& args) {
    const Weight& weight = *args.weight;
    const Kind kind(weight, args.scratch, args.tokens);
    const int64_t panels = num_panels(weight);
    const int64_t bytes = args.tokens * Kind::bytes_per_token(weight.columns) * weight.x_bytes;
    const int64_t chunks = (bytes + kChunkBytes - 1) / kChunkBytes;
    parallel([&](int64_t thread, int64_t threads) {
        for (int64_t token = args.tokens * thread / threads; token < args.tokens * (thread + 1) / threads; token++) {
            const Row row{args.x, args.x_dtype, token * args.x_stride, weight.columns};
            row.fetch(args.x_stride);  // the data after it
            kind.prepare(row, token);
        }
        const int64_t first = first_turn(chunks * panels, threads) * thread % panels;
        const int64_t size = panel_bytes<Kind>(weight);
        Fetch(weight.data + first * size, std_min(size, kWindowBytes), 1, true).steps(1);
        barrier();
        int64_t chunk = -1;
        Division<Kind> division;
        take_turns(chunks * panels, [&](int64_t i, int64_t next) {
            if (i / panels != chunk) {
                chunk = i / panels;
                division = {args.tokens * chunk / chunks, args.tokens * (chunk + 1) / chunks, weight};
            }
            multiply(args, kind, division, i % panels, weight.data + next % panels * size);
        });
    }, panels * weight.columns * kPanel / 2 * (1 + args.tokens / 8));
}

// Where a row is stored.
struct RowPosition {
    int64_t panel;
    int lane;

    // The row's index, -1 if there is none.
    int64_t row(const Weight& weight) const {
        constexpr int64_t height = kPanel / 2;
        const int64_t rows = weight.gated ? weight.rows / 2 : weight.rows, half = weight.gated ? lane / height : 0;
        const int64_t at = weight.gated ? panel * height + lane % height : panel * kPanel + lane;
        return at < rows ? half * rows + at : -1;
    }
};

RowPosition position_of(const Weight& weight, int64_t row) {
    if (!weight.gated) return {row / kPanel, static_cast<int>(row % kPanel)};
    constexpr int64_t height = kPanel / 2;
    const int64_t half = row >= weight.rows / 2, at = row - half * (weight.rows / 2);
    return {at / height, static_cast<int>(half * height + at % height)};
}

constexpr int64_t kTogether = kLanes;  // rows packed together: their 4 bytes of a step are mostly one cache line

constexpr int64_t kMostSteps = 32;       // per block

Source source_of(const PackArgs& args, int64_t row) {
    const Weight& weight = *args.weight;
    const auto part = [row](const void* values, int32_t type, int64_t of_columns, int64_t columns) {
        const int64_t count = values ? (columns + of_columns - 1) / of_columns : 0;
        return static_cast<const uint8_t*>(values) + row * count * stored_bytes(type);
    };
    const int64_t columns = weight.columns, super_columns = weight.super_columns ? weight.super_columns : columns;
    return {{args.source, args.source_dtype, row * columns, columns},
            static_cast<const uint8_t*>(args.source) + row * columns,
            part(args.scales, weight.scale_type, weight.group, columns),
            part(args.offsets, weight.offset_type, weight.group, columns),
            part(args.super_scales, weight.super_type, super_columns, columns),
            part(args.super_offsets, weight.super_type, super_columns, columns)};
}

// Rows `first` to `last` of those to pack, at most kTogether.
template <class Kind>
void pack_rows(const PackArgs& args, int64_t first, int64_t last) {
    const Weight& weight = *args.weight;
    const int64_t blocks = num_blocks<Kind>(weight), header = Kind::header_bytes(weight);
    const int64_t steps = (Kind::block_bytes(weight) - header) / kLine, panel = panel_bytes<Kind>(weight);
    RowPosition positions[kTogether];
    Source sources[kTogether];
    for (int64_t row = first; row < last; row++) {
        const RowPosition position = positions[row - first] = position_of(weight, args.first_row + row);
        sources[row - first] = source_of(args, row);
        if (weight.row_scales)
            weight.row_scales[position.panel * kPanel + position.lane] = static_cast<const float*>(args.super_scales)[row];
    }
    for (int64_t b = 0; b < blocks; b++) {
        uint8_t words[kTogether][4 * kMostSteps];
        uint8_t* lines[kTogether];
        const int64_t offset = Kind::offset_of(weight, b);
        for (int64_t row = first; row < last; row++) {
            const RowPosition position = positions[row - first];
            uint8_t* block = weight.data + position.panel * panel + offset;
            Kind::pack(weight, sources[row - first], b, block, position.lane, words[row - first]);
            lines[row - first] = element(block + header, 0, position.lane);
        }
        for (int64_t step = 0; step < steps; step++)
            for (int64_t i = 0; i < last - first; i++) std::memcpy(lines[i] + step * kLine, words[i] + 4 * step, 4);
    }
}

// The part of a panel among the rows to pack, packed together, as a vector's rows share a table of upper bytes.
template <class Kind>
bool pack_panel(const PackArgs& args, int64_t panel) {
    const Weight& weight = *args.weight;
    const int64_t columns = weight.columns, blocks = num_blocks<Kind>(weight);
    uint8_t* data = weight.data + panel * panel_bytes<Kind>(weight);
    Outliers* outliers = reinterpret_cast<Outliers*>(data + Kind::offset_of(weight, blocks));
    for (int v = 0; v < kVectors; v++) {
        int64_t rows[kLanes], found = 0;
        for (int lane = 0; lane < kLanes; lane++) {
            const int64_t row = RowPosition{panel, v * kLanes + lane}.row(weight) - args.first_row;
            rows[lane] = row >= 0 && row < args.num_rows ? row : -1;
            found += rows[lane] >= 0;
        }
        for (int64_t b = 0; found && b < blocks; b++) {
            uint16_t values[kLanes][Kind::kColumns];
            const uint16_t* present[kLanes] = {};
            for (int lane = 0; lane < kLanes; lane++) {
                if (rows[lane] < 0) continue;
                const Row row{args.source, args.source_dtype, rows[lane] * columns, columns};
                for (int i = 0; i < Kind::kColumns; i += kLanes)
                    store_bf16(values[lane] + i, row.at(b * Kind::kColumns + i));
                present[lane] = values[lane];
            }
            uint8_t* block = data + Kind::offset_of(weight, b);
            if (!Kind::pack(present, v, b * Kind::kColumns, columns, block, outliers)) return false;
        }
    }
    return true;
}

template <class Kind>
void unpack_row(const Weight& weight, int64_t row, void* y, int32_t dtype, int64_t offset) {
    const int64_t columns = weight.columns, blocks = num_blocks<Kind>(weight);
    const auto [panel, lane] = position_of(weight, row);
    const uint8_t* data = weight.data + panel * panel_bytes<Kind>(weight);
    const f32x16 scale = set_f32(weight.row_scales ? weight.row_scales[panel * kPanel + lane] : 1.0f);
    constexpr int64_t step = Kind::kColumns < kLanes ? kLanes / Kind::kColumns : 1;  // blocks at a time
    for (int64_t b = 0; b < blocks; b += step) {
        float values[step * Kind::kColumns] = {};
        for (int64_t i = b; i < std_min(b + step, blocks); i++)
            Kind::unpack(weight, data + Kind::offset_of(weight, i), i, lane, values + (i - b) * Kind::kColumns);
        if constexpr (Kind::kOutliers)
            Kind::unpack_outliers(*reinterpret_cast<const Outliers*>(data + Kind::offset_of(weight, blocks)),
                                  static_cast<uint32_t>(lane), static_cast<uint32_t>(b * Kind::kColumns), values);
        for (int64_t k = b * Kind::kColumns, i = 0; i < step * Kind::kColumns && k + i < columns; i += kLanes)
            write_row(y, dtype, offset + k + i, columns - k - i, mul(load_f32(values + i), scale));
    }
}

template <class Kind>
bool pack_weight(const PackArgs& args) {
    if constexpr (Kind::kOutliers) {
        std::atomic<bool> fits{true};
        parallel_for(num_panels(*args.weight), [&](int64_t panel) {
            if (!pack_panel<Kind>(args, panel)) fits = false;
        });
        return fits.load();
    } else {
        const int64_t head = args.first_row % kTogether;  // rows before it among its kTogether
        parallel_for((head + args.num_rows + kTogether - 1) / kTogether, [&](int64_t index) {
            const int64_t first = index * kTogether - head;
            pack_rows<Kind>(args, std_max(first, 0), std_min(first + kTogether, args.num_rows));
        });
        return true;
    }
}

template <class Kind>
void unpack_rows(const UnpackArgs& args) {
    const Weight& weight = *args.weight;
    parallel_for(args.num_rows, [&](int64_t index) {
        unpack_row<Kind>(weight, args.row_ids[index], args.y, args.y_dtype, index * weight.columns);
    });
}

template <class Kind>
void prepare_row(const LinearArgs& args, int64_t from, int64_t token) {
    const Kind kind(*args.weight, args.scratch, args.tokens);
    kind.prepare({args.x, args.x_dtype, from * args.x_stride, args.weight->columns}, token);
}

template <class Kind>
void multiply_panel(const LinearArgs& args, int64_t panel, const uint8_t* next) {
    const Kind kind(*args.weight, args.scratch, args.tokens);
    multiply(args, kind, Division<Kind>(0, args.tokens, *args.weight), panel, next);
}

// `Product` is the kind that multiplies.
template <class Kind, class Product = Kind>
constexpr LinearFunctions functions = {panel_bytes<Kind>, Kind::bytes_per_token, pack_weight<Kind>,
                                       unpack_rows<Kind>, run<Product>,          prepare_row<Kind>,
                                       multiply_panel<Product>};

}  // namespace
}  // namespace PENSTOCK_ISA
}  // namespace penstock
