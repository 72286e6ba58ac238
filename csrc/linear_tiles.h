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

    void accumulate(int rows, const Slice& slice, int64_t token, Fetch& prefetch, Sums* sums) const {
        alignas(64) uint8_t bytes[kOpened];
        accumulate_tiled(rows, slice, BFloat12::open(slice, bytes), token, prefetch, sums);
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
