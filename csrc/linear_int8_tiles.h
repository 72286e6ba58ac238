// Products of quantized rows with unpacked integer weights by AMX tiles, with the bits that vectors give.
#pragma once

#include "linear_int8_rows.h"
#include "tiles.h"

namespace penstock {
namespace PENSTOCK_ISA {

// Unpacked blocks of a panel: [vectors][blocks] of [16 steps][64 bytes], then the scales and the offsets of 16 rows as
// floats, [groups][16] each.
struct TiledBlocks {
    const uint8_t* bytes;
    int64_t first, count;  // blocks
    bool minimum;          // offsets are minima, and bytes unsigned; else bytes are signed, less the zero point
    int32_t coarse;        // Coarse

    static constexpr int kSteps = 16, kLineBytes = 64, kGroups = 2;
    static constexpr int64_t kBytes = kSteps * kLineBytes + 2 * kGroups * 64;  // of a block of 16 rows
};

constexpr int64_t kTiledRun = 2;  // blocks, as many as share coarse scales

// Calls steps(prefetch, n) after n steps; PrefetchThrough is a type of each source.
struct TiledFetch {
    void (*steps)(void* prefetch, int64_t count);
    void* prefetch;
};

constexpr int kMostTiledRows = 16;

// Add the products of `count` rows of x, at most kMostTiledRows, with the blocks to the rows' sums, within the scope of a
// TilesInUse. Compiled once, not for each number of bits.
void add_tiled(const QuantizedRows&, const TiledBlocks&, int64_t token, int count, const TiledFetch&, Sums*);

}  // namespace PENSTOCK_ISA
}  // namespace penstock
