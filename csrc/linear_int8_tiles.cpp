// Products of integers by AMX tiles: tiles sum the products of 32 columns of 16 rows of x and 16 of the weight; vectors
// scale them and add them to the rows' sums.
#include "linear_int8_tiles.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

constexpr int kSteps = TiledBlocks::kSteps, kLineBytes = TiledBlocks::kLineBytes, kLinesBytes = kSteps * kLineBytes;
constexpr int kGroups = TiledBlocks::kGroups;
constexpr int kParts = kTiledRun * kGroups;  // of a run

struct Run {
    // Sums of a run's products.
    struct Products {
        alignas(64) int32_t of[kParts][kVectors][kMostTiledRows][kLanes];
    };

    QuantizedRows rows;
    TiledBlocks blocks;
    int64_t token;

    const uint8_t* block(int v, int64_t at) const { return blocks.bytes + (v * blocks.count + at) * TiledBlocks::kBytes; }
    const float* floats(int v, int64_t at, int part) const {
        return reinterpret_cast<const float*>(block(v, at) + kLinesBytes) + part * kLanes;
    }

    // Multiply a part of the run from block `begin` on with vector V.
    template <int V>
    void multiply(Products& products, int64_t begin, int64_t part) const {
        const int64_t at = begin + part / kGroups, group = part % kGroups;
        if (at >= blocks.count) return;
        if (V == 0) load_tile<kLeft>(rows.block(token, blocks.first + at) + 32 * group, IntegerLayout::kColumns);
        load_tile<kRight + V % 2>(block(V, at) + group * (kLinesBytes / 2), kLineBytes);
        zero_tile<kSums + V>();
        blocks.minimum ? dot_i8_u8<kSums + V, kLeft, kRight + V % 2>() : dot_i8_i8<kSums + V, kLeft, kRight + V % 2>();
        store_tile<kSums + V>(products.of[part][V], 4 * kLanes);
    }
    // The turns, kParts * kVectors in all, multiply a whole run.
    void multiply_turn(Products& products, int64_t begin, int turn) const {
        switch (turn % kVectors) {
            case 0: return multiply<0>(products, begin, turn / kVectors);
            case 1: return multiply<1>(products, begin, turn / kVectors);
            case 2: return multiply<2>(products, begin, turn / kVectors);
            default: return multiply<3>(products, begin, turn / kVectors);
        }
    }

    // Scale a row's products with blocks `begin` to `end` and add them.
    template <int Kind, bool Minimum>
    inline __attribute__((always_inline)) void add(const Products& products, int64_t begin, int64_t end, int row,
                                                   Sums& sums) const {
        f32x16 total[kVectors];
        for (int v = 0; v < kVectors; v++) total[v] = Kind == kFine ? load_f32(sums.lane[v]) : zero_f32();
        for (int64_t at = begin; at < end; at++) {
            unrolled<kGroups>([&](auto group) __attribute__((always_inline)) {
                const int64_t place = (kGroups * (blocks.first + at) + group) * rows.count + token + row;
                const f32x16 x_scale = set_f32(rows.scales[place]), x_sum = set_f32(rows.sums[place]);
                unrolled<kVectors>([&](auto v) __attribute__((always_inline)) {
                    f32x16 value = to_f32(load_i32(products.of[(at - begin) * kGroups + group][v][row]));
                    const f32x16 scale = load_f32(floats(v, at, group));
                    const auto minimum = [&] { return load_f32(floats(v, at, kGroups + group)); };
                    if constexpr (Kind == kCoarseActivations) {
                        total[v] = fma(value, scale, total[v]);
                        if (Minimum) total[v] = fnma(minimum(), x_sum, total[v]);
                        return;
                    }
                    if constexpr (Kind == kFine) value = mul(value, scale);
                    if (Minimum) value = fnma(minimum(), x_sum, value);
                    total[v] = fma(value, x_scale, total[v]);
                });
            });
        }
        for (int v = 0; v < kVectors; v++) {
            if constexpr (Kind != kFine) {
                const f32x16 scale = Kind == kCoarseWeights
                                         ? load_f32(floats(v, end - 1, 0))
                                         : set_f32(rows.scales[kGroups * (blocks.first + end - 1) * rows.count + token + row]);
                total[v] = fma(total[v], scale, load_f32(sums.lane[v]));
            }
            store_f32(sums.lane[v], total[v]);
        }
    }

    // Vectors scale a run's products while tiles multiply the next one's.
    template <int Kind, bool Minimum>
    void add_all(int count, const TiledFetch& fetch, Sums* sums) const {
        static_assert(kParts * kVectors == kMostTiledRows);
        const Run of = *this;  // a copy, which stores cannot alias
        Products products[2];
        for (int i = 0; i < kMostTiledRows; i++) of.multiply_turn(products[0], 0, i);
        for (int64_t at = 0, now = 0; at < of.blocks.count; at += kTiledRun, now ^= 1) {
            const int64_t end = std_min(at + kTiledRun, of.blocks.count);
            fetch.steps(fetch.prefetch, kSteps * (end - at));
            for (int i = 0; i < kMostTiledRows; i++) {
                if (end < of.blocks.count) of.multiply_turn(products[now ^ 1], end, i);
                if (i < count) of.add<Kind, Minimum>(products[now], at, end, i, sums[i]);
            }
        }
    }

    template <int Kind>
    void add_kind(int count, const TiledFetch& fetch, Sums* sums) const {
        blocks.minimum ? add_all<Kind, true>(count, fetch, sums) : add_all<Kind, false>(count, fetch, sums);
    }
};

void configure_for(int rows) {
    const uint8_t of_x = static_cast<uint8_t>(rows);
    const uint8_t sizes[8] = {of_x, of_x, of_x, of_x, of_x, of_x, kSteps / 2, kSteps / 2};
    const uint8_t widths[8] = {64, 64, 64, 64, 32, 32, 64, 64};
    configure_once(2 * kTile + rows, sizes, widths);
}

}  // namespace

void add_tiled(const QuantizedRows& rows, const TiledBlocks& blocks, int64_t token, int count, const TiledFetch& fetch,
               Sums* sums) {
    const Run run{rows, blocks, token};
    configure_for(count);
    switch (blocks.coarse) {
        case kFine: return run.add_kind<kFine>(count, fetch, sums);
        case kCoarseWeights: return run.add_kind<kCoarseWeights>(count, fetch, sums);
        default: return run.add_kind<kCoarseActivations>(count, fetch, sums);
    }
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
