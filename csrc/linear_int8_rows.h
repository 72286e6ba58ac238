// Rows of activations in int8, for products with integer weights.
#pragma once

#include "linear_integer_layout.h"
#include "rows.h"

namespace penstock {
namespace PENSTOCK_ISA {

// How a row is quantized.
struct Quantization {
    int64_t passes;  // int8 rows per token: the rounded values and, if two, the quantized remainders
    int halves;      // groups of the weight per 32 columns: 2 if they have 16 columns
    int32_t zero;    // to subtract from the weight's values: their centre, in integer sums
    bool coarse;     // a scale for 128 columns, not for 32
};

// What products of adjacent rows need lies together.
struct QuantizedRows {
    int8_t* x;       // [blocks][count][64]
    float* scales;   // [groups of 32][count]: equal ones for the groups of 128 columns that share one
    float* sums;     // [groups of 32 or 16][count]: sums of x
    int32_t* first;  // [groups of 32 or 16][count]: initial values of integer sums, which subtract the centre's products
    int64_t count;   // rows, with padding

    // Rows with padding, so that many rows' blocks use different cache sets.
    static int64_t padded(int64_t rows) { return rows < kPaddedRows ? rows : rows | 1; }
    static constexpr int64_t kPaddedRows = 16;

    int8_t* block(int64_t row, int64_t at) const { return x + (at * count + row) * IntegerLayout::kColumns; }

    // Quantize a token's row. Compiled once: copies for all kinds of weights would take ten seconds.
    void quantize(const Row& row, int64_t token, const Quantization& of) const;
};

}  // namespace PENSTOCK_ISA
}  // namespace penstock
