// The products of attention: tiles of queries with keys, and of attention weights with values, as the cache stores
// them.
#pragma once

#include <cstring>
#include <utility>

#include "kv_layout.h"
#include "prefetch.h"
#include "simd.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kMaxRows = 12, kMaxVectors = 2;  // their product is the number of sums in registers
#elif defined(__AVX2__)
constexpr int kMaxRows = 6, kMaxVectors = 1;  // 12 of 16 registers: with 8 the widening of keys takes a fifth of the time
#else
constexpr int kMaxRows = 4, kMaxVectors = 1;
#endif
static_assert(kMaxRows <= kLanes, "a lane for each row");
constexpr int kReadingRows = 4;  // maximum rows for which reading dominates the time

// How keys or values of a cache (`b`) are multiplied with queries or weights (`a`): `b` as vectors, whose rows (or
// groups of rows) are `row` bytes apart, and `a` as broadcasts. Each step takes kTogether elements of `a`.
//
// Sums start from `c`, if given.
struct InVectors {
    struct Registers {  // of vectors need no release
        Registers() {}
    };
    static constexpr bool kTiled = false, kIntegerSums = false;
    static constexpr int kRows = kMaxRows, kTokens = kLanes;
};
struct FloatSums : InVectors {
    using Sum = f32x16;
    static f32x16 begin(const float* c, const void*) { return c ? load_f32(c) : zero_f32(); }
    static f32x16 result(f32x16 sum) { return sum; }
};

template <class Kind, int Together = Kind::kValueGroup>
struct Widened : Kind, FloatSums {
    static constexpr int kGroup = Kind::kValueGroup, kTogether = Together;
    static constexpr bool kRounded = false;  // queries and weights, to bfloat16
    using Factor = float;

    template <int V>
    struct Step {
        f32x16 factor[V][Together];  // in reverse order

        Step(const uint8_t* b, int64_t row) {
            for (int v = 0; v < V; v++) {
                if constexpr (kGroup == 2) {
                    const i32x16 pairs = load_i32(b + v * 64);
                    factor[v][0] = odd_bf16(pairs), factor[v][1] = even_bf16(pairs);
                } else {
                    for (int i = 0; i < Together; i++)
                        factor[v][i] = Kind::load(b + (Together - 1 - i) * row + v * kLanes * Kind::kSize);
                }
            }
        }

        inline __attribute__((always_inline)) void add_to(f32x16 (&sum)[V], const float* a) const {
#pragma GCC unroll 2
            for (int i = 0; i < Together; i++) {
                const f32x16 value = set_f32(a[Together - 1 - i]);
#pragma GCC unroll 2
                for (int v = 0; v < V; v++) sum[v] = fma(value, factor[v][i], sum[v]);
            }
        }
    };
};

// Products of words that hold several elements: `Side` loads vectors of them and multiplies them with one word.
template <class Side, int V>
struct WordStep {
    i32x16 words[V];

    WordStep(const uint8_t* b, int64_t row) {
        for (int v = 0; v < V; v++) words[v] = Side::load_words(b + v * kLanes * Side::kGroup * Side::kSize, row);
    }

    template <class Sum, class Factor>
    inline __attribute__((always_inline)) void add_to(Sum (&sum)[V], const Factor* a) const {
        int32_t bits;
        std::memcpy(&bits, a, 4);
        const i32x16 word = set_i32(bits);
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) sum[v] = Side::dot(sum[v], words[v], word);
    }
};

// Products of queries and weights rounded to bfloat16, for caches whose elements are exact in it.
#if !defined(PENSTOCK_MULTIPLIES_BFLOAT16)
template <class Kind>
struct Paired : Widened<Kind, 2> {
    static constexpr bool kRounded = true;
};
#else
// The same bits, with products of pairs.
template <class Kind>
struct Paired : Kind, FloatSums {
    static constexpr int kGroup = Kind::kValueGroup, kTogether = 2;
    static constexpr bool kRounded = false;  // the factors' type is what rounds
    using Factor = uint16_t;

    static i32x16 load_words(const uint8_t* p, int64_t row) { return Kind::load_pairs(p, row); }
    static f32x16 dot(f32x16 sum, i32x16 words, i32x16 word) { return dot_bf16(sum, words, word); }

    template <int V>
    using Step = WordStep<Paired, V>;
};
#endif

// int8 keys with queries rounded to int8. The initial values of the sums, which subtract the keys' bias, are stored
// after each row of `a`.
struct Integers : CacheInt8, InVectors {
    static constexpr int kGroup = kKeyGroup, kTogether = kGroup;
    using Factor = int8_t;
    using Sum = i32x16;

    static i32x16 begin(const float*, const void* behind) {
        int32_t bits;
        std::memcpy(&bits, behind, 4);
        return set_i32(bits);
    }
    static f32x16 result(i32x16 sum) { return to_f32(sum); }

    static i32x16 load_words(const uint8_t* p, int64_t) { return load_i32(p); }
    static i32x16 dot(i32x16 sum, i32x16 words, i32x16 word) { return dot_u8_i8(sum, words, word); }

    template <int V>
    using Step = WordStep<Integers, V>;
};

// c = a b, or c += a b: `a` [R, count], `b` [count][V vectors] of the cache, whose rows (or groups of rows) are
// `b_step` bytes apart. With few rows each step prefetches a part of the next data; with many rows, which have no time
// for more, it prefetches the data `ahead` bytes further on.
template <class Kind, int R, int V>
void accumulate(const typename Kind::Factor* a, int64_t a_stride, const uint8_t* b, int64_t b_step, int64_t count,
                Prefetch& prefetch, int64_t ahead, bool fresh, float* c, int64_t c_stride) {
    typename Kind::Sum sum[R][V];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 2
        for (int v = 0; v < V; v++)
            sum[r][v] = Kind::begin(fresh ? nullptr : c + r * c_stride + v * kLanes, a + r * a_stride + count);
    }
    constexpr int bytes = V * kLanes * Kind::kSize * Kind::kGroup, groups = Kind::kTogether / Kind::kGroup;
    for (int64_t k = 0; k < count; k += Kind::kTogether, b += groups * b_step) {
        if constexpr (R <= kReadingRows) {
            prefetch.steps(1);
        } else {
            for (int group = 0; group < groups; group++) {
                for (int line = 0; line < bytes; line += 64)
                    __builtin_prefetch(b + group * b_step + ahead + line);
            }
        }
        const typename Kind::template Step<V> step(b, b_step);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) step.add_to(sum[r], a + r * a_stride + k);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) store_f32(c + r * c_stride + v * kLanes, Kind::result(sum[r][v]));
    }
}

// `accumulate` for every number of rows and vectors.
template <class Kind>
struct Accumulate {
    using Function = void (*)(const typename Kind::Factor*, int64_t, const uint8_t*, int64_t, int64_t, Prefetch&,
                              int64_t, bool, float*, int64_t);
    Function of[kMaxRows][2];  // one vector, or two

    constexpr Accumulate() : Accumulate(std::make_integer_sequence<int, kMaxRows>()) {}
    template <int... R>
    constexpr explicit Accumulate(std::integer_sequence<int, R...>)
        : of{{accumulate<Kind, R + 1, 1>, accumulate<Kind, R + 1, 2>}...} {}
};
template <class Kind>
constexpr Accumulate<Kind> kAccumulate;

}  // namespace
}  // namespace PENSTOCK_ISA
}  // namespace penstock
