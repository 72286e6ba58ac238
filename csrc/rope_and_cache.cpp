// Steps between the projection of queries, keys and values and attention: norms of heads if the model has them, rotary
// positions (Su et al., 2021, arXiv:2104.09864), and storing into the paged cache.
#include <cstring>

#include "hadamard.h"
#include "kv_layout.h"
#include "ops.h"
#include "rows.h"
#include "simd.h"
#include "threads.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

// Converts a head to the cache's type, in whole vectors; returns its scale. Only int8 has a scale and a `bias`, and is
// transformed before, which the scale takes account of.
template <class Kind>
float encode(const Row& x, uint8_t* y, int32_t bias = 0) {
    const int64_t count = (x.count + kLanes - 1) / kLanes * kLanes;
    if constexpr (Kind::kScaled) {
        int32_t sum;
        alignas(64) float transformed[kMaxHeadDim];
        for (int64_t i = 0; i < count; i += kLanes) store_f32(transformed + i, x.at(i));
        hadamard(transformed, x.count);
        const float scale = to_int8({transformed, kFloat32, 0, x.count}, 0, count, reinterpret_cast<int8_t*>(y), &sum, bias);
        return scale / static_cast<float>(hadamard_size(x.count));  // exact
    } else {
        constexpr int32_t dtype = Kind::kSize == 4 ? kFloat32 : Kind::kKeyGroup == 2 ? kBFloat16 : kFloat16;
        x.reading(0, count, [=](const auto& load) {
            for (int64_t i = 0; i < count; i += kLanes) store_from_f32(y, dtype, i, load(i));
        });
        return 1.0f;
    }
}

template <class Kind>
void store_value(const Blocks<Kind>& blocks, int64_t block, int64_t offset, int64_t head, const Row& value) {
    constexpr int64_t group = Kind::kValueGroup;
    const int64_t head_dim = blocks.head_dim;
    uint8_t* target = blocks.values(block, head) + offset / group * head_dim * group * Kind::kSize;
    if constexpr (group == 2) {
        // A value at an even offset clears its odd neighbour, which has undefined content and will be multiplied by 0.
        value.reading(0, (head_dim + kLanes - 1) / kLanes * kLanes, [=](const auto& load) {
            for (int64_t i = 0; i < head_dim; i += kLanes) {
                i32x16 bits = shift_right<16>(round_to_bf16(load(i)));
                const int64_t count = std_min(kLanes, head_dim - i);
                if (offset % 2) {
                    const i32x16 before = bits_as_i32(load_some_as_f32(target + 4 * i, kFloat32, 0, count));
                    bits = bit_or(shift_left<16>(bits), bit_and(before, set_i32(0xffff)));
                }
                write_row(target + 4 * i, kFloat32, 0, count, bits_as_f32(bits));
            }
        });
    } else {
        const bool whole = head_dim % kLanes == 0;  // otherwise the last vector reads beyond the head
        uint8_t row[kMaxHeadDim * Kind::kSize];
        const float scale = encode<Kind>(value, whole ? target : row);
        if (Kind::kScaled) blocks.value_scales(block, head)[offset] = scale;
        if (!whole) std::memcpy(target, row, static_cast<size_t>(head_dim * Kind::kSize));
    }
}

// Tokens processed together. If their slots are neighbours, so are their keys in the cache.
constexpr int64_t kTogether = 16;

// Processes a key head and the query heads that share it, for the tokens `begin` to `end`, at most kTogether + 1.
// `Usual`: the type is not float16, and heads and halves of the rotated part are whole vectors.
template <class Kind, bool Usual>
class HeadOfTokens {
  public:
    HeadOfTokens(const RopeArgs& args, const Blocks<Kind>& blocks, int64_t head, int64_t begin, int64_t end)
        : args_(args),
          blocks_(blocks),
          row_(args.num_heads * args.query_step + (args.parts - 1) * args.cache->num_heads * blocks.head_dim),
          head_(head),
          begin_(begin),
          end_(end) {}

