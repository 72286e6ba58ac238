// FP8 weights (e4m3: sign, 4 exponent bits with bias 7, 3 mantissa bits) with a float32 scale for each 128 columns of a
// row, multiplied exactly: as bfloat16, which represents every e4m3 value, or as float32.
//
//   block = 64 columns     16 lines of 4 columns, a row's bytes in the column order 0 2 1 3
//
// Every second block is preceded by the scales, [64 rows], of itself and the next. In this column order, the low bytes
// of a lane's two halves are one pair of columns and the high bytes the next, as bfloat16 dot products need them.
#pragma once

#include <utility>

#include "linear_integer_layout.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

// Base of both kinds. e4m3 has no infinities; NaN, its only other special value, is refused when weights are packed.
struct Float8 : InBlocks {
    static constexpr int kColumns = IntegerLayout::kColumns, kLines = 16, kSlice = 1, kLongSlice = kSlice,
                         kRows = kMaxRows, kRowsAlone = kRows;
    IntegerLayout layout;

    explicit Float8(const Weight& weight) : layout(weight) {}

    static int64_t block_bytes(const Weight& weight) { return IntegerLayout(weight).block; }
    static int64_t header_bytes(const Weight&) { return 0; }
    static int64_t offset_of(const Weight& weight, int64_t block) { return IntegerLayout(weight).offset_of(block); }

    static void pack(const Weight& weight, const Source& source, int64_t at, uint8_t* block, int lane, uint8_t* words) {
        const IntegerLayout layout(weight);
        if (at % layout.span == 0)
            std::memcpy(layout.span_of(block, at) + 4 * lane, source.scales + at / layout.span * 4, 4);
        source.copy<kColumns>(at * kColumns, words);
        for (int i = 0; i < kColumns; i += 4) std::swap(words[i + 1], words[i + 2]);
    }

    static void unpack(const Weight& weight, const uint8_t* block, int64_t at, int lane, float* values) {
        const float scale = value_of(IntegerLayout(weight).span_of(block, at), kFloat32, lane);
        for (int i = 0; i < kColumns; i++) {
            const uint8_t code = element(block, i / 4, lane)[i % 4 == 1 ? 2 : i % 4 == 2 ? 1 : i % 4];
            const int exponent = code >> 3 & 15, mantissa = code & 7;
            const float small = static_cast<float>(mantissa) / 512, large = static_cast<float>(8 + mantissa) / 1024;
            const float value = exponent ? large * static_cast<float>(1 << exponent) : small;
            values[i] = (code & 128 ? -value : value) * scale;
        }
    }

    // Add a block's sums times its scales to the rows' sums.
    template <int R, int Wide>
    inline __attribute__((always_inline)) void add_scaled_block(const f32x16 (&sum)[R][Wide], const Slice& slice,
                                                                int first, Sums* sums) const {
        const float* scales = reinterpret_cast<const float*>(layout.span_of(slice.data, slice.first));
        for_sums<R, Wide>([&](int r, int v) {
            float* lanes = sums[r].lane[first + v];
            store_f32(lanes, fma(sum[r][v], load_f32(scales + (first + v) * kLanes), load_f32(lanes)));
        });
    }

    static void begin(int64_t, Sums& sums) { sums.fill(zero_f32()); }
};

// Activations in float32, on every instruction set.
struct Float8By32 : Float8 {
    static constexpr int kSteps = kColumns, kOpened = kColumns * kLine;
    float* x;
    int64_t stride;

    static int64_t bytes_per_token(int64_t columns) { return 4 * round_up(columns, kColumns) + kSkewBytes; }
    Float8By32(const Weight& weight, uint8_t* scratch, int64_t)
        : Float8(weight), x(reinterpret_cast<float*>(scratch)), stride(bytes_per_token(weight.columns) / 4) {}

    void prepare(const Row& row, int64_t token) const {
        for (int64_t i = 0; i < stride - kSkewBytes / 4; i += kLanes) store_f32(x + token * stride + i, row.at(i));
    }

    // One column of a line: byte `Place` of each lane.
    template <int Place>
    static inline __attribute__((always_inline)) f32x16 column(i32x16 line) {
        // Subnormals (exponent 0): 1.m * 2^-7 stands for 0.m * 2^-6, which is twice that minus 2^-6; other values are
        // larger.
        i32x16 bits = line;
        if constexpr (Place < 3) bits = shift_left<20 - 8 * Place>(bits);
        if constexpr (Place == 3) bits = shift_right<4>(bits);
        const i32x16 magnitude = add(bit_and(bits, set_i32(0x07f00000)), set_i32(120 << 23));
        const f32x16 value = bits_as_f32(magnitude);
        const f32x16 right = min(value, fma(value, set_f32(2.0f), set_f32(-0x1p-6f)));
        const i32x16 sign = bit_and(shift_left<24 - 8 * Place>(line), set_i32(static_cast<int32_t>(0x80000000)));
        return bits_as_f32(bit_or(bits_as_i32(right), sign));
    }
    static inline __attribute__((always_inline)) void columns(i32x16 line, f32x16 (&values)[4]) {
        values[0] = column<0>(line), values[1] = column<2>(line);
        values[2] = column<1>(line), values[3] = column<3>(line);
    }

