// What happens to queries, keys and values between their projection and attention: the norm of each head of queries
// and keys where the model has one, rotary positions (Su et al., 2021, arXiv:2104.09864), and the paged cache.
#include <cmath>

#include "kv_layout.h"
#include "ops.h"
#include "rows.h"
#include "simd.h"
#include "threads.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

// Head `from` of type `dtype` into float32 `x`, normalised where there is a weight.
void load_head(const RotaryArgs& args, int64_t from, const void* weight, float* x) {
    const int64_t count = args.cache->head_dim;
    f32x16 squares = zero_f32();
    for (int64_t i = 0; i < count; i += kLanes) {
        const f32x16 value = load_some_as_f32(args.qkv, args.dtype, from + i, count - i);
        squares = fma(value, value, squares);
        store_f32(x + i, value);
    }
    if (!weight) return;
    const f32x16 scale = set_f32(1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(count) + args.eps));
    for (int64_t i = 0; i < count; i += kLanes)
        store_f32(x + i, mul(mul(load_f32(x + i), scale), load_some_as_f32(weight, args.dtype, i, count - i)));
}

// Turn the pairs (x[i], x[i + angles]).
void rotate(const RotaryArgs& args, int64_t token, float* x) {
    const int64_t count = args.num_angles;
    const float* cosines = args.angles + token * 2 * count;
    for (int64_t i = 0; i < count; i += kLanes) {
        const f32x16 cosine = load_some(cosines + i, count - i), sine = load_some(cosines + count + i, count - i);
        const f32x16 first = load_some(x + i, count - i), second = load_some(x + count + i, count - i);
        write_row(x, kFloat32, i, count - i, fnma(second, sine, mul(first, cosine)));
        write_row(x, kFloat32, count + i, count - i, fma(first, sine, mul(second, cosine)));
    }
}

struct Place {
    int64_t block, offset, head;
};

template <class Kind>
struct Store;

template <>
struct Store<CacheBFloat16> {
    static void key(const Blocks<CacheBFloat16>& blocks, Place at, const float* x) {
        uint8_t* target = blocks.keys(at.block, at.head) + 4 * at.offset;
        for (int64_t i = 0; i < blocks.head_dim; i += kLanes) {
            alignas(64) uint16_t bits[kLanes];
            store_bf16(bits, load_f32(x + i));
            for (int64_t pair = 0; pair < kLanes / 2 && i + 2 * pair < blocks.head_dim; pair++)
                std::memcpy(target + (i / 2 + pair) * blocks.block_size * 4, bits + 2 * pair, 4);
        }
    }

    // A value at an even place clears the one beside it, which may hold anything and will be multiplied by 0.
    static void value(const Blocks<CacheBFloat16>& blocks, Place at, const float* x) {
        uint8_t* target = blocks.values(at.block, at.head) + at.offset / 2 * blocks.head_dim * 4;
        for (int64_t i = 0; i < blocks.head_dim; i += kLanes) {
            i32x16 bits = bf16_bits(load_f32(x + i));
            const int64_t count = std_min(kLanes, blocks.head_dim - i);
            if (at.offset % 2) {
                const i32x16 before = bits_as_i32(load_some_as_f32(target + 4 * i, kFloat32, 0, count));
                bits = bit_or(shift_left<16>(bits), bit_and(before, set_i32(0xffff)));
            }
            write_row(target + 4 * i, kFloat32, 0, count, bits_as_f32(bits));
        }
    }
};

template <class Kind>
struct StorePlain {
    static void key(const Blocks<Kind>& blocks, Place at, const float* x) {
        uint8_t row[kLanes * 4];
        uint8_t* target = blocks.keys(at.block, at.head) + at.offset * Kind::kSize;
        for (int64_t i = 0; i < blocks.head_dim; i += kLanes) {
            store_from_f32(row, Kind::kSize == 4 ? kFloat32 : kFloat16, 0, load_f32(x + i));
            for (int64_t k = 0; k < kLanes && i + k < blocks.head_dim; k++)
                std::memcpy(target + (i + k) * blocks.block_size * Kind::kSize, row + k * Kind::kSize, Kind::kSize);
        }
    }
    static void value(const Blocks<Kind>& blocks, Place at, const float* x) {
        uint8_t* target = blocks.values(at.block, at.head) + at.offset * blocks.head_dim * Kind::kSize;
        for (int64_t i = 0; i < blocks.head_dim; i += kLanes)
            write_row(target, Kind::kSize == 4 ? kFloat32 : kFloat16, i, blocks.head_dim - i, load_f32(x + i));
    }
};

