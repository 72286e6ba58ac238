// The layout of keys and values in the packed cache.
//
// A layer's part of a block holds, for one key head after another,
//
//   keys    [head_dim / n][block_size][n]    n = 2 for bfloat16 and 4 for int8, as product instructions take them; else 1
//   values  [block_size / n][head_dim][n]    n = 2 for bfloat16, else 1
//   scales  int8 only: [block_size] of the keys, [block_size] of the values, float32
//
// A latent cache holds keys, which are also the values, and their scales.
//
// So a vector holds one group of elements of 16 keys, or 16 elements of one value, and no sum runs across lanes.
// int8 keys and values are those of transformed heads (`hadamard.h`); keys are stored as unsigned bytes, with 128 added. The
// parts of all layers are contiguous, block after block.
// `block_size` is even, `head_dim` a multiple of 4. Where a size is no multiple of 16, vector loads read beyond the end
// of a row; the cache ends with kCachePadding unused bytes.
#pragma once

#include "ops.h"
#include "simd.h"

namespace penstock {
namespace PENSTOCK_ISA {

struct CacheFloat32 {
    static constexpr int kKeyGroup = 1, kValueGroup = 1, kSize = 4;
    static constexpr bool kScaled = false;
    static constexpr int32_t kKeyBias = 0;
    static f32x16 load(const uint8_t* p) { return load_f32(reinterpret_cast<const float*>(p)); }
};

struct CacheBFloat16 {
    static constexpr int kKeyGroup = 2, kValueGroup = 2, kSize = 2;
    static constexpr bool kScaled = false;
    static constexpr int32_t kKeyBias = 0;
    static i32x16 load_pairs(const uint8_t* p, int64_t) { return load_i32(p); }
};

struct CacheFloat16 {
    static constexpr int kKeyGroup = 1, kValueGroup = 1, kSize = 2;
    static constexpr bool kScaled = false;
    static constexpr int32_t kKeyBias = 0;
    static f32x16 load(const uint8_t* p) { return load_f16(p); }
};

struct CacheInt8 {
    static constexpr int kKeyGroup = 4, kValueGroup = 1, kSize = 1;
    static constexpr bool kScaled = true;
    static constexpr int32_t kKeyBias = 128;
    static f32x16 load(const uint8_t* p) { return to_f32(widen_i8(p)); }
    // Values as pairs of bfloat16, an exact conversion: the elements at p, and those `row` bytes further on.
    static i32x16 load_pairs(const uint8_t* p, int64_t row) {
        return bit_or(shift_right<16>(bits_as_i32(load(p))), bits_as_i32(load(p + row)));
    }
};

template <class Kind>
struct Blocks {
    uint8_t* data;
    int64_t head_dim, block_size, block_stride, sides, head_bytes;  // `sides`: 2 for keys and values, 1 for keys alone

    explicit Blocks(const PagedCache& cache)
        : data(cache.data),
          head_dim(cache.head_dim),
          block_size(cache.block_size),
          block_stride(cache.block_stride),
          sides(cache.latent ? 1 : 2),
          head_bytes(block_size * sides * (head_dim * Kind::kSize + (Kind::kScaled ? 4 : 0))) {}

    uint8_t* keys(int64_t block, int64_t head) const { return data + block * block_stride + head * head_bytes; }
    bool latent() const { return sides == 1; }
    uint8_t* values(int64_t block, int64_t head) const { return keys(block, head) + (sides - 1) * part_bytes(); }
    float* scales(int64_t block, int64_t head) const {
        return reinterpret_cast<float*>(keys(block, head) + sides * part_bytes());
    }
    float* value_scales(int64_t block, int64_t head) const { return scales(block, head) + (sides - 1) * block_size; }
    int64_t part_bytes() const { return block_size * head_dim * Kind::kSize; }
};

}  // namespace PENSTOCK_ISA
}  // namespace penstock
