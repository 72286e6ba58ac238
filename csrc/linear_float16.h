// float16 weights, multiplied exactly as float32.
//
//   block = 2 columns, 1 step
//
// Each half of a line's vector is converted to float32: 8 rows of 2 columns. A row's even and odd columns have separate
// sums, added at the end of a slice; all slices have the same length, so the order of summation is fixed.
#pragma once

#include "linear_kind.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

struct Float16 : AlikeBlocks<2, 0, kLine> {
    static constexpr int kSteps = 1, kSlice = 32, kLongSlice = kSlice, kRows = kMaxRows, kRowsAlone = kRows,
                         kOpened = kSlice * 2 * kLine;
    float* x;
    int64_t stride;

    static int64_t bytes_per_token(int64_t columns) { return 4 * round_up(columns, kLanes) + kSkewBytes; }
    Float16(const Weight& weight, uint8_t* scratch, int64_t)
        : x(reinterpret_cast<float*>(scratch)), stride(bytes_per_token(weight.columns) / 4) {}

    static void pack(const Weight&, const Source& source, int64_t at, uint8_t*, int, uint8_t* words) {
        std::memset(words, 0, 4);
        for (int64_t i = 0; i < std_min(kColumns, source.values.count - at * kColumns); i++) {
            const int64_t place = source.values.first + at * kColumns + i;
            write_value(words, kFloat16, i, value_of(source.values.data, source.values.dtype, place));
        }
    }
    static void unpack(const Weight&, const uint8_t* block, int64_t, int lane, float* values) {
        for (int i = 0; i < kColumns; i++) values[i] = value_of(element(block, 0, lane), kFloat16, i);
    }

    void prepare(const Row& row, int64_t token) const {
        for (int64_t i = 0; i < stride - kSkewBytes / 4; i += kLanes) store_f32(x + token * stride + i, row.at(i));
    }

    // A slice's lines in float32, which takes twice the space.
    static const uint8_t* open(const Slice& slice, uint8_t* bytes) {
        for (int64_t half = 0; half < slice.count * 2 * kVectors; half++)
            store_i32(bytes + 64 * half, bits_as_i32(load_f16(slice.data + 32 * half)));
        return bytes;
    }

    template <int R>
    __attribute__((noinline)) void accumulate(const Slice& slice, const uint8_t* opened, int64_t token, Fetch& prefetch,
                                              Sums* sums) const {
        if (opened == slice.data) {
            add_halves<R>([](const uint8_t* data) { return load_f16(data); }, slice.data, 32, slice, token, prefetch, sums);
        } else {
            add_halves<R>([](const uint8_t* data) { return bits_as_f32(load_i32(data)); }, opened, 64, slice, token, prefetch,
                   sums);
        }
    }

    static void begin(int64_t, Sums& sums) { sums.fill(zero_f32()); }

  private:
    // Add the products with the half vectors that `load` reads, `bytes` apart.
    template <int R, class Load>
    inline __attribute__((always_inline)) void add_halves(const Load& load, const uint8_t* halves, int64_t bytes,
                                                   const Slice& slice, int64_t token, Fetch& fetched,
                                                   Sums* sums) const {
        const float* row = x + token * stride + slice.first * kColumns;
        const int64_t count = slice.count;
        for (int first = 0; first < 2 * kVectors; first += kWide) {
            Fetch prefetch = fetched;  // in registers
            const uint8_t* data = halves + first * bytes;
            f32x16 sum[R][kWide];
            for_sums<R>([&](int r, int v) { sum[r][v] = zero_f32(); });
            for (int64_t step = 0; step < count; step++, data += 2 * kVectors * bytes) {
                if (first % (2 * kWide) == 0) prefetch.steps(1);
                f32x16 weight[kWide];
#pragma GCC unroll 4
                for (int v = 0; v < kWide; v++) weight[v] = load(data + v * bytes);
#pragma GCC unroll 6
                for (int r = 0; r < R; r++) {
                    const f32x16 pair = set_pairs_f32(row + r * stride + kColumns * step);
#pragma GCC unroll 4
                    for (int v = 0; v < kWide; v++) sum[r][v] = fma(pair, weight[v], sum[r][v]);
                }
            }
            fetched = prefetch;
            for_sums<R, kWide / 2>([&](int r, int v) {
                float* lanes = sums[r].lane[first / 2 + v];
                store_f32(lanes, add(load_f32(lanes), add_pairs_f32(sum[r][2 * v], sum[r][2 * v + 1])));
            });
        }
    }
};

}  // namespace
}  // namespace PENSTOCK_ISA
}  // namespace penstock