template <>
struct Store<CacheFloat32> : StorePlain<CacheFloat32> {};
template <>
struct Store<CacheFloat16> : StorePlain<CacheFloat16> {};

template <>
struct Store<CacheInt8> {
    static float quantize(const Blocks<CacheInt8>& blocks, const float* x, int8_t* bytes) {
        const Row row{x, kFloat32, 0, blocks.head_dim};
        int32_t sum;
        return to_int8(row, 0, (blocks.head_dim + kLanes - 1) / kLanes * kLanes, bytes, &sum) + row.zero_or_nan();
    }
    static void key(const Blocks<CacheInt8>& blocks, Place at, const float* x) {
        int8_t bytes[kMaxHeadDim];
        blocks.scales(at.block, at.head)[at.offset] = quantize(blocks, x, bytes);
        uint8_t* target = blocks.keys(at.block, at.head) + at.offset;
        for (int64_t i = 0; i < blocks.head_dim; i++) target[i * blocks.block_size] = static_cast<uint8_t>(bytes[i]);
    }
    static void value(const Blocks<CacheInt8>& blocks, Place at, const float* x) {
        int8_t bytes[kMaxHeadDim];
        blocks.scales(at.block, at.head)[blocks.block_size + at.offset] = quantize(blocks, x, bytes);
        std::memcpy(blocks.values(at.block, at.head) + at.offset * blocks.head_dim, bytes,
                    static_cast<size_t>(blocks.head_dim));
    }
};

template <class Kind>
void one_token(const RotaryArgs& args, const Blocks<Kind>& blocks, int64_t token) {
    const int64_t head_dim = blocks.head_dim, kv_heads = args.cache->num_heads;
    const int64_t row = token * (args.num_heads + 2 * kv_heads) * head_dim;
    const int64_t slot = args.batch->slots[token];
    alignas(64) float x[kMaxHeadDim];
    for (int64_t head = 0; head < args.num_heads; head++) {
        load_head(args, row + head * head_dim, args.query_norm, x);
        rotate(args, token, x);
        for (int64_t i = 0; i < head_dim; i += kLanes)
            write_row(args.qkv, args.dtype, row + head * head_dim + i, head_dim - i, load_f32(x + i));
    }
    for (int64_t head = 0; head < kv_heads; head++) {
        const Place place{slot / blocks.block_size, slot % blocks.block_size, head};
        load_head(args, row + (args.num_heads + head) * head_dim, args.key_norm, x);
        rotate(args, token, x);
        Store<Kind>::key(blocks, place, x);
        load_head(args, row + (args.num_heads + kv_heads + head) * head_dim, nullptr, x);
        Store<Kind>::value(blocks, place, x);
    }
}

template <class Kind>
void run(const RotaryArgs& args) {
    const Blocks<Kind> blocks(*args.cache);
    const int64_t tokens = args.batch->num_tokens;
    // Two tokens of one pair share words of the cache: one thread writes both, the even one first.
    const auto border = [&](int64_t at) { return at > 0 && at < tokens && args.batch->slots[at] % 2 ? at + 1 : at; };
    parallel(
        [&](int64_t thread, int64_t threads) {
            const int64_t end = border(tokens * (thread + 1) / threads);
            for (int64_t token = border(tokens * thread / threads); token < end; token++)
                one_token(args, blocks, token);
        },
        tokens * (args.num_heads + 2 * args.cache->num_heads) * blocks.head_dim * 2);
}

}  // namespace

void rotate_and_store(const RotaryArgs& args) {
    switch (args.cache->kind) {
        case kFloat32: return run<CacheFloat32>(args);
        case kBFloat16: return run<CacheBFloat16>(args);
        case kFloat16: return run<CacheFloat16>(args);
        default: return run<CacheInt8>(args);
    }
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
