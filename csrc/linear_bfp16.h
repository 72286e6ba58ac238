// bfloat16 weights as integers with a shared exponent, for processors that do not multiply bfloat16.
//
//   block = 64 columns     [64 rows] scales (bfloat16), then 32 steps of 2 int16
//
// Integer units have twice the rate of float32. 64 neighbouring columns share the exponent of their largest value,
// whose magnitude takes 13 bits for weights and 12 bits for activations, so that 64 products fit an int32. A bfloat16
// (8 bits) within 2⁻⁵ of its block's largest weight, or within 2⁻⁴ of the largest activation, is represented exactly;
// smaller ones are rounded at 2⁻¹³ or 2⁻¹² of the largest.
#pragma once

#include "linear_kind.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

struct Bfp16 : AlikeBlocks<64, 2 * kPanel, 2 * kPanel + 32 * kLine> {
    static constexpr int kSteps = 32, kSlice = 1, kLongSlice = kSlice, kRows = kMaxRows, kRowsAlone = kRows,
                         kOpened = 1;
    int16_t* x;     // [tokens][blocks][64]
    float* scales;  // [tokens][blocks]
    int64_t blocks, stride;

    static int64_t bytes_per_token(int64_t columns) {
        return round_up(columns, kColumns) * 2 + kSkewBytes + round_up(columns, kColumns) / kColumns * 4;
    }
    Bfp16(const Weight& weight, uint8_t* scratch, int64_t tokens)
        : x(reinterpret_cast<int16_t*>(scratch)), blocks(round_up(weight.columns, kColumns) / kColumns),
          stride(blocks * kColumns + kSkewBytes / 2) {
        scales = reinterpret_cast<float*>(x + tokens * stride);
    }

    static void pack(const Weight&, const Source& source, int64_t at, uint8_t* block, int lane, uint8_t* words) {
        int16_t values[kColumns];
        write_value(block, kBFloat16, lane, share_exponent(source.values, at * kColumns, 13, 8190, values));
        std::memcpy(words, values, sizeof values);
    }
    static void unpack(const Weight&, const uint8_t* block, int64_t, int lane, float* values) {
        const float scale = value_of(block, kBFloat16, lane);
        for (int i = 0; i < kColumns; i++) {
            int16_t value;
            std::memcpy(&value, element(block + kHeader, i / 2, lane) + 2 * (i % 2), 2);
            values[i] = static_cast<float>(value) * scale;
        }
    }

    void prepare(const Row& row, int64_t token) const {
        for (int64_t b = 0; b < blocks; b++)
            scales[token * blocks + b] =
                share_exponent(row, b * kColumns, 12, 4095, x + token * stride + b * kColumns);
    }

    static const uint8_t* open(const Slice& slice, uint8_t*) { return slice.data; }

    template <int R>
    __attribute__((noinline)) void accumulate(const Slice& slice, const uint8_t*, int64_t token, Fetch& prefetch,
                                              Sums* sums) const {
        for (int first = 0; first < kVectors; first += kWide) {
            i32x16 sum[R][kWide];
            for_sums<R>([&](int r, int v) { sum[r][v] = zero_i32(); });
            multiply<DotInt16, R>(sum, slice.data + kHeader + 64 * first,
                                  reinterpret_cast<const uint8_t*>(x + token * stride + slice.first * kColumns),
                                  2 * stride, kColumns / 2, prefetch);
            const auto weight_scale = [&](int v) { return load_bf16(slice.data + 32 * (first + v)); };
            add_scaled<R>([&](int r) { return [&of = sum[r]](int v) { return to_f32(of[v]); }; }, weight_scale,
                          scales + token * blocks + slice.first, blocks, first, sums);
        }
    }

    static void begin(int64_t, Sums& sums) { sums.fill(zero_f32()); }
};

}  // namespace
}  // namespace PENSTOCK_ISA
}  // namespace penstock
