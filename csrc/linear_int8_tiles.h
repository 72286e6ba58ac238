// Products of quantized rows with unpacked integer weights by AMX tiles, with the bits that vectors give.
#pragma once

#include "linear_int8_rows.h"

namespace penstock {
namespace PENSTOCK_ISA {

// Unpacked blocks of a panel: [vectors][blocks] of [16 steps][64 bytes], then the scales and the offsets of 16 rows as
// floats, [groups][16] each.
struct TiledBlocks {
    const uint8_t* bytes;
    int64_t first, count;  // blocks
    int halves;            // groups per 32 columns
    bool minimum;          // offsets are minima; otherwise `QuantizedRows::first` has all that is subtracted
    int32_t coarse;        // Coarse
};

constexpr int64_t kTiledRun = 2;  // blocks, as many as share coarse scales

// Add the products of `count` rows of x, at most TiledRows::kMost, with blocks `begin` to `end`, at most kTiledRun, to the
// rows' sums. The thread's tiles are configured. Compiled once, not for each number of bits.
void add_tiled(const QuantizedRows&, const TiledBlocks&, int64_t begin, int64_t end, int64_t token, int count, Sums*);

// Configures the calling thread's tiles for `add_tiled` until the end of the scope.
class TiledRows {
  public:
    static constexpr int kMost = 16;  // rows
    TiledRows(int rows, int halves);
    ~TiledRows();
    TiledRows(const TiledRows&) = delete;
    TiledRows& operator=(const TiledRows&) = delete;
};

}  // namespace PENSTOCK_ISA
}  // namespace penstock