    // Prefetches the memory that is read and written. A key in the cache is spread over as many cache lines as it has
    // words; these are fetched from all pages in turn.
    void fetch() const {
        const int64_t share = args_.num_heads / args_.cache->num_heads;
        for (int64_t token = begin_; token < end_; token++) {
            if (turns_queries()) fetch(query_at(token, head_ * share), (share - 1) * args_.query_step + blocks_.head_dim);
            if (args_.parts == 1) continue;
            fetch(at(token, head_), blocks_.head_dim);
            if (blocks_.latent()) continue;
            fetch(value_from(token), blocks_.head_dim);
            const uint8_t* values = value_at(token);
            for (int64_t byte = 0; byte < blocks_.head_dim * kValueWord; byte += 64) __builtin_prefetch(values + byte, 1);
        }
        if (args_.parts == 1) return;
        const uint8_t* keys[kTogether + 1];
        int64_t count = 0;
        for (int64_t token = begin_; token < end_; token = end_of_neighbours(token)) keys[count++] = key_at(token);
        for (int64_t word = 0; word < words(); word++)
            for (int64_t i = 0; i < count; i++) __builtin_prefetch(keys[i] + word * blocks_.block_size * kKeyWord, 1);
    }

    void run() {
        const int64_t share = args_.num_heads / args_.cache->num_heads;
        for (int64_t query = head_ * share; turns_queries() && query < (head_ + 1) * share; query++) turn_queries(query);
        if (args_.parts == 1) return;
        turn_keys();
        for (int64_t token = begin_, last; token < end_; token = last) {
            last = end_of_neighbours(token);
            store_keys(token, last);
        }
        if (blocks_.latent()) return;
        if (args_.value_norm) measure([&](int64_t token) { return value_from(token); });
        for (int64_t token = begin_; token < end_; token++) {
            Row value{args_.qkv, args_.dtype, value_from(token), blocks_.head_dim};
            if (args_.value_norm) value = normed_value(token);
            store_value(blocks_, block(token), offset(token), head_, value);
        }
    }

  private:
    static constexpr int64_t kKeyWord = Kind::kKeyGroup * Kind::kSize, kValueWord = Kind::kValueGroup * Kind::kSize;

    PENSTOCK_INLINE f32x16 load(const void* data, int64_t at, int64_t count) const {
        if constexpr (!Usual) return load_some_as_f32(data, args_.dtype, at, count);
        return load_as_f32(data, args_.dtype == kFloat32 ? kFloat32 : kBFloat16, at);
    }
    PENSTOCK_INLINE void store(int64_t at, int64_t count, f32x16 x) const {
        if constexpr (!Usual) return write_row(args_.qkv, args_.dtype, at, count, x);
        store_from_f32(args_.qkv, args_.dtype == kFloat32 ? kFloat32 : kBFloat16, at, x);
    }

    // Whether queries change.
    bool turns_queries() const { return args_.num_angles || args_.query_norm || args_.query_factors; }

    int64_t words() const { return blocks_.head_dim / Kind::kKeyGroup; }
    int64_t block(int64_t token) const { return args_.batch->slots[token] / blocks_.block_size; }
    int64_t offset(int64_t token) const { return args_.batch->slots[token] % blocks_.block_size; }
    uint8_t* key_at(int64_t token) const { return blocks_.keys(block(token), head_) + offset(token) * kKeyWord; }

    const uint8_t* value_at(int64_t token) const {
        return blocks_.values(block(token), head_) + offset(token) / Kind::kValueGroup * blocks_.head_dim * kValueWord;
    }
    void fetch(int64_t from, int64_t count) const {
        const int64_t size = bytes_of(args_.dtype);
        const char* elements = static_cast<const char*>(args_.qkv) + from * size;
        for (int64_t byte = 0; byte < count * size; byte += 64) __builtin_prefetch(elements + byte, 1);
    }

    // Start of a query head, and of a key or value head.
    int64_t query_at(int64_t token, int64_t head) const { return token * row_ + head * args_.query_step; }
    int64_t at(int64_t token, int64_t head) const {
        return token * row_ + args_.num_heads * args_.query_step + head * blocks_.head_dim;
    }

    // Start of a value head; without separate values, of the key head before its norm and rotation.
    int64_t value_from(int64_t token) const {
        return at(token, head_ + (args_.parts == 3 ? args_.cache->num_heads : 0));
    }

