// The sums of products over a panel of weights, by tiles: bfloat16, and the integers of `linear_kinds.h`.
//
// Integers are exact in any order, and what follows them is computed as in `linear_kinds.h`: int8 and int4 give the bits
// that vectors give. The sums of bfloat16 run over 32 columns after another, in float32, whatever rows share the tiles.
#pragma once

#include "linear_kinds.h"
#include "tiles.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

constexpr int kTileRows = 2 * kTile;  // of x that one pass over a panel serves

struct TiledBFloat16 : BFloat16 {
    static constexpr int kRows = kTileRows;
    uint16_t* x;  // [tokens][blocks][32], and a skew
    int64_t stride;  // elements between rows

    TiledBFloat16(uint8_t* scratch, int64_t, int64_t columns)
        : x(reinterpret_cast<uint16_t*>(scratch)), stride(bytes_per_token(columns) / 2) {}

    void prepare(const Row& row, int64_t token) const {
        for (int64_t i = 0; i < stride - kSkewBytes / 2; i += kLanes) store_bf16(x + token * stride + i, row.at(i));
    }

    void panel(int rows, const uint8_t* block, int64_t count, int64_t token, const Prefetch& prefetch,
               Sums* sums) const {
        const uint16_t* left = x + token * stride;
        const Tiles tiles(rows);
        tiles.zero();
        for (int64_t b = 0; b < count; b++, block += kBytes, left += kColumns) {
            prefetch.fetch_block(b * kBytes);
            tiles.add_bf16(left, 2 * stride, block);
        }
        tiles.store(sums);
    }
};

using Dots = int32_t[kTileRows][2][kLanes];

struct TiledInt8 : Int8 {
    using Int8::Int8;
    static constexpr int kRows = kTileRows;

    void panel(int rows, const uint8_t* block, int64_t count, int64_t token, const Prefetch& prefetch,
               Sums* sums) const {
        const int8_t* left = x + token * stride;
        alignas(64) Dots dots;
        {
            const Tiles tiles(rows);
            tiles.zero();
            for (int64_t b = 0; b < count; b++, block += kBytes, left += kColumns) {
                prefetch.fetch_block(b * kBytes);
                tiles.add_i8_u8(left, stride, block);
            }
            tiles.store(dots);
        }
        for (int r = 0; r < rows; r++) {
            const i32x16 before = set_i32(offset[token + r]);
            const f32x16 scale = set_f32(scales[token + r]);
            for (int h = 0; h < 2; h++) sums[r].half[h] = mul(to_f32(add(load_i32(dots[r][h]), before)), scale);
        }
    }
};

struct TiledInt4 : Int4 {
    using Int4::Int4;
    static constexpr int kRows = kTileRows;

    void panel(int rows, const uint8_t* block, int64_t count, int64_t token, const Prefetch& prefetch,
               Sums* sums) const {
        if (rows == 1) return Int4::panel<1>(block, count, token, prefetch, sums);  // faster than filling tiles
        const int8_t* left = x + token * stride;
        for (int r = 0; r < rows; r++) sums[r] = {{zero_f32(), zero_f32()}};
        const Tiles tiles(rows);
        for (int64_t b = 0; b < count; b++, block += kBytes, left += kColumns) {
            prefetch.fetch_block(b * kBytes);
            alignas(64) uint8_t near[2048], far[2048];
            split_nibbles(block + kHeader, near, far);
            tiles.zero();
            tiles.add_i8_u8(left, stride, near);
            tiles.add_i8_u8(left + kColumns / 2, stride, far);
            alignas(64) Dots dots;
            tiles.store(dots);
            const Terms terms(block);
            for (int r = 0; r < rows; r++)
                add_block(terms, (token + r) * count + b, load_i32(dots[r][0]), load_i32(dots[r][1]), sums[r]);
        }
    }

private:
    static void split_nibbles(const uint8_t* bytes, uint8_t* low, uint8_t* high) {
        const i32x16 mask = set_i32(0x0f0f0f0f);
        for (int i = 0; i < 2048; i += 64) {
            const i32x16 both = load_i32(bytes + i);
            store_i32(low + i, bit_and(both, mask));
            store_i32(high + i, bit_and(shift_right<4>(both), mask));
        }
    }
};

}  // namespace
}  // namespace PENSTOCK_ISA
}  // namespace penstock
