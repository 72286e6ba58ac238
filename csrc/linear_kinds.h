// How weights are packed, and the sums of products over a panel of them.
//
// A weight is cut into panels of 32 rows, and a panel into blocks along its columns; blocks of a panel follow one
// another, so that a thread reads its panels as one stream. One vector holds 16 rows:
//
//   float32   block = 1 column             [2 halves][16 rows] float32
//   block16   block = 64 columns           [32 rows] scales (bfloat16), then
//                                          [32 pairs of columns][2 halves][16 rows][2 columns] int16
//   bfloat16  block = 32 columns           [16 pairs of columns][2 halves][16 rows][2 columns] bfloat16
//   int8      block = 64 columns           [16 quads of columns][2 halves][16 rows][4 columns] uint8, value + 128
//   int4      block = 128 columns          [32 rows] scales (float16), [32 rows] zeros (uint8), 32 bytes unused, then
//                                          [16][2 halves][16 rows][4] bytes: low nibbles are the columns 4 q to 4 q + 3,
//                                          high nibbles those 64 further on
//
// A gated weight has 16 rows of the gate in the first halves of its panels and their 16 rows of `up` in the second.
//
// bfloat16 is for machines with tiles (`linear_tiles.h`): half a block is a tile of 16 lines of 64 bytes, 128 apart.
//
// block16 is how bfloat16 weights meet the integer units of machines without bfloat16 arithmetic, at twice the rate of
// float32: 64 neighbours share the exponent of their largest, whose magnitude takes 13 bits for weights and 12 bits
// for activations; 64 products of them fit an int32. A bfloat16 (8 bits) within 2⁻⁵ of its block's largest weight, or
// within 2⁻⁴ of the largest activation, is held exactly; what is smaller is rounded at 2⁻¹³ or 2⁻¹² of the largest.
#pragma once

#include "ops.h"
#include "rows.h"
#include "simd.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

constexpr int kPanel = 32;
#if defined(__AVX512F__)
constexpr int kMaxRows = 12;  // of x that one pass over a panel serves: their sums fill the registers
#else
constexpr int kMaxRows = 2;
#endif
constexpr int64_t kChunkBytes = 512 << 10;  // of activations that stay in a core's cache while panels pass
constexpr int kPrefetchBytes = 2048;
constexpr int kSkewBytes = 64;  // between rows of activations, which would else compete for the same places in the cache

// What to fetch while blocks are computed, a little with each step of a block: many lines at once would have to wait for
// one another.
struct Prefetch {
    const uint8_t* next;  // for the first block; later blocks fetch what follows
    int lines;            // of 64 bytes, a block
    bool near;            // into the first cache, not the second

    void fetch_block(int64_t offset) const {
        for (int step = 0; 2 * step < lines; step++) fetch(offset, step);
    }
    // With step `step` of the block at `offset`, two lines.
    void fetch(int64_t offset, int step) const {
        for (int line = 2 * step; line < 2 * step + 2 && line < lines; line++) {
            const char* p = reinterpret_cast<const char*>(next + offset + 64 * line);
            if (near)
                _mm_prefetch(p, _MM_HINT_T0);
            else
                _mm_prefetch(p, _MM_HINT_T1);
        }
    }
};

inline i32x16 repeat_32_bits(const void* p) {
    int32_t bits;
    std::memcpy(&bits, p, 4);
    return set_i32(bits);
}

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

struct Sums {
    f32x16 half[2];
};

struct Float32 {
    static constexpr int kColumns = 1, kBytes = 128, kRows = kMaxRows;
    const float* x;
    int64_t stride;

    static int64_t bytes_per_token(int64_t columns) { return 4 * columns + kSkewBytes; }
    Float32(uint8_t* scratch, int64_t, int64_t columns)
        : x(reinterpret_cast<float*>(scratch)), stride(columns + kSkewBytes / 4) {}

    void prepare(const Row& row, int64_t token) const {
        float* target = const_cast<float*>(x) + token * stride;
        for (int64_t i = 0; i < row.count; i += kLanes) row.store_f32_at(target, i, row.at(i));
    }

    template <int R>
    void panel(const uint8_t* blocks, int64_t count, int64_t token, const Prefetch& prefetch, Sums* sums) const {
        f32x16 sum[R][2];
        for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = zero_f32();
        const float* row = x + token * stride;
        for (int64_t k = 0; k < count; k++) {
            prefetch.fetch(k * kBytes, 0);
            const float* w = reinterpret_cast<const float*>(blocks + k * kBytes);
            f32x16 first = load_f32(w), second = load_f32(w + 16);
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                f32x16 value = set_f32(row[r * stride + k]);
                sum[r][0] = fma(value, first, sum[r][0]);
                sum[r][1] = fma(value, second, sum[r][1]);
            }
        }
        for (int r = 0; r < R; r++) sums[r] = {{sum[r][0], sum[r][1]}};
    }
};

