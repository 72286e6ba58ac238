// Products of integers by AMX tiles: tiles sum the products of 32 (or 16) columns of 16 rows of x and 16 of the weight;
// vectors scale them and add them to the rows' sums.
#include "linear_int8_tiles.h"

#include "tiles.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

constexpr int kSteps = 16, kLineBytes = 64, kLinesBytes = kSteps * kLineBytes;

// Sums of products, [parts][vectors][rows of x][16].
template <int Halves>
struct Products {
    static constexpr int kParts = kTiledRun * 2 * Halves;
    alignas(64) int32_t of[kParts][kVectors][TiledRows::kMost][kLanes];
};

template <int Halves>
struct Run {
    static constexpr int kGroups = 2 * Halves;  // per block
    static constexpr int64_t kBlock = kLinesBytes + 2 * kGroups * 64;
    static constexpr int kColumns = 32 / Halves;

    QuantizedRows rows;
    TiledBlocks blocks;
    int64_t begin, end, token;

    const uint8_t* block(int v, int64_t at) const { return blocks.bytes + (v * blocks.count + at) * kBlock; }

    void multiply(Products<Halves>& products) const {
        for (int64_t at = begin; at < end; at++) {
            unrolled<kGroups>([&](auto group) {
                load_tile<kLeft>(rows.block(token, blocks.first + at) + group * kColumns, 64);
                unrolled<kVectors>([&](auto v) {
                    load_tile<kRight + v % 2>(block(v, at) + group * (kColumns / 4) * kLineBytes, kLineBytes);
                    zero_tile<kSums + v>();
                    dot_i8<kSums + v, kLeft, kRight + v % 2>();
                    store_tile<kSums + v>(products.of[(at - begin) * kGroups + group][v], 64);
                });
            });
        }
    }

    // Scale a row's products and add them.
    template <int Kind, bool Minimum>
    inline __attribute__((always_inline)) void add(const Products<Halves>& products, int row, Sums& sums) const {
        const auto floats = [&](int v, int64_t at, int part, int group) {
            return reinterpret_cast<const float*>(block(v, at) + kLinesBytes) + (part * kGroups + group) * kLanes;
        };
        f32x16 total[kVectors];
        for (int v = 0; v < kVectors; v++) total[v] = Kind == kFine ? load_f32(sums.lane[v]) : zero_f32();
        for (int64_t at = begin; at < end; at++) {
            unrolled<kGroups>([&](auto group) __attribute__((always_inline)) {
                const int64_t of_32 = 2 * (blocks.first + at) + group / Halves;
                const int64_t place = (of_32 * Halves + group % Halves) * rows.count + token + row;
                const i32x16 first = set_i32(rows.first[place]);
                const f32x16 x_scale = set_f32(rows.scales[of_32 * rows.count + token + row]);
                const f32x16 x_sum = set_f32(rows.sums[place]);
                unrolled<kVectors>([&](auto v) __attribute__((always_inline)) {
                    const int32_t* product = products.of[(at - begin) * kGroups + group][v][row];
                    f32x16 value = to_f32(penstock::PENSTOCK_ISA::add(load_i32(product), first));
                    const f32x16 scale = load_f32(floats(v, at, 0, group));
                    if constexpr (Kind == kCoarseActivations) {
                        total[v] = fma(value, scale, total[v]);
                        if (Minimum) total[v] = fnma(load_f32(floats(v, at, 1, group)), x_sum, total[v]);
                        return;
                    }
                    if constexpr (Kind == kFine) value = mul(value, scale);
                    if (Minimum) value = fnma(load_f32(floats(v, at, 1, group)), x_sum, value);
                    total[v] = fma(value, x_scale, total[v]);
                });
            });
        }
        for (int v = 0; v < kVectors; v++) {
            if constexpr (Kind != kFine) {
                const f32x16 scale = Kind == kCoarseWeights
                                         ? load_f32(floats(v, end - 1, 0, 0))
                                         : set_f32(rows.scales[2 * (blocks.first + end - 1) * rows.count + token + row]);
                total[v] = fma(total[v], scale, load_f32(sums.lane[v]));
            }
            store_f32(sums.lane[v], total[v]);
        }
    }

    template <int Kind, bool Minimum>
    void add_all(const Products<Halves>& products, int count, Sums* sums) const {
        for (int row = 0; row < count; row++) add<Kind, Minimum>(products, row, sums[row]);
    }

    template <int Kind>
    void add_kind(const Products<Halves>& products, int count, Sums* sums) const {
        blocks.minimum ? add_all<Kind, true>(products, count, sums) : add_all<Kind, false>(products, count, sums);
    }

    void run(int count, Sums* sums) const {
        Products<Halves> products;
        multiply(products);
        switch (blocks.coarse) {
            case kFine: return add_kind<kFine>(products, count, sums);
            case kCoarseWeights: return add_kind<kCoarseWeights>(products, count, sums);
            default: return add_kind<kCoarseActivations>(products, count, sums);
        }
    }
};

}  // namespace

TiledRows::TiledRows(int rows, int halves) {
    const uint8_t of_x = static_cast<uint8_t>(rows), lines = static_cast<uint8_t>(8 / halves);
    const uint8_t sizes[8] = {of_x, of_x, of_x, of_x, of_x, of_x, lines, lines};
    const uint8_t bytes = static_cast<uint8_t>(32 / halves), widths[8] = {64, 64, 64, 64, bytes, bytes, 64, 64};
    configure(sizes, widths);
}
TiledRows::~TiledRows() { release(); }

void add_tiled(const QuantizedRows& rows, const TiledBlocks& blocks, int64_t begin, int64_t end, int64_t token, int count,
               Sums* sums) {
    blocks.halves == 2 ? Run<2>{rows, blocks, begin, end, token}.run(count, sums)
                       : Run<1>{rows, blocks, begin, end, token}.run(count, sums);
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