    // Divides a token's value by its root mean square.
    Row normed_value(int64_t token) {
        const f32x16 factor = set_f32(factors_[token - begin_]);
        for (int64_t i = 0; i < blocks_.head_dim; i += kLanes) {
            const int64_t count = blocks_.head_dim - i;
            write_row(x_, kFloat32, i, count, mul(load(args_.qkv, value_from(token) + i, count), factor));
        }
        return {x_, kFloat32, 0, blocks_.head_dim};
    }

    // Number of tokens from `token` on whose slots are consecutive in one block.
    int64_t end_of_neighbours(int64_t token) const {
        const int32_t* slots = args_.batch->slots;
        int64_t last = token + 1;
        while (last < end_ && slots[last] == slots[last - 1] + 1 && offset(last) > 0) last++;
        return last;
    }

    // The factors that give the heads at place(token) a mean square of 1; for all tokens first, to hide the latency of
    // each.
    template <class Place>
    void measure(const Place& place) {
        const int64_t count = blocks_.head_dim;
        for (int64_t token = begin_; token < end_; token++) {
            f32x16 squares = zero_f32();
            for (int64_t i = 0; i < count; i += kLanes) {
                const f32x16 x = load(args_.qkv, place(token) + i, count - i);
                squares = fma(x, x, squares);
            }
            factors_[token - begin_] = sum_lanes(squares);
        }
        for (int64_t i = 0; i < end_ - begin_; i += kLanes) {
            const f32x16 mean = div(load_f32(factors_ + i), set_f32(static_cast<float>(count)));
            store_f32(factors_ + i, div(set_f32(1.0f), sqrt(add(mean, set_f32(args_.eps)))));
        }
    }

    // Normalises, if there is a `weight`, and rotates a token's head, which starts at `from`; calls write(i, count, x)
    // with its `count` elements from i on.
    template <class Write>
    void turn(int64_t token, int64_t from, const void* weight, const Write& write) const {
        const int64_t pairs = args_.num_angles;
        const f32x16 factor = set_f32(weight ? factors_[token - begin_] : 1.0f);
        const bool first_weight = weight && !args_.norm_last, last_weight = weight && args_.norm_last;
        const auto weighted = [&](int64_t i, int64_t count, f32x16 x) {
            return mul(x, load_some_as_f32(weight, args_.norm_dtype, i, count));
        };
        const auto normed = [&](int64_t i, int64_t count) {
            f32x16 x = load(args_.qkv, from + i, count);
            if (weight) x = mul(x, factor);
            return first_weight ? weighted(i, count, x) : x;
        };
        const auto finish = [&](int64_t i, int64_t count, f32x16 x) {
            write(i, count, last_weight ? weighted(i, count, x) : x);
        };
        const float* cosines = args_.angles + token * 2 * pairs;
        if (args_.interleaved) turn_neighbours(cosines, normed, finish);
        for (int64_t i = 0; i < pairs && !args_.interleaved; i += kLanes) {
            const int64_t count = Usual ? kLanes : pairs - i;
            const f32x16 cosine = load_some(cosines + i, count), sine = load_some(cosines + pairs + i, count);
            const f32x16 first = normed(i, count), second = normed(pairs + i, count);
            finish(i, count, fnma(second, sine, mul(first, cosine)));
            finish(pairs + i, count, fma(first, sine, mul(second, cosine)));
        }
        for (int64_t i = 2 * pairs; i < blocks_.head_dim; i += kLanes)
            finish(i, blocks_.head_dim - i, normed(i, blocks_.head_dim - i));
    }

    // Rotates pairs of neighbouring elements.
    template <class Normed, class Write>
    void turn_neighbours(const float* cosines, const Normed& normed, const Write& write) const {
        alignas(64) float x[kMaxHeadDim];
        const int64_t pairs = args_.num_angles;
        for (int64_t i = 0; i < 2 * pairs; i += kLanes) write_row(x, kFloat32, i, 2 * pairs - i, normed(i, 2 * pairs - i));
        for (int64_t i = 0; i < pairs; i++) {
            const float first = x[2 * i], second = x[2 * i + 1], cosine = cosines[i], sine = cosines[pairs + i];
            x[2 * i] = __builtin_fmaf(-second, sine, first * cosine);
            x[2 * i + 1] = __builtin_fmaf(first, sine, second * cosine);
        }
        for (int64_t i = 0; i < 2 * pairs; i += kLanes) write(i, 2 * pairs - i, load_some(x + i, 2 * pairs - i));
    }