    static const uint8_t* open(const Slice& slice, uint8_t* bytes) {
        for (int step = 0; step < kLines; step++) {
            for (int v = 0; v < kVectors; v++) {
                f32x16 values[4];
                columns(load_i32(slice.data + step * kLine + 64 * v), values);
                for (int i = 0; i < 4; i++)
                    store_i32(bytes + (4 * step + i) * kLine + 64 * v, bits_as_i32(values[i]));
            }
        }
        return bytes;
    }

    template <int R>
    __attribute__((noinline)) void accumulate(const Slice& slice, const uint8_t* opened, int64_t token, Fetch& prefetch,
                                              Sums* sums) const {
        alignas(64) uint8_t bytes[kOpened];
        if (opened == slice.data) opened = open(slice, bytes);
        const uint8_t* row = reinterpret_cast<const uint8_t*>(x + token * stride + slice.first * kColumns);
        for (int first = 0; first < kVectors; first += kWide) {
            f32x16 sum[R][kWide];
            for_sums<R>([&](int r, int v) { sum[r][v] = zero_f32(); });
            multiply<DotFloat32, R>(sum, opened + 64 * first, row, 4 * stride, kColumns, prefetch);
            add_scaled_block(sum, slice, first, sums);
        }
    }
};

#if defined(PENSTOCK_MULTIPLIES_BFLOAT16)

// Activations in bfloat16.
struct Float8By16 : Float8 {
    static constexpr int kSteps = kColumns / 2, kOpened = kSteps * kLine;
    uint16_t* x;
    int64_t stride;

    static int64_t bytes_per_token(int64_t columns) { return 2 * round_up(columns, kColumns) + kSkewBytes; }
    Float8By16(const Weight& weight, uint8_t* scratch, int64_t)
        : Float8(weight), x(reinterpret_cast<uint16_t*>(scratch)), stride(bytes_per_token(weight.columns) / 2) {}

    void prepare(const Row& row, int64_t token) const {
        for (int64_t i = 0; i < stride - kSkewBytes / 2; i += kLanes) store_bf16(x + token * stride + i, row.at(i));
    }

    // The first and second pair of a line's columns as bfloat16.
    static inline __attribute__((always_inline)) void pairs(i32x16 line, i32x16& first, i32x16& second) {
        first = e4m3_as_bf16(line, shift_left<4>(line), shift_left<8>(line));
        const i32x16 high = shift_right<8>(line);
        second = e4m3_as_bf16(high, shift_right<4>(line), line);
    }

    static const uint8_t* open(const Slice& slice, uint8_t* bytes) {
        for (int step = 0; step < kLines; step++) {
            for (int v = 0; v < kVectors; v++) {
                i32x16 first, second;
                pairs(load_i32(slice.data + step * kLine + 64 * v), first, second);
                store_i32(bytes + 2 * step * kLine + 64 * v, first);
                store_i32(bytes + (2 * step + 1) * kLine + 64 * v, second);
            }
        }
        return bytes;
    }

    // Few rows use the packed weights directly; more rows use the unpacked slice.
    template <int R>
    __attribute__((noinline)) void accumulate(const Slice& slice, const uint8_t* opened, int64_t token, Fetch& fetched,
                                              Sums* sums) const {
        const uint8_t* row = reinterpret_cast<const uint8_t*>(x + token * stride + slice.first * kColumns);
        for (int first = 0; opened != slice.data && first < kVectors; first += kWide) {
            f32x16 sum[R][kWide];
            for_sums<R>([&](int r, int v) { sum[r][v] = zero_f32(); });
            multiply<DotBFloat16, R>(sum, opened + 64 * first, row, 2 * stride, kColumns / 2, fetched);
            add_scaled_block(sum, slice, first, sums);
        }
        if (opened != slice.data) return;
        constexpr int wide = R > 4 ? kWide / 2 : kWide;
        for (int first = 0; first < kVectors; first += wide) {
            f32x16 sum[R][wide];
            for_sums<R, wide>([&](int r, int v) { sum[r][v] = zero_f32(); });
            Fetch prefetch = fetched;  // in registers
            for (int step = 0; step < kLines; step++) {
                prefetch.steps(wide / (kWide / 2));
#pragma GCC unroll 4
                for (int v = 0; v < wide; v++) {
                    i32x16 weight[2];
                    pairs(load_i32(slice.data + step * kLine + 64 * (first + v)), weight[0], weight[1]);
#pragma GCC unroll 2
                    for (int pair = 0; pair < 2; pair++) {
#pragma GCC unroll 6
                        for (int r = 0; r < R; r++) {
                            int32_t bits;
                            std::memcpy(&bits, row + 2 * r * stride + 8 * step + 4 * pair, 4);
                            sum[r][v] = dot_bf16(sum[r][v], weight[pair], set_i32(bits));
                        }
                    }
                }
            }
            fetched = prefetch;
            add_scaled_block(sum, slice, first, sums);
        }
    }
};

#endif

}  // namespace
}  // namespace PENSTOCK_ISA
}  // namespace penstock
