// Multiplies a panel of bfloat16 weights with AMX tiles: sums in float32, 32 columns at a time in order, independent of
// the other rows in the tiles.
#pragma once

#include "linear_bfloat16.h"
#include "tiles.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

constexpr int kTileRows = 2 * kTile;     // rows of x, and of the weight, accumulated in tiles at a time
constexpr int kWholePanel = 1 << 30;     // blocks of a slice: the whole panel accumulates in tiles

struct TiledBFloat16 : BFloat16 {
    using BFloat16::BFloat16;
    static constexpr int kRows = kTileRows, kRowsAlone = kRows, kSlice = kWholePanel, kLongSlice = kSlice;
    using Registers = TilesInUse;

    void accumulate(int rows, const Slice& slice, int64_t token, Fetch& prefetch, Sums* sums) const {
        const Tiles tiles(rows);
        for (int first = 0; first < kPanel; first += kTileRows) {
            tiles.zero();
            for (int64_t b = 0; b < slice.count; b++) {
                if (first == 0) prefetch.steps(kSteps);
                tiles.add_bf16(row_at(token, b), 2 * stride, slice.data + b * kBytes + 4 * first, kLine);
            }
            tiles.store(sums->lane[first / kLanes], sizeof(Sums));
        }
    }

    static void begin(int64_t, Sums&) {}
};

struct TiledBFloat12 : BFloat12 {
    using BFloat12::BFloat12;
    static constexpr int kRows = kTileRows, kRowsAlone = kRows, kTiledRows = kRows, kLongSlice = kSlice,
                         kOpened = kSteps * kLine;
    using Registers = TilesInUse;
    static_assert(kSlice == 1, "a slice is one block");

    void accumulate(int rows, const Slice& slice, int64_t token, Fetch& prefetch, Sums* sums) const {
        if (rows == 1) return accumulate_alone(slice, token, prefetch, *sums);
        alignas(64) uint8_t bytes[kOpened];
        accumulate_tiled(rows, slice, BFloat12::open(slice, bytes), token, prefetch, sums);
    }

    // One row has the bits that tiles give it, without unpacking to memory: see `tiles.h` for their order of sums.
    __attribute__((noinline)) void accumulate_alone(const Slice& slice, int64_t token, Fetch& fetched, Sums& sums) const {
        constexpr int wide = 2, units = 2 * kTile / kUnit;  // vectors at a time; units of a tile
        const FlushingSubnormals flushing;
        for (int first = 0; first < kVectors; first += wide) {
            Fetch prefetch = fetched;  // in registers
            const uint8_t *row = row_at(token, slice.first), *data = slice.data + kHeader + first * kVectorBytes;
            f32x16 sum[wide];
            i32x16 table[wide];
            for (int v = 0; v < wide; v++) sum[v] = load_f32(sums.lane[first + v]);
            for (int v = 0; v < wide; v++) table[v] = load_table(slice.data + 16 * (first + v));
            for (int tile = 0; tile < kSteps / kTile; tile++) {
                f32x16 even[wide], odd[wide];
                for (int v = 0; v < wide; v++) even[v] = odd[v] = zero_f32();
                for (int unit = 0; unit < units; unit++, row += 2 * kUnit, data += kUnitBytes) {
                    prefetch.steps(kUnit / 2 * wide / kWide);
                    i32x16 steps[wide][4];
#pragma GCC unroll 2
                    for (int v = 0; v < wide; v++) open_vector(data + v * kVectorBytes, table[v], steps[v]);
#pragma GCC unroll 4
                    for (int step = 0; step < 4; step++) {
                        int32_t bits;
                        std::memcpy(&bits, row + 4 * step, 4);
                        const i32x16 pair = set_i32(bits);
                        const f32x16 even_x = even_bf16(pair), odd_x = odd_bf16(pair);
#pragma GCC unroll 2
                        for (int v = 0; v < wide; v++) {
                            even[v] = fma(even_x, even_bf16(steps[v][step]), even[v]);
                            odd[v] = fma(odd_x, odd_bf16(steps[v][step]), odd[v]);
                        }
                    }
                }
                for (int v = 0; v < wide; v++) sum[v] = add(sum[v], add(even[v], odd[v]));
            }
            for (int v = 0; v < wide; v++) store_f32(sums.lane[first + v], sum[v]);
            fetched = prefetch;
        }
    }

    // Several groups of rows share an unpacked slice.
    void accumulate_tiled(int rows, const Slice& slice, const uint8_t* opened, int64_t token, Fetch& prefetch,
                          Sums* sums) const {
        const Tiles tiles(rows);
        for (int first = 0; first < kPanel; first += kTileRows) {
            tiles.load(sums->lane[first / kLanes], sizeof(Sums));
            for (int step = 0; step < kSteps; step += kTile) {
                if (first == 0) prefetch.steps(kTile);
                tiles.add_bf16(row_at(token, slice.first) + 4 * step, 2 * stride,
                               opened + step * kLine + 4 * first, kLine);
            }
            tiles.store(sums->lane[first / kLanes], sizeof(Sums));
        }
    }
};

}  // namespace
}  // namespace PENSTOCK_ISA
}  // namespace penstock
