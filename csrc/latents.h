// Keys of a latent cache in the layout of values (see `kv_layout.h`), for the product with attention weights.
#pragma once

#include "kv_layout.h"
#include "rows.h"
#include "simd.h"
#include "transpose.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

// `to` has room for bytes(block_size) bytes.
template <class Kind>
class LatentValues {
  public:
    LatentValues(const Blocks<Kind>& blocks, uint8_t* to) : blocks_(blocks), to_(to) {}

    // Elements of a value in this layout, padding included.
    static int64_t padded(int64_t head_dim) { return (head_dim + kPerSquare - 1) / kPerSquare * kPerSquare; }
    // Bytes from one group of values to the next.
    int64_t step() const { return padded(blocks_.head_dim) * Kind::kValueGroup * Kind::kSize; }

    // Copies `count` values of a block from `offset` on, which is even.
    const uint8_t* lay_out(int64_t block, int64_t head, int64_t offset, int64_t count) const {
        const uint8_t* keys = blocks_.keys(block, head) + offset * kWord;
        for (int64_t key = 0; key < count; key += kLanes) {
            for (int64_t first = 0; first < blocks_.head_dim; first += kPerSquare) {
                i32x16 square[kLanes];
#pragma GCC unroll 16
                for (int i = 0; i < kLanes; i++) square[i] = load(keys + key * kWord, first + i * kPerWord);
                transpose(square);
                store(square, key, first, std_min(kLanes, count - key));
            }
        }
        return to_;
    }

  private:
    static constexpr int64_t kWord = Kind::kKeyGroup * Kind::kSize;  // contiguous bytes of a key
    static constexpr int64_t kPerWord = 4 / Kind::kSize;             // elements of 4 bytes
    static constexpr int64_t kPerSquare = kLanes * kPerWord;

    // 4 bytes of each of 16 keys from `element` on; zeros for keys behind the last.
    i32x16 load(const uint8_t* keys, int64_t element) const {
        if (element >= blocks_.head_dim) return zero_i32();
        const int64_t row = blocks_.block_size * kWord;
        const uint8_t* at = keys + element / Kind::kKeyGroup * row;
        if constexpr (kWord == 2) return bit_or(widen_u16(at), shift_left<16>(widen_u16(at + row)));
        const i32x16 words = load_i32(at), bias = set_i32(static_cast<int32_t>(0x80808080));
        if constexpr (Kind::kKeyBias != 0) return sub(bit_or(words, bias), bit_and(words, bias));
        return words;
    }

    // Lays out the elements from `first` on of `count` keys.
    void store(const i32x16 (&square)[kLanes], int64_t key, int64_t first, int64_t count) const {
        uint8_t* to = to_ + key / Kind::kValueGroup * step() + first * Kind::kValueGroup * Kind::kSize;
        if constexpr (Kind::kValueGroup == 2) {
            const i32x16 upper = set_i32(static_cast<int32_t>(0xffff0000)), lower = set_i32(0xffff);
            for (int i = 0; i < count; i += 2) {  // a value beyond the last is undefined, and multiplied by 0
                const i32x16 low = square[i], high = i + 1 < count ? square[i + 1] : zero_i32();
                i32x16 words[2];
                zip(bit_or(bit_and(low, lower), shift_left<16>(high)),
                    bit_or(shift_right<16>(low), bit_and(high, upper)), words[0], words[1]);
                store_i32(to + i / 2 * step(), words[0]), store_i32(to + i / 2 * step() + 64, words[1]);
            }
        } else {
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; i++) store_i32(to + i * step(), square[i]);
        }
    }

    const Blocks<Kind>& blocks_;
    uint8_t* to_;
};

// Number of floats with room for a block's values of any kind.
inline int64_t latent_floats(int64_t block_size, int64_t head_dim) {
    return (block_size + kLanes - 1) / kLanes * kLanes * LatentValues<CacheFloat32>::padded(head_dim);
}

}  // namespace
}  // namespace PENSTOCK_ISA
}  // namespace penstock
