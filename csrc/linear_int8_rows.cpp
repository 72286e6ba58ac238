// Quantizing rows of activations to int8, in groups of 32 or 128 columns.
#include "linear_int8_rows.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

constexpr int kColumns = IntegerLayout::kColumns;

// The scale of integers from -127 to 127 whose largest element has the magnitude `most`; NaN if that is NaN or infinite.
struct Scale {
    float value;
    f32x16 factor;
    i32x16 mask;  // no bits if all elements are too small, or one is NaN or infinite: integers are then zeros

    explicit Scale(float most) {
        const bool usable = most >= 1e-30f && most <= 3e38f;
        value = usable ? most / 127.0f : 0.0f * most;
        factor = set_f32(usable ? 127.0f / most : 0.0f), mask = set_i32(usable ? -1 : 0);
    }
    i32x16 round(f32x16 x) const { return bit_and(round_to_i32(mul(x, factor)), mask); }
};

// Note the sums of the integers of a row's groups of 32 columns, at most 4 from `group` on, or of their halves.
PENSTOCK_INLINE void note(const QuantizedRows& rows, const Quantization& of, int64_t row, int64_t group, int64_t groups,
                          i32x16 bytes, i32x16 more_bytes) {
    const auto by_4 = [](i32x16 integers) {
        return to_f32(add_pairs_i16(zero_i32(), pairs_u8_i8(set_i32(0x01010101), integers)));
    };
    const f32x16 by_8 = add_pairs_f32(by_4(bytes), by_4(more_bytes)), by_16 = add_pairs_f32(by_8, by_8);
    const f32x16 sums = of.halves == 2 ? by_16 : add_pairs_f32(by_16, by_16);
    alignas(64) float sum[kLanes];
    alignas(64) int32_t first[kLanes];
    store_f32(sum, sums);
    store_i32(first, round_to_i32(mul(sums, set_f32(static_cast<float>(-of.zero)))));  // exact: below 2^24
    const int64_t begin = group * of.halves * rows.count + row;
#pragma GCC unroll 1
    for (int64_t i = 0, at = begin; i < groups * of.halves; i++, at += rows.count) {
        rows.sums[at] = sum[i];
        rows.first[at] = first[i];
    }
}

// Arguments of these are passed by value: stores cannot alias them.
//
// With a second pass, the rounding errors of a row follow it as another row, in units of scale / 254.
void quantize_by_32(const QuantizedRows rows, const Row& row, int64_t token, const Quantization of) {
    const int64_t first = token * of.passes, blocks = (row.count + kColumns - 1) / kColumns;
    for (int64_t block = 0; block < blocks; block++) {
        row.reading(block * kColumns, kColumns, [&](const auto& load) {
            const auto half = [&](int64_t from) { return [&load, from](int64_t i) { return load(from + i); }; };
            const Scale scales[2] = {Scale(largest(half(0), 32)), Scale(largest(half(32), 32))};
            i32x16 integers[4];
            for (int i = 0; i < 4; i++) integers[i] = scales[i / 2].round(load(i * kLanes));
            const auto put = [&](int64_t at, float unit) {
                const i32x16 bytes = narrow_i8(integers[0], integers[1], integers[2], integers[3]);
                store_i32(rows.block(at, block), bytes);
                for (int g = 0; g < 2; g++) rows.scales[(2 * block + g) * rows.count + at] = scales[g].value / unit;
                note(rows, of, at, 2 * block, 2, bytes, bytes);
            };
            put(first, 1.0f);
            if (of.passes == 1) return;
            for (int i = 0; i < 4; i++) {
                const float step = scales[i / 2].value;
                const f32x16 left = fnma(to_f32(integers[i]), set_f32(step), load(i * kLanes));
                const bool usable = step > 0.0f;  // otherwise all elements are zero, or one is NaN
                integers[i] = usable ? round_to_i32(mul(left, set_f32(254.0f / step))) : zero_i32();
            }
            put(first + 1, 254.0f);
        });
    }
}

// All groups of 32 in 128 columns get the same scale.
void quantize_by_128(const QuantizedRows rows, const Row& row, int64_t token, const Quantization of) {
    const int64_t blocks = (row.count + kColumns - 1) / kColumns;
    for (int64_t block = 0; block < blocks; block += kCoarseBlocks) {
        row.reading(block * kColumns, kCoarseBlocks * kColumns, [&](const auto& load) {
            const int64_t count = std_min(blocks - block, kCoarseBlocks);
            const Scale scale(largest(load, kCoarseBlocks * kColumns));
            i32x16 bytes[kCoarseBlocks];
            for (int64_t b = 0; b < kCoarseBlocks; b++) {
                const auto integers = [&](int64_t i) { return scale.round(load(b * kColumns + i * kLanes)); };
                bytes[b] = narrow_i8(integers(0), integers(1), integers(2), integers(3));
                if (b < count) store_i32(rows.block(token, block + b), bytes[b]);
            }
#pragma GCC unroll 1
            for (int64_t g = 2 * block; g < 2 * (block + count); g++) rows.scales[g * rows.count + token] = scale.value;
            note(rows, of, token, 2 * block, 2 * count, bytes[0], bytes[1]);
        });
    }
}

}  // namespace

void QuantizedRows::quantize(const Row& row, int64_t token, const Quantization& of) const {
    of.coarse ? quantize_by_128(*this, row, token, of) : quantize_by_32(*this, row, token, of);
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
