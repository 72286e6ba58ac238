// The vectors of `simd.h` in the vector extensions of GCC and clang, for every processor: 16 lanes are four vectors of
// 16 bytes, which are registers of NEON and of SSE2 (baseline x86-64). Where the extensions have no operator for what
// the processor has an instruction for, it is chosen here; a processor that is neither computes lane by lane.
#pragma once

#if defined(__ARM_NEON)
#include <arm_neon.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <cstdint>
#include <cstring>

namespace penstock {
namespace PENSTOCK_ISA {

template <class Lane>
using Vector __attribute__((vector_size(16))) = Lane;
using F32 = Vector<float>;
using I32 = Vector<int32_t>;
using U32 = Vector<uint32_t>;
using I16 = Vector<int16_t>;
using U16 = Vector<uint16_t>;
using U8 = Vector<uint8_t>;

struct f32x16 { F32 v[4]; };
struct i32x16 { I32 v[4]; };

// Of one vector: what has no operator.
#if defined(__ARM_NEON)

PENSTOCK_INLINE F32 sqrt_of(F32 a) { return (F32)vsqrtq_f32((float32x4_t)a); }
PENSTOCK_INLINE I32 round_of(F32 a) { return (I32)vcvtnq_s32_f32((float32x4_t)a); }
PENSTOCK_INLINE I32 truncate_of(F32 a) { return (I32)vcvtq_s32_f32((float32x4_t)a); }
PENSTOCK_INLINE F32 add_pairs_of(F32 a, F32 b) { return (F32)vpaddq_f32((float32x4_t)a, (float32x4_t)b); }
PENSTOCK_INLINE I32 zip_first(I32 a, I32 b) { return (I32)vzip1q_s32((int32x4_t)a, (int32x4_t)b); }
PENSTOCK_INLINE I32 zip_last(I32 a, I32 b) { return (I32)vzip2q_s32((int32x4_t)a, (int32x4_t)b); }
PENSTOCK_INLINE I32 dot_i16_of(I32 sum, I16 a, I16 b) {
    const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
    return sum + (I32)vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
}
PENSTOCK_INLINE I32 add_pairs_of(I32 sum, I16 a) { return (I32)vpadalq_s16((int32x4_t)sum, (int16x8_t)a); }
PENSTOCK_INLINE I16 narrow_of(I32 a, I32 b) { return (I16)vuzp1q_s16((int16x8_t)a, (int16x8_t)b); }
PENSTOCK_INLINE U8 narrow_of(I16 a, I16 b) { return (U8)vuzp1q_u8((uint8x16_t)a, (uint8x16_t)b); }
PENSTOCK_INLINE U16 zip_first(U8 a, U8 b) { return (U16)vzip1q_u8((uint8x16_t)a, (uint8x16_t)b); }
PENSTOCK_INLINE U16 zip_last(U8 a, U8 b) { return (U16)vzip2q_u8((uint8x16_t)a, (uint8x16_t)b); }
PENSTOCK_INLINE I32 zip_first(U16 a, U16 b) { return (I32)vzip1q_u16((uint16x8_t)a, (uint16x8_t)b); }
PENSTOCK_INLINE I32 zip_last(U16 a, U16 b) { return (I32)vzip2q_u16((uint16x8_t)a, (uint16x8_t)b); }

#else

#if defined(__SSE2__)

PENSTOCK_INLINE F32 sqrt_of(F32 a) { return (F32)_mm_sqrt_ps((__m128)a); }
PENSTOCK_INLINE I32 round_of(F32 a) { return (I32)_mm_cvtps_epi32((__m128)a); }
PENSTOCK_INLINE I32 truncate_of(F32 a) { return (I32)_mm_cvttps_epi32((__m128)a); }
PENSTOCK_INLINE F32 add_pairs_of(F32 a, F32 b) {
    const __m128 x = (__m128)a, y = (__m128)b;
    return (F32)_mm_add_ps(_mm_shuffle_ps(x, y, 0x88), _mm_shuffle_ps(x, y, 0xdd));
}
PENSTOCK_INLINE I32 zip_first(I32 a, I32 b) { return (I32)_mm_unpacklo_epi32((__m128i)a, (__m128i)b); }
PENSTOCK_INLINE I32 zip_last(I32 a, I32 b) { return (I32)_mm_unpackhi_epi32((__m128i)a, (__m128i)b); }
PENSTOCK_INLINE I32 dot_i16_of(I32 sum, I16 a, I16 b) { return sum + (I32)_mm_madd_epi16((__m128i)a, (__m128i)b); }
PENSTOCK_INLINE I32 add_pairs_of(I32 sum, I16 a) { return dot_i16_of(sum, a, I16{} + 1); }
// Their low halves fit the packing instructions' signed and unsigned bounds.
PENSTOCK_INLINE I16 narrow_of(I32 a, I32 b) {
    return (I16)_mm_packs_epi32((__m128i)((I32)((U32)a << 16) >> 16), (__m128i)((I32)((U32)b << 16) >> 16));
}
PENSTOCK_INLINE U8 narrow_of(I16 a, I16 b) { return (U8)_mm_packus_epi16((__m128i)(a & 255), (__m128i)(b & 255)); }
PENSTOCK_INLINE U16 zip_first(U8 a, U8 b) { return (U16)_mm_unpacklo_epi8((__m128i)a, (__m128i)b); }
PENSTOCK_INLINE U16 zip_last(U8 a, U8 b) { return (U16)_mm_unpackhi_epi8((__m128i)a, (__m128i)b); }
PENSTOCK_INLINE I32 zip_first(U16 a, U16 b) { return (I32)_mm_unpacklo_epi16((__m128i)a, (__m128i)b); }
PENSTOCK_INLINE I32 zip_last(U16 a, U16 b) { return (I32)_mm_unpackhi_epi16((__m128i)a, (__m128i)b); }

#else  // lane by lane

template <class To, class Lane>
PENSTOCK_INLINE To of_lanes(const Lane& lane) {
    To all{};
    for (int i = 0; i < static_cast<int>(sizeof(To) / sizeof(all[0])); i++) all[i] = lane(i);
    return all;
}
PENSTOCK_INLINE F32 sqrt_of(F32 a) {
    return of_lanes<F32>([&](int i) { return __builtin_sqrtf(a[i]); });
}
PENSTOCK_INLINE I32 truncate_of(F32 a) {  // the lowest integer where it does not fit
    return of_lanes<I32>([&](int i) { return a[i] >= -0x1p31f && a[i] < 0x1p31f ? static_cast<int32_t>(a[i]) : INT32_MIN; });
}
PENSTOCK_INLINE I32 round_of(F32 a) {
    return truncate_of(of_lanes<F32>([&](int i) { return __builtin_rintf(a[i]); }));
}
PENSTOCK_INLINE F32 add_pairs_of(F32 a, F32 b) { return F32{a[0] + a[1], a[2] + a[3], b[0] + b[1], b[2] + b[3]}; }
template <class To, int From, class Vector>
PENSTOCK_INLINE To zip_from(Vector a, Vector b) {
    return (To)of_lanes<Vector>([&](int i) { return (i % 2 ? b : a)[From + i / 2]; });
}
PENSTOCK_INLINE I32 zip_first(I32 a, I32 b) { return zip_from<I32, 0>(a, b); }
PENSTOCK_INLINE I32 zip_last(I32 a, I32 b) { return zip_from<I32, 2>(a, b); }
PENSTOCK_INLINE U16 zip_first(U8 a, U8 b) { return zip_from<U16, 0>(a, b); }
PENSTOCK_INLINE U16 zip_last(U8 a, U8 b) { return zip_from<U16, 8>(a, b); }
PENSTOCK_INLINE I32 zip_first(U16 a, U16 b) { return zip_from<I32, 0>(a, b); }
PENSTOCK_INLINE I32 zip_last(U16 a, U16 b) { return zip_from<I32, 4>(a, b); }
PENSTOCK_INLINE I32 dot_i16_of(I32 sum, I16 a, I16 b) {
    return of_lanes<I32>([&](int i) { return sum[i] + a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1]; });
}
PENSTOCK_INLINE I32 add_pairs_of(I32 sum, I16 a) { return dot_i16_of(sum, a, I16{} + 1); }
PENSTOCK_INLINE I16 narrow_of(I32 a, I32 b) {
    return of_lanes<I16>([&](int i) { return static_cast<int16_t>(i < 4 ? a[i] : b[i - 4]); });
}
PENSTOCK_INLINE U8 narrow_of(I16 a, I16 b) {
    return of_lanes<U8>([&](int i) { return static_cast<uint8_t>(i < 8 ? a[i] : b[i - 8]); });
}

#endif
#endif

// `expression` of each of the four vectors, whose index is `i`.
#define PENSTOCK_EACH(Result, expression) \
    in_parts<Result>([&](int i) __attribute__((always_inline)) { return expression; })
template <class Result, class Part>
PENSTOCK_INLINE Result in_parts(const Part& part) {
    return {{part(0), part(1), part(2), part(3)}};
}

template <class To>
PENSTOCK_INLINE To load_vector(const void* p, int64_t byte) {
    To loaded;
    std::memcpy(&loaded, static_cast<const char*>(p) + byte, sizeof loaded);
    return loaded;
}

PENSTOCK_INLINE f32x16 set_f32(float x) {
    const F32 all{x, x, x, x};
    return {{all, all, all, all}};
}
PENSTOCK_INLINE i32x16 set_i32(int32_t x) {
    const I32 all{x, x, x, x};
    return {{all, all, all, all}};
}
PENSTOCK_INLINE f32x16 zero_f32() { return {}; }
PENSTOCK_INLINE i32x16 zero_i32() { return {}; }
PENSTOCK_INLINE f32x16 load_f32(const float* p) { return PENSTOCK_EACH(f32x16, load_vector<F32>(p, 16 * i)); }
PENSTOCK_INLINE i32x16 load_i32(const void* p) { return PENSTOCK_EACH(i32x16, load_vector<I32>(p, 16 * i)); }
PENSTOCK_INLINE f32x16 set_pairs_f32(const float* p) {  // p[0] and p[1] in turn
    const F32 pairs{p[0], p[1], p[0], p[1]};
    return {{pairs, pairs, pairs, pairs}};
}
PENSTOCK_INLINE void store_f32(float* p, f32x16 x) { std::memcpy(p, &x, sizeof x); }
PENSTOCK_INLINE void store_i32(void* p, i32x16 x) { std::memcpy(p, &x, sizeof x); }

PENSTOCK_INLINE f32x16 bits_as_f32(i32x16 a) { return PENSTOCK_EACH(f32x16, (F32)a.v[i]); }
PENSTOCK_INLINE i32x16 bits_as_i32(f32x16 a) { return PENSTOCK_EACH(i32x16, (I32)a.v[i]); }
PENSTOCK_INLINE f32x16 to_f32(i32x16 a) { return PENSTOCK_EACH(f32x16, __builtin_convertvector(a.v[i], F32)); }
PENSTOCK_INLINE i32x16 round_to_i32(f32x16 a) { return PENSTOCK_EACH(i32x16, round_of(a.v[i])); }  // ties to even
PENSTOCK_INLINE i32x16 truncate_to_i32(f32x16 a) { return PENSTOCK_EACH(i32x16, truncate_of(a.v[i])); }

PENSTOCK_INLINE f32x16 add(f32x16 a, f32x16 b) { return PENSTOCK_EACH(f32x16, a.v[i] + b.v[i]); }
PENSTOCK_INLINE f32x16 sub(f32x16 a, f32x16 b) { return PENSTOCK_EACH(f32x16, a.v[i] - b.v[i]); }
PENSTOCK_INLINE f32x16 mul(f32x16 a, f32x16 b) { return PENSTOCK_EACH(f32x16, a.v[i] * b.v[i]); }
PENSTOCK_INLINE f32x16 div(f32x16 a, f32x16 b) { return PENSTOCK_EACH(f32x16, a.v[i] / b.v[i]); }
PENSTOCK_INLINE f32x16 sqrt(f32x16 a) { return PENSTOCK_EACH(f32x16, sqrt_of(a.v[i])); }
PENSTOCK_INLINE f32x16 abs(f32x16 a) { return PENSTOCK_EACH(f32x16, (F32)((I32)a.v[i] & 0x7fffffff)); }
// b if either is NaN.
PENSTOCK_INLINE f32x16 max(f32x16 a, f32x16 b) { return PENSTOCK_EACH(f32x16, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
PENSTOCK_INLINE f32x16 min(f32x16 a, f32x16 b) { return PENSTOCK_EACH(f32x16, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
#if defined(__ARM_NEON)
PENSTOCK_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {  // a * b + c
    return PENSTOCK_EACH(f32x16, (F32)vfmaq_f32((float32x4_t)c.v[i], (float32x4_t)a.v[i], (float32x4_t)b.v[i]));
}
#else
inline __attribute__((noinline, cold)) f32x16 fma_by_lanes(f32x16 a, f32x16 b, f32x16 c) {
    for (int i = 0; i < 16; i++) c.v[i / 4][i % 4] = __builtin_fmaf(a.v[i / 4][i % 4], b.v[i / 4][i % 4], c.v[i / 4][i % 4]);
    return c;
}
#if defined(__SSE2__) && !defined(__FMA__)
// Products are exact in float64, and their sum is rounded to float64 and then to float32. That is the sum rounded once,
// unless the first rounding leads to the middle of two float32 or the result is subnormal: then by lanes.
PENSTOCK_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
    I32 unsure{};
    const auto sum = [&](int i) __attribute__((always_inline)) {
        const auto half = [](F32 x, F32 y, F32 z) __attribute__((always_inline)) {
            return _mm_add_pd(_mm_mul_pd(_mm_cvtps_pd((__m128)x), _mm_cvtps_pd((__m128)y)), _mm_cvtps_pd((__m128)z));
        };
        const auto upper = [](F32 x) __attribute__((always_inline)) { return (F32)_mm_movehl_ps((__m128)x, (__m128)x); };
        const __m128d low = half(a.v[i], b.v[i], c.v[i]), high = half(upper(a.v[i]), upper(b.v[i]), upper(c.v[i]));
        const F32 rounded = (F32)_mm_movelh_ps(_mm_cvtpd_ps(low), _mm_cvtpd_ps(high));
        const I32 ends = (I32)_mm_shuffle_ps(_mm_castpd_ps(low), _mm_castpd_ps(high), 0x88);
        const I32 heads = (I32)_mm_shuffle_ps(_mm_castpd_ps(low), _mm_castpd_ps(high), 0xdd);
        unsure |= ((ends & 0x1fffffff) == 0x10000000) | ((((I32)rounded & 0x7f800000) == 0) & ((heads & 0x7fffffff) != 0));
        return rounded;
    };
    const f32x16 all = in_parts<f32x16>(sum);
    return __builtin_expect(_mm_movemask_epi8((__m128i)unsure), 0) ? fma_by_lanes(a, b, c) : all;
}
#else
PENSTOCK_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return fma_by_lanes(a, b, c); }
#endif
#endif
PENSTOCK_INLINE f32x16 fnma(f32x16 a, f32x16 b, f32x16 c) {  // c - a * b
    return fma(PENSTOCK_EACH(f32x16, -a.v[i]), b, c);
}
PENSTOCK_INLINE f32x16 add_pairs_f32(f32x16 a, f32x16 b) {  // a[0] + a[1], a[2] + a[3] … b[14] + b[15]
    return {{add_pairs_of(a.v[0], a.v[1]), add_pairs_of(a.v[2], a.v[3]), add_pairs_of(b.v[0], b.v[1]),
             add_pairs_of(b.v[2], b.v[3])}};
}
PENSTOCK_INLINE f32x16 select_less(f32x16 x, f32x16 y, f32x16 a, f32x16 b) {
    return PENSTOCK_EACH(f32x16, x.v[i] < y.v[i] ? a.v[i] : b.v[i]);
}
PENSTOCK_INLINE f32x16 select_nan(f32x16 x, f32x16 a, f32x16 b) {
    return PENSTOCK_EACH(f32x16, x.v[i] == x.v[i] ? b.v[i] : a.v[i]);
}
// One bit per lane, the lowest lane first.
PENSTOCK_INLINE uint32_t less_bits(f32x16 a, f32x16 b) {
    const I32 place{1, 2, 4, 8};
    const i32x16 bits = PENSTOCK_EACH(i32x16, (I32)(a.v[i] < b.v[i]) & place << 4 * i);
    const I32 all = bits.v[0] | bits.v[1] | bits.v[2] | bits.v[3];
    return static_cast<uint32_t>(all[0] | all[1] | all[2] | all[3]);
}

PENSTOCK_INLINE i32x16 add(i32x16 a, i32x16 b) { return PENSTOCK_EACH(i32x16, (I32)((U32)a.v[i] + (U32)b.v[i])); }
PENSTOCK_INLINE i32x16 sub(i32x16 a, i32x16 b) { return PENSTOCK_EACH(i32x16, (I32)((U32)a.v[i] - (U32)b.v[i])); }
PENSTOCK_INLINE i32x16 max(i32x16 a, i32x16 b) { return PENSTOCK_EACH(i32x16, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
PENSTOCK_INLINE i32x16 min(i32x16 a, i32x16 b) { return PENSTOCK_EACH(i32x16, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
PENSTOCK_INLINE i32x16 bit_and(i32x16 a, i32x16 b) { return PENSTOCK_EACH(i32x16, a.v[i] & b.v[i]); }
PENSTOCK_INLINE i32x16 bit_or(i32x16 a, i32x16 b) { return PENSTOCK_EACH(i32x16, a.v[i] | b.v[i]); }
template <int N> PENSTOCK_INLINE i32x16 shift_left(i32x16 a) { return PENSTOCK_EACH(i32x16, (I32)((U32)a.v[i] << N)); }
template <int N> PENSTOCK_INLINE i32x16 shift_right(i32x16 a) { return PENSTOCK_EACH(i32x16, (I32)((U32)a.v[i] >> N)); }
template <int N> PENSTOCK_INLINE i32x16 shift_right_signed(i32x16 a) { return PENSTOCK_EACH(i32x16, a.v[i] >> N); }
PENSTOCK_INLINE i32x16 shift_right(i32x16 a, i32x16 n) {  // n below 32
    return PENSTOCK_EACH(i32x16, (I32)((U32)a.v[i] >> (U32)n.v[i]));
}
PENSTOCK_INLINE i32x16 rotate_left(i32x16 a, i32x16 n) {  // n from 1 to 31
    return PENSTOCK_EACH(i32x16, (I32)((U32)a.v[i] << (U32)n.v[i] | (U32)a.v[i] >> (32 - (U32)n.v[i])));
}
// The lanes of two vectors in turn: a0 b0 a1 b1 ..., first those of the lower halves.
PENSTOCK_INLINE void zip(i32x16 a, i32x16 b, i32x16& first, i32x16& last) {
    const auto half = [&](int i) __attribute__((always_inline)) {
        return i32x16{{zip_first(a.v[i], b.v[i]), zip_last(a.v[i], b.v[i]), zip_first(a.v[i + 1], b.v[i + 1]),
                       zip_last(a.v[i + 1], b.v[i + 1])}};
    };
    first = half(0), last = half(2);
}
// Lanes of high * 2^Shift + low.
template <int Shift> inline void store_i64(int64_t* p, i32x16 high, i32x16 low) {
    for (int i = 0; i < 16; i++) p[i] = (int64_t{high.v[i / 4][i % 4]} << Shift) + low.v[i / 4][i % 4];
}

PENSTOCK_INLINE i32x16 widen(U16 a, U16 b) {
    return {{zip_first(a, U16{}), zip_last(a, U16{}), zip_first(b, U16{}), zip_last(b, U16{})}};
}
PENSTOCK_INLINE i32x16 widen_u16(const void* p) { return widen(load_vector<U16>(p, 0), load_vector<U16>(p, 16)); }
PENSTOCK_INLINE i32x16 widen_u8(const void* p) {
    const U8 bytes = load_vector<U8>(p, 0);
    return widen(zip_first(bytes, U8{}), zip_last(bytes, U8{}));
}
PENSTOCK_INLINE i32x16 widen_i16(const void* p) { return shift_right_signed<16>(shift_left<16>(widen_u16(p))); }
PENSTOCK_INLINE i32x16 widen_i8(const void* p) { return shift_right_signed<24>(shift_left<24>(widen_u8(p))); }
// The low 16 or 8 bits of each lane.
PENSTOCK_INLINE void narrow_i16(void* p, i32x16 a) {
    const I16 halves[2] = {narrow_of(a.v[0], a.v[1]), narrow_of(a.v[2], a.v[3])};
    std::memcpy(p, halves, sizeof halves);
}
PENSTOCK_INLINE U8 as_bytes(i32x16 a) { return narrow_of(narrow_of(a.v[0], a.v[1]), narrow_of(a.v[2], a.v[3])); }
PENSTOCK_INLINE void narrow_i8(void* p, i32x16 a) {
    const U8 bytes = as_bytes(a);
    std::memcpy(p, &bytes, sizeof bytes);
}
// The lanes of four vectors, from -128 to 127, as bytes.
PENSTOCK_INLINE i32x16 narrow_i8(i32x16 a, i32x16 b, i32x16 c, i32x16 d) {
    return {{(I32)as_bytes(a), (I32)as_bytes(b), (I32)as_bytes(c), (I32)as_bytes(d)}};
}

// A power of two that is a number: the bits of its exponent.
PENSTOCK_INLINE f32x16 power_of_two(i32x16 exponent) { return bits_as_f32(shift_left<23>(add(exponent, set_i32(127)))); }

#if defined(__ARM_NEON)
PENSTOCK_INLINE f32x16 load_f16(const void* p) {
    return PENSTOCK_EACH(f32x16, (F32)vcvt_f32_f16((load_vector<float16x4_t>(p, 8 * i))));
}
PENSTOCK_INLINE void store_f16(void* p, f32x16 a) {
    for (int i = 0; i < 4; i++) {
        const float16x4_t rounded = vcvt_f16_f32((float32x4_t)a.v[i]);
        std::memcpy(static_cast<char*>(p) + 8 * i, &rounded, sizeof rounded);
    }
}
#else
PENSTOCK_INLINE f32x16 load_f16(const void* p) {
    const i32x16 half = widen_u16(p), sign = shift_left<16>(bit_and(half, set_i32(0x8000)));
    const i32x16 magnitude = shift_left<13>(bit_and(half, set_i32(0x7fff)));  // its exponent is 112 too low
    const f32x16 number = mul(bits_as_f32(magnitude), power_of_two(set_i32(112)));
    const i32x16 bits = PENSTOCK_EACH(  // infinite, or NaN, which gets quiet
        i32x16, magnitude.v[i] < 0x0f800000 ? (I32)number.v[i]
                                            : magnitude.v[i] | 0x7f800000 | ((magnitude.v[i] > 0x0f800000) & 0x00400000));
    return bits_as_f32(bit_or(bits, sign));
}
// To nearest, ties to even.
PENSTOCK_INLINE void store_f16(void* p, f32x16 a) {
    const i32x16 bits = bits_as_i32(a), magnitude = bit_and(bits, set_i32(0x7fffffff));
    const i32x16 odd = bit_and(shift_right<13>(magnitude), set_i32(1));
    const i32x16 normal = sub(shift_right<13>(add(magnitude, add(odd, set_i32(0xfff)))), set_i32(112 << 10));
    const f32x16 half = set_f32(0.5f);  // whose last bit is that of a subnormal float16
    const i32x16 subnormal = sub(bits_as_i32(add(bits_as_f32(magnitude), half)), bits_as_i32(half));
    const i32x16 rounded = PENSTOCK_EACH(i32x16, magnitude.v[i] < 113 << 23 ? subnormal.v[i] : normal.v[i]);
    const i32x16 nan = bit_or(bit_and(shift_right<13>(magnitude), set_i32(0x3ff)), set_i32(0x7e00));
    const i32x16 finite = PENSTOCK_EACH(i32x16, magnitude.v[i] > 0x7f800000 ? nan.v[i]
                                                : rounded.v[i] > 0x7c00     ? I32{} + 0x7c00
                                                                            : rounded.v[i]);
    narrow_i16(p, bit_or(finite, bit_and(shift_right<16>(bits), set_i32(0x8000))));
}
#endif

// a * 2^n, n a whole number; 0 where the lanes of `x` are ordered less than those of `y`.
PENSTOCK_INLINE f32x16 scale_unless_less(f32x16 a, f32x16 n, f32x16 x, f32x16 y) {
    const i32x16 exponent = round_to_i32(n);
    // Two factors: the largest power of two that may be needed is not representable as one.
    const i32x16 half = shift_right_signed<1>(exponent);
    return select_less(x, y, zero_f32(), mul(mul(a, power_of_two(half)), power_of_two(sub(exponent, half))));
}

// sum + the products of 16-bit pairs, both signed; exact as long as the sum fits.
PENSTOCK_INLINE i32x16 dot_i16(i32x16 sum, i32x16 a, i32x16 b) {
    return PENSTOCK_EACH(i32x16, dot_i16_of(sum.v[i], (I16)a.v[i], (I16)b.v[i]));
}
// Products of the even and of the odd bytes, the first unsigned, the second signed.
PENSTOCK_INLINE I16 even_products(I32 a, I32 b) { return ((I16)a & 255) * ((I16)((U16)b << 8) >> 8); }
PENSTOCK_INLINE I16 odd_products(I32 a, I32 b) { return (I16)((U16)a >> 8) * ((I16)b >> 8); }
// Sums of the products of two neighbours as int16, exact if they fit; and sums of such sums in int32.
PENSTOCK_INLINE i32x16 pairs_u8_i8(i32x16 a, i32x16 b) {
    return PENSTOCK_EACH(i32x16, (I32)(even_products(a.v[i], b.v[i]) + odd_products(a.v[i], b.v[i])));
}
PENSTOCK_INLINE i32x16 add_i16(i32x16 a, i32x16 b) { return PENSTOCK_EACH(i32x16, (I32)((I16)a.v[i] + (I16)b.v[i])); }
PENSTOCK_INLINE i32x16 add_pairs_i16(i32x16 sum, i32x16 a) {
    return PENSTOCK_EACH(i32x16, add_pairs_of(sum.v[i], (I16)a.v[i]));
}

// sum + the products of 8-bit quads, the first unsigned, the second signed; exact as long as the sum fits.
#if defined(__ARM_FEATURE_MATMUL_INT8)
PENSTOCK_INLINE i32x16 dot_u8_i8(i32x16 sum, i32x16 a, i32x16 b) {
    return PENSTOCK_EACH(i32x16, (I32)vusdotq_s32((int32x4_t)sum.v[i], (uint8x16_t)a.v[i], (int8x16_t)b.v[i]));
}
#elif defined(__ARM_FEATURE_DOTPROD)
// a is 128 more than the signed byte that is left without its upper bit's change; what 128 adds depends on b alone,
// which many products share.
PENSTOCK_INLINE i32x16 dot_u8_i8(i32x16 sum, i32x16 a, i32x16 b) {
    const auto dot = [&](int i) __attribute__((always_inline)) {
        const int8x16_t x = vreinterpretq_s8_u8(veorq_u8((uint8x16_t)a.v[i], vdupq_n_u8(128))), y = (int8x16_t)b.v[i];
        const int32x4_t left = vshlq_n_s32(vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(1), y), 7);
        return (I32)vdotq_s32(vaddq_s32((int32x4_t)sum.v[i], left), x, y);
    };
    return in_parts<i32x16>(dot);
}
#else
PENSTOCK_INLINE i32x16 dot_u8_i8(i32x16 sum, i32x16 a, i32x16 b) {
    return PENSTOCK_EACH(i32x16, add_pairs_of(add_pairs_of(sum.v[i], even_products(a.v[i], b.v[i])),
                                              odd_products(a.v[i], b.v[i])));
}
#endif
// The same, with the 4 bytes at `b` in each lane.
PENSTOCK_INLINE i32x16 dot_u8_i8(i32x16 sum, i32x16 a, const void* b) {
    int32_t bits;
    std::memcpy(&bits, b, 4);
    return dot_u8_i8(sum, a, set_i32(bits));
}
// The same for bytes of `a` below 128.
PENSTOCK_INLINE i32x16 dot_u7_i8(i32x16 sum, i32x16 a, const void* b) {
#if defined(__ARM_FEATURE_DOTPROD)
    int32_t bits;
    std::memcpy(&bits, b, 4);
    return PENSTOCK_EACH(i32x16, (I32)vdotq_s32((int32x4_t)sum.v[i], (int8x16_t)a.v[i], vreinterpretq_s8_s32(vdupq_n_s32(bits))));
#else
    return dot_u8_i8(sum, a, b);
#endif
}

// Halves are joined until one lane is left, as in the other bodies.
template <class Lanes, class Join>
PENSTOCK_INLINE auto fold(Lanes a, const Join& join) {
    auto lane = join(join(a.v[0], a.v[2]), join(a.v[1], a.v[3]));
    lane = join(lane, decltype(lane){lane[2], lane[3]});
    lane = join(lane, decltype(lane){lane[1]});
    return lane[0];
}
PENSTOCK_INLINE float sum_lanes(f32x16 a) {
    return fold(a, [](F32 x, F32 y) { return x + y; });
}
PENSTOCK_INLINE float max_lane(f32x16 a) {
    return fold(a, [](F32 x, F32 y) { return x > y ? x : y; });
}
PENSTOCK_INLINE int32_t sum_lanes(i32x16 a) {
    return fold(a, [](I32 x, I32 y) { return (I32)((U32)x + (U32)y); });
}
PENSTOCK_INLINE int32_t max_lane(i32x16 a) {
    return fold(a, [](I32 x, I32 y) { return x > y ? x : y; });
}

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define PENSTOCK_MULTIPLIES_BFLOAT16

// The widening multiply-adds round as `fma` does, of the odd elements, then of the even. (BFDOT and BFMMLA do not.)
PENSTOCK_INLINE f32x16 dot_bf16(f32x16 sum, i32x16 a, i32x16 b) {
    const auto dot = [&](int i) __attribute__((always_inline)) {
        const bfloat16x8_t x = (bfloat16x8_t)a.v[i], y = (bfloat16x8_t)b.v[i];
        return (F32)vbfmlalbq_f32(vbfmlaltq_f32((float32x4_t)sum.v[i], x, y), x, y);
    };
    return in_parts<f32x16>(dot);
}

// A table of 16 bytes, repeated four times; lookup of the byte at each index below 16; and, in each quarter, the first
// or last 8 bytes of `low` and `high` interleaved to 16 bits.
PENSTOCK_INLINE i32x16 load_table(const void* p) { return PENSTOCK_EACH(i32x16, (load_vector<I32>(p, 0 * i))); }
PENSTOCK_INLINE i32x16 pick_bytes(i32x16 table, i32x16 index) {
    return PENSTOCK_EACH(i32x16, (I32)vqtbl1q_u8((uint8x16_t)table.v[i], (uint8x16_t)index.v[i]));
}
PENSTOCK_INLINE i32x16 join_first(i32x16 low, i32x16 high) {
    return PENSTOCK_EACH(i32x16, (I32)zip_first((U8)low.v[i], (U8)high.v[i]));
}
PENSTOCK_INLINE i32x16 join_last(i32x16 low, i32x16 high) {
    return PENSTOCK_EACH(i32x16, (I32)zip_last((U8)low.v[i], (U8)high.v[i]));
}
// Converts e4m3 to bfloat16 in each 16-bit half of a lane: `codes` have it in the low bytes, `magnitudes` have its
// lower 7 bits in the bits 4 to 10, and `signs` its sign in bit 15; their other bits are ignored.
PENSTOCK_INLINE i32x16 e4m3_as_bf16(i32x16 codes, i32x16 magnitudes, i32x16 signs) {
    const U16 small{0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
    const auto convert = [&](int i) __attribute__((always_inline)) {
        const U16 magnitude = (U16)magnitudes.v[i] & 0x07f0, bytes = ((U16)codes.v[i] & 7) * 0x0202 + 0x0100;
        const U16 subnormal = (U16)vqtbl1q_u8((uint8x16_t)small, (uint8x16_t)bytes);
        const U16 value = (magnitude & 0x0780) == 0 ? subnormal : magnitude + (120 << 7);
        return (I32)(value | ((U16)signs.v[i] & 0x8000));
    };
    return in_parts<i32x16>(convert);
}
#endif

#undef PENSTOCK_EACH

}  // namespace PENSTOCK_ISA
}  // namespace penstock