struct Block16 {
    static constexpr int kColumns = 64, kHeader = 64, kBytes = kHeader + 4096, kRows = kMaxRows;
    static constexpr int kBits = 12;  // of an activation's magnitude
    const int16_t* x;                 // [tokens][blocks][64]
    const float* scales;              // [tokens][blocks]
    int64_t blocks, stride;

    static int64_t bytes_per_token(int64_t columns) {
        return round_up(columns, kColumns) * 2 + kSkewBytes + round_up(columns, kColumns) / kColumns * 4;
    }
    Block16(uint8_t* scratch, int64_t tokens, int64_t columns)
        : x(reinterpret_cast<int16_t*>(scratch)), blocks(round_up(columns, kColumns) / kColumns),
          stride(blocks * kColumns + kSkewBytes / 2) {
        scales = reinterpret_cast<const float*>(x + tokens * stride);
    }

    void prepare(const Row& row, int64_t token) const {
        int16_t* target = const_cast<int16_t*>(x) + token * stride;
        float* scale = const_cast<float*>(scales) + token * blocks;
        float poison = row.zero_or_nan();
        for (int64_t b = 0; b < blocks; b++, target += kColumns)
            scale[b] = share_exponent(row, b * kColumns, kBits, 4095, target) + poison;
    }

    template <int R>
    void panel(const uint8_t* block, int64_t count, int64_t token, const Prefetch& prefetch, Sums* sums) const {
        for (int r = 0; r < R; r++) sums[r] = {{zero_f32(), zero_f32()}};
        const int16_t* row = x + token * stride;
        const float* row_scale = scales + token * count;
        for (int64_t b = 0; b < count; b++, block += kBytes, row += kColumns) {
            i32x16 sum[R][2];
            for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = zero_i32();
            const uint8_t* w = block + kHeader;
            for (int pair = 0; pair < kColumns / 2; pair++, w += 128) {
                prefetch.fetch(b * kBytes, pair);
                i32x16 first = load_i32(w), second = load_i32(w + 64);
#pragma GCC unroll 12
                for (int r = 0; r < R; r++) {
                    i32x16 value = repeat_32_bits(row + r * stride + 2 * pair);
                    sum[r][0] = dot_i16(sum[r][0], value, first);
                    sum[r][1] = dot_i16(sum[r][1], value, second);
                }
            }
            f32x16 first = load_bf16(block), second = load_bf16(block + 32);
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                f32x16 scale = set_f32(row_scale[r * count + b]);
                sums[r].half[0] = fma(to_f32(sum[r][0]), mul(first, scale), sums[r].half[0]);
                sums[r].half[1] = fma(to_f32(sum[r][1]), mul(second, scale), sums[r].half[1]);
            }
        }
    }
};

struct BFloat16 {
    static constexpr int kColumns = 32, kBytes = 2048;

    static int64_t bytes_per_token(int64_t columns) { return round_up(columns, kColumns) * 2 + kSkewBytes; }
};

struct Int8 {
    static constexpr int kColumns = 64, kBytes = 2048, kRows = kMaxRows;
    const int8_t* x;        // [tokens][width]
    const float* scales;    // [tokens]
    const int32_t* offset;  // [tokens]: what the weights' offset of 128 adds to a sum, negated
    int64_t width, stride;

    static int64_t bytes_per_token(int64_t columns) { return round_up(columns, kColumns) + kSkewBytes + 8; }
    Int8(uint8_t* scratch, int64_t tokens, int64_t columns)
        : x(reinterpret_cast<int8_t*>(scratch)), width(round_up(columns, kColumns)), stride(width + kSkewBytes) {
        scales = reinterpret_cast<const float*>(x + tokens * stride);
        offset = reinterpret_cast<const int32_t*>(scales + tokens);
    }

    void prepare(const Row& row, int64_t token) const {
        int32_t sum;
        float scale = to_int8(row, 0, width, const_cast<int8_t*>(x) + token * stride, &sum);
        const_cast<float*>(scales)[token] = scale + row.zero_or_nan();
        // Unsigned: of a row that holds what is no number, the sum may be any.
        const_cast<int32_t*>(offset)[token] = static_cast<int32_t>(0u - 128u * static_cast<uint32_t>(sum));
    }

