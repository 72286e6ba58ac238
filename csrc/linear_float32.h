// float32 weights: a block is one column, 1 step.
#pragma once

#include "linear_kind.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

struct Float32 : AlikeBlocks<1, 0, kLine> {
    static constexpr bool kOpensLong = true;
    static constexpr int kSteps = 1, kSlice = 32, kLongSlice = 384, kTileTokens = 384, kRows = kMaxRows,
                         kRowsAlone = kRows, kOpened = 1;
    float* x;
    int64_t stride;

    static int64_t bytes_per_token(int64_t columns) { return 4 * columns + kSkewBytes; }
    Float32(const Weight& weight, uint8_t* scratch, int64_t)
        : x(reinterpret_cast<float*>(scratch)), stride(weight.columns + kSkewBytes / 4) {}

    static void pack(const Weight&, const Source& source, int64_t at, uint8_t*, int, uint8_t* words) {
        const float value = value_of(source.values.data, source.values.dtype, source.values.first + at);
        std::memcpy(words, &value, 4);
    }
    static void unpack(const Weight&, const uint8_t* block, int64_t, int lane, float* values) {
        std::memcpy(values, element(block, 0, lane), 4);
    }

    void prepare(const Row& row, int64_t token) const {
        float* target = x + token * stride;
        for (int64_t i = 0; i < row.count; i += kLanes) row.store_f32_at(target, i, row.at(i));
    }

    static const uint8_t* open(const Slice& slice, uint8_t*) { return slice.data; }

    template <int R>
    __attribute__((noinline)) void accumulate(const Slice& slice, const uint8_t*, int64_t token, Fetch& prefetch,
                                              Sums* sums) const {
        for (int first = 0; first < kVectors; first += kWide) {
            f32x16 sum[R][kWide];
            for_sums<R>([&](int r, int v) { sum[r][v] = load_f32(sums[r].lane[first + v]); });
            multiply<DotFloat32, R>(sum, slice.data + 64 * first,
                                    reinterpret_cast<const uint8_t*>(x + token * stride + slice.first), 4 * stride,
                                    slice.count, prefetch);
            for_sums<R>([&](int r, int v) { store_f32(sums[r].lane[first + v], sum[r][v]); });
        }
    }

    static void begin(int64_t, Sums& sums) { sums.fill(zero_f32()); }
};

}  // namespace
}  // namespace PENSTOCK_ISA
}  // namespace penstock