    void turn_queries(int64_t query) {
        if (args_.query_norm) measure([&](int64_t token) { return query_at(token, query); });
        for (int64_t token = begin_; token < end_; token++) {
            const int64_t to = query_at(token, query);
            const f32x16 factor = set_f32(args_.query_factors ? args_.query_factors[token] : 1.0f);
            turn(token, to, args_.query_norm,
                 [&](int64_t i, int64_t count, f32x16 x) { store(to + i, count, mul(x, factor)); });
        }
    }

    void turn_keys() {
        if (args_.key_norm) measure([&](int64_t token) { return at(token, head_); });
        for (int64_t token = begin_; token < end_; token++) {
            Row key{args_.qkv, args_.dtype, at(token, head_), blocks_.head_dim};
            if (args_.num_angles || args_.key_norm) {
                turn(token, at(token, head_), args_.key_norm,
                     [&](int64_t i, int64_t count, f32x16 x) { write_row(x_, kFloat32, i, count, x); });
                key = {x_, kFloat32, 0, blocks_.head_dim};
            }
            const float scale = encode<Kind>(key, rows_[token - begin_], Kind::kKeyBias);
            if (Kind::kScaled) blocks_.scales(block(token), head_)[offset(token)] = scale;
        }
    }

    void store_keys(int64_t begin, int64_t end) {
        uint8_t* target = key_at(begin);
        const int64_t step = blocks_.block_size * kKeyWord, count = words();
        for (int64_t i = 0; i < end - begin; i++) {
            const uint8_t* row = rows_[begin - begin_ + i];
            uint8_t* to = target + i * kKeyWord;
#pragma GCC unroll 8
            for (int64_t word = 0; word < count; word++)
                std::memcpy(to + word * step, row + word * kKeyWord, kKeyWord);
        }
    }

    const RopeArgs& args_;
    const Blocks<Kind>& blocks_;
    const int64_t row_, head_, begin_, end_;
    alignas(64) float x_[kMaxHeadDim];
    alignas(64) float factors_[2 * kLanes];
    alignas(64) uint8_t rows_[kTogether + 1][kMaxHeadDim * Kind::kSize];
};

template <class Kind, bool Usual>
void run(const RopeArgs& args) {
    const Blocks<Kind> blocks(*args.cache);
    const int64_t tokens = args.batch->num_tokens, heads = args.cache->num_heads;
    const int64_t groups = (tokens + kTogether - 1) / kTogether;
    // Two tokens of a pair share words of the cache, so they are in one group, which writes the even one first.
    const auto border = [&](int64_t group) {
        const int64_t at = std_min(group * kTogether, tokens);
        return at > 0 && at < tokens && args.batch->slots[at] % 2 ? at + 1 : at;
    };
    parallel(
        [&](int64_t thread, int64_t threads) {
            const auto part = [&](int64_t i) {
                return HeadOfTokens<Kind, Usual>(args, blocks, i % heads, border(i / heads), border(i / heads + 1));
            };
            const int64_t begin = groups * heads * thread / threads, end = groups * heads * (thread + 1) / threads;
            if (begin < end) part(begin).fetch();
            for (int64_t i = begin; i < end; i++) {
                if (i + 1 < end) part(i + 1).fetch();
                part(i).run();
            }
        },
        tokens * (args.num_heads + 2 * heads) * blocks.head_dim * 2);
}

template <class Kind>
void run(const RopeArgs& args) {
    const bool whole = args.num_angles % kLanes == 0 && args.cache->head_dim % kLanes == 0;
    args.dtype != kFloat16 && whole ? run<Kind, true>(args) : run<Kind, false>(args);
}

}  // namespace

void rope_and_cache(const RopeArgs& args) {
    switch (args.cache->kind) {
        case kFloat32: return run<CacheFloat32>(args);
        case kBFloat16: return run<CacheBFloat16>(args);
        case kFloat16: return run<CacheFloat16>(args);
        default: return run<CacheInt8>(args);
    }
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