    template <int R>
    void panel(const uint8_t* block, int64_t count, int64_t token, const Prefetch& prefetch, Sums* sums) const {
        i32x16 sum[R][2];
        for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = set_i32(offset[token + r]);
        const int8_t* row = x + token * stride;
        for (int64_t b = 0; b < count; b++, block += kBytes, row += kColumns) {
            const uint8_t* w = block;
            for (int quad = 0; quad < kColumns / 4; quad++, w += 128) {
                prefetch.fetch(b * kBytes, quad);
                i32x16 first = load_i32(w), second = load_i32(w + 64);
#pragma GCC unroll 12
                for (int r = 0; r < R; r++) {
                    i32x16 value = repeat_32_bits(row + r * stride + 4 * quad);
                    sum[r][0] = dot_u8_i8(sum[r][0], first, value);
                    sum[r][1] = dot_u8_i8(sum[r][1], second, value);
                }
            }
        }
        for (int r = 0; r < R; r++) {
            f32x16 scale = set_f32(scales[token + r]);
            sums[r] = {{mul(to_f32(sum[r][0]), scale), mul(to_f32(sum[r][1]), scale)}};
        }
    }
};

struct Int4 {
    static constexpr int kColumns = 128, kHeader = 128, kZeros = 64, kBytes = kHeader + 2048, kRows = kMaxRows;
    const int8_t* x;      // [tokens][blocks][128]
    const float* scales;  // [tokens][blocks]
    const float* totals;  // [tokens][blocks]: the sum of a block's integers
    int64_t blocks, stride;

    static int64_t bytes_per_token(int64_t columns) {
        return round_up(columns, kColumns) + kSkewBytes + round_up(columns, kColumns) / kColumns * 8;
    }
    Int4(uint8_t* scratch, int64_t tokens, int64_t columns)
        : x(reinterpret_cast<int8_t*>(scratch)), blocks(round_up(columns, kColumns) / kColumns),
          stride(blocks * kColumns + kSkewBytes) {
        scales = reinterpret_cast<const float*>(x + tokens * stride);
        totals = scales + tokens * blocks;
    }

    void prepare(const Row& row, int64_t token) const {
        int8_t* target = const_cast<int8_t*>(x) + token * stride;
        float poison = row.zero_or_nan();
        for (int64_t b = 0; b < blocks; b++, target += kColumns) {
            int32_t sum;
            float scale = to_int8(row, b * kColumns, kColumns, target, &sum);
            const_cast<float*>(scales)[token * blocks + b] = scale + poison;
            const_cast<float*>(totals)[token * blocks + b] = static_cast<float>(sum);
        }
    }

    // What a block's sums are multiplied with and reduced by.
    struct Terms {
        f32x16 scale[2], zero[2];
        explicit Terms(const uint8_t* block)
            : scale{load_f16(block), load_f16(block + 32)},
              zero{to_f32(widen_u8(block + kZeros)), to_f32(widen_u8(block + kZeros + 16))} {}
    };

    // Add a block's dot products with the row and block number `at` of x.
    void add_block(const Terms& terms, int64_t at, i32x16 first, i32x16 second, Sums& sums) const {
        const f32x16 scale = set_f32(scales[at]), total = set_f32(totals[at]);
        // Below 2^24, so exact in float32: the sum less what the zeros add to it.
        const f32x16 left = fnma(terms.zero[0], total, to_f32(first));
        const f32x16 right = fnma(terms.zero[1], total, to_f32(second));
        sums.half[0] = fma(left, mul(terms.scale[0], scale), sums.half[0]);
        sums.half[1] = fma(right, mul(terms.scale[1], scale), sums.half[1]);
    }

    template <int R>
    void panel(const uint8_t* block, int64_t count, int64_t token, const Prefetch& prefetch, Sums* sums) const {
        for (int r = 0; r < R; r++) sums[r] = {{zero_f32(), zero_f32()}};
        const int8_t* row = x + token * stride;
        const i32x16 low = set_i32(0x0f0f0f0f);
        for (int64_t b = 0; b < count; b++, block += kBytes, row += kColumns) {
            i32x16 sum[R][2];
            for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = zero_i32();
            const uint8_t* w = block + kHeader;
            for (int quad = 0; quad < kColumns / 8; quad++, w += 128) {
                prefetch.fetch(b * kBytes, quad);
                i32x16 first = load_i32(w), second = load_i32(w + 64);
                i32x16 first_low = bit_and(first, low), second_low = bit_and(second, low);
                i32x16 first_high = bit_and(shift_right<4>(first), low);
                i32x16 second_high = bit_and(shift_right<4>(second), low);
#pragma GCC unroll 12
                for (int r = 0; r < R; r++) {
                    i32x16 near = repeat_32_bits(row + r * stride + 4 * quad);
                    i32x16 far = repeat_32_bits(row + r * stride + 4 * quad + 64);
                    sum[r][0] = dot_u8_i8(dot_u8_i8(sum[r][0], first_low, near), first_high, far);
                    sum[r][1] = dot_u8_i8(dot_u8_i8(sum[r][1], second_low, near), second_high, far);
                }
            }
            const Terms terms(block);
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) add_block(terms, (token + r) * count + b, sum[r][0], sum[r][1], sums[r]);
        }
    }
};

}  // namespace
}  // namespace PENSTOCK_ISA
}  // namespace penstock
