// Quantizing rows of activations to int8, in groups of 32 or 128 columns.
#include "linear_int8_rows.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

constexpr int kColumns = IntegerLayout::kColumns;

// Note the scale of a row's group of 32, and the sums of its integers.
void note(const QuantizedRows& rows, const Quantization& of, int64_t row, int64_t group, float scale,
          const int32_t (&sums)[2]) {
    rows.scales[group * rows.count + row] = scale;
    for (int h = 0; h < of.halves; h++) {
        const int32_t sum = of.halves == 2 ? sums[h] : sums[0] + sums[1];
        const int64_t at = (group * of.halves + h) * rows.count + row;
        rows.sums[at] = static_cast<float>(sum);
        rows.first[at] = -of.zero * sum;
    }
}

void quantize_by_32(const QuantizedRows& rows, const Row& row, int64_t token, const Quantization& of) {
    const int64_t first = token * of.passes, groups = (row.count + kColumns - 1) / kColumns * 2;
    for (int64_t g = 0; g < groups; g++) {
        int32_t sums[2], rest_sums[2];
        int8_t* x = rows.block(first, g / 2) + g % 2 * 32;
        if (of.passes == 1) {
            note(rows, of, first, g, to_int8_by_32(row, 32 * g, x, sums), sums);
        } else {
            const float scale = to_int8_twice_by_32(row, 32 * g, x, x + kColumns, sums, rest_sums);
            note(rows, of, first, g, scale, sums);
            note(rows, of, first + 1, g, scale / 254.0f, rest_sums);
        }
    }
}

// All groups of 32 in 128 columns get the same scale.
void quantize_by_128(const QuantizedRows& rows, const Row& row, int64_t token, const Quantization& of) {
    constexpr int halves = 2 * kCoarseBlocks * 2;
    const int64_t width = round_up(row.count, kColumns);
    for (int64_t first = 0; first < width; first += kLanes * halves) {
        int32_t sums[halves];
        const int64_t count = std_min(width - first, kLanes * halves);
        const float scale = to_int8_by_halves<halves>(row, first, count, [&](int half, i32x16 x, int32_t sum) {
            narrow_i8(rows.block(token, first / kColumns + half / 4) + half % 4 * kLanes, x);
            sums[half] = sum;
        });
        for (int64_t g = 0; g < count / 32; g++)
            note(rows, of, token, first / 32 + g, scale, {sums[2 * g], sums[2 * g + 1]});
    }
}

}  // namespace

void QuantizedRows::quantize(const Row& row, int64_t token, const Quantization& of) const {
    of.coarse ? quantize_by_128(*this, row, token, of) : quantize_by_32(*this, row, token, of);
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
