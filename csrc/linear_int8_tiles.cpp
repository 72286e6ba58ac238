// Products of integers by AMX tiles: tiles sum the products of 32 columns of 16 rows of x and 16 of the weight; vectors
// scale them and add them to the rows' sums.
#include "linear_int8_tiles.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

constexpr int kSteps = TiledBlocks::kSteps, kLineBytes = TiledBlocks::kLineBytes, kLinesBytes = kSteps * kLineBytes;
constexpr int kGroups = TiledBlocks::kGroups;
constexpr int kParts = kTiledRun * kGroups;  // of a run
constexpr int kRows = 4;                     // first register of the rows' parts, after 2 of sums and 2 of weights

struct Run {
    // Sums of the products of a run with one vector: few, as they stay in L1 beside what is multiplied.
    struct Products {
        alignas(64) int32_t of[kParts][kMostTiledRows][kLanes];
    };

    QuantizedRows rows;
    TiledBlocks blocks;
    int64_t token;

    const uint8_t* block(int v, int64_t at) const { return blocks.bytes + (v * blocks.count + at) * TiledBlocks::kBytes; }

    // Load a part of the rows; parts are constants.
    template <class Part>
    inline __attribute__((always_inline)) void load(int64_t begin, Part) const {
        const int64_t at = begin + Part() / kGroups;
        if (at < blocks.count)
            load_tile<kRows + Part()>(rows.block(token, blocks.first + at) + 32 * (Part() % kGroups), IntegerLayout::kColumns);
    }

    // Multiply a part with a vector and store the sums.
    template <class Part>
    inline __attribute__((always_inline)) void multiply(Products& products, int v, int64_t begin, Part part) const {
        constexpr int sum = Part() % 2, weights = 2 + Part() % 2;
        const int64_t at = begin + Part() / kGroups;
        if (at >= blocks.count) return;
        load_tile<weights>(block(v, at) + Part() % kGroups * (kLinesBytes / 2), kLineBytes);
        zero_tile<sum>();
        blocks.minimum ? dot_i8_u8<sum, kRows + Part(), weights>() : dot_i8_i8<sum, kRows + Part(), weights>();
        store_tile<sum>(products.of[part], 4 * kLanes);
    }

    // Scale a row's products with a run's first `Parts` parts and add them to its sums.
    template <int Kind, bool Minimum, int Parts>
    inline __attribute__((always_inline)) void add(const Products& products, int v, int64_t begin, int row,
                                                   float* lanes) const {
        const int64_t first = kGroups * (blocks.first + begin);
        const float *x_scales = rows.scales + first * rows.count + token + row,
                    *x_sums = rows.sums + first * rows.count + token + row;
        const auto floats = [&](int part, bool of_offsets) {
            const uint8_t* scales = block(v, begin + part / kGroups) + kLinesBytes;
            return load_f32(reinterpret_cast<const float*>(scales) + (part % kGroups + of_offsets * kGroups) * kLanes);
        };
        f32x16 total = Kind == kFine ? load_f32(lanes) : zero_f32();
        unrolled<Parts>([&](auto part) __attribute__((always_inline)) {
            f32x16 value = to_f32(load_i32(products.of[part][row]));
            const f32x16 x_sum = set_f32(x_sums[part * rows.count]);
            if constexpr (Kind == kCoarseActivations) {
                total = fma(value, floats(part, false), total);
                if (Minimum) total = fnma(floats(part, true), x_sum, total);
                return;
            }
            if constexpr (Kind == kFine) value = mul(value, floats(part, false));
            if (Minimum) value = fnma(floats(part, true), x_sum, value);
            total = fma(value, set_f32(x_scales[part * rows.count]), total);
        });
        if constexpr (Kind != kFine) {
            constexpr int last = (Parts - 1) / kGroups * kGroups;  // coarse scales are those of the last block
            const f32x16 scale = Kind == kCoarseWeights ? floats(last, false) : set_f32(x_scales[last * rows.count]);
            total = fma(total, scale, load_f32(lanes));
        }
        store_f32(lanes, total);
    }

    // Vectors scale the products with one vector of weights while tiles multiply the next one. Full: there are 16 rows,
    // and whole runs.
    template <int Kind, bool Minimum, bool Full>
    void add_all(int count, const TiledFetch& fetch, Sums* sums) const {
        const Run of = *this;  // a copy, which stores cannot alias
        Products products[2];
        unrolled<kParts>([&](auto part) __attribute__((always_inline)) {
            of.load(0, part);
            of.multiply(products[0], 0, 0, part);
        });
        for (int64_t at = 0; at < of.blocks.count; at += kTiledRun) {
            const bool whole = Full || at + kTiledRun <= of.blocks.count;
            fetch.steps(fetch.prefetch, kSteps * kTiledRun);
            for (int v = 0; v < kVectors; v++) {
                const int next = (v + 1) % kVectors;
                const int64_t next_at = next ? at : at + kTiledRun;
                unrolled<kParts>([&](auto part) __attribute__((always_inline)) {
                    if (next == 0) of.load(next_at, part);
                    of.multiply(products[next % 2], next, next_at, part);
                    constexpr int each = kMostTiledRows / kParts;
                    unrolled<each>([&](auto i) __attribute__((always_inline)) {
                        const int row = each * part + i;
                        if (!Full && row >= count) return;
                        whole ? of.add<Kind, Minimum, kParts>(products[v % 2], v, at, row, sums[row].lane[v])
                              : of.add<Kind, Minimum, kGroups>(products[v % 2], v, at, row, sums[row].lane[v]);
                    });
                });
            }
        }
    }

    template <int Kind, bool Minimum>
    void add_rows(int count, const TiledFetch& fetch, Sums* sums) const {
        const bool full = count == kMostTiledRows && blocks.count % kTiledRun == 0;
        full ? add_all<Kind, Minimum, true>(count, fetch, sums) : add_all<Kind, Minimum, false>(count, fetch, sums);
    }

    template <int Kind>
    void add_kind(int count, const TiledFetch& fetch, Sums* sums) const {
        blocks.minimum ? add_rows<Kind, true>(count, fetch, sums) : add_rows<Kind, false>(count, fetch, sums);
    }
};

void configure_for(int rows) {
    const uint8_t of_x = static_cast<uint8_t>(rows);
    const uint8_t sizes[8] = {of_x, of_x, kSteps / 2, kSteps / 2, of_x, of_x, of_x, of_x};
    const uint8_t widths[8] = {64, 64, 64, 64, 32, 32, 32, 32};
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
