// Vectors of 16 lanes, the same on every instruction set: one __m512, two __m256, or four vectors of 16 bytes
// (`simd_generic.h`).
//
// Each source that includes this header is compiled once for every instruction set, inside a namespace of its own
// (PENSTOCK_ISA, set by CMake). A kernel written with these types does the same operations on the same lanes
// everywhere, so its results do not depend on the machine. Products and sums are fused only in `fma` and its kin: the
// sources are compiled with -ffp-contract=off.
#pragma once

// For functions that take or return several vectors: a call would pass each through memory.
#define PENSTOCK_INLINE inline __attribute__((always_inline))

#if defined(__AVX2__)
#include <immintrin.h>
#else
#include "simd_generic.h"
#endif

#include <cstdint>
#include <cstring>

namespace penstock {
namespace PENSTOCK_ISA {

constexpr int kLanes = 16;

// AVX-VNNI, the same instructions on 256 bits; its emulation takes AVX-512's encoding of them.
#if defined(__AVXVNNI__)
#define PENSTOCK_VNNI_256 "%{vex%} "
#elif defined(PENSTOCK_VNNI_256_EMULATED)
#define PENSTOCK_VNNI_256
#endif

// Whether one instruction multiplies bytes and sums the products in int32 (VNNI, i8mm).
#if defined(__AVX512VNNI__) || defined(PENSTOCK_VNNI_256) || defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool kDotsBytes = true;
#else
constexpr bool kDotsBytes = false;
#endif
// Whether one multiplies bytes and another applies signs to them, where none of the former is there.
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(PENSTOCK_VNNI_256)
#define PENSTOCK_SIGNS_BYTES
constexpr bool kSignsBytes = true;
#else
constexpr bool kSignsBytes = false;
#endif
// Whether one does for unsigned bytes below 128 (the signed products of ARM).
#if defined(__ARM_FEATURE_DOTPROD)
constexpr bool kDotsSmallBytes = true;
#else
constexpr bool kDotsSmallBytes = false;
#endif

#if defined(__AVX512F__)

struct f32x16 { __m512 v; };
struct i32x16 { __m512i v; };

inline f32x16 zero_f32() { return {_mm512_setzero_ps()}; }
inline f32x16 set_f32(float x) { return {_mm512_set1_ps(x)}; }
inline f32x16 load_f32(const float* p) { return {_mm512_loadu_ps(p)}; }
inline f32x16 set_pairs_f32(const float* p) {  // p[0] and p[1] in turn
    double pair;
    std::memcpy(&pair, p, 8);
    return {_mm512_castpd_ps(_mm512_set1_pd(pair))};
}
inline void store_f32(float* p, f32x16 x) { _mm512_storeu_ps(p, x.v); }
inline f32x16 add(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline f32x16 add_pairs_f32(f32x16 a, f32x16 b) {  // a[0] + a[1], a[2] + a[3] … b[14] + b[15]
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    return {_mm512_add_ps(_mm512_permutex2var_ps(a.v, even, b.v), _mm512_permutex2var_ps(a.v, odd, b.v))};
}
inline f32x16 sub(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline f32x16 mul(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline f32x16 div(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline f32x16 sqrt(f32x16 a) { return {_mm512_sqrt_ps(a.v)}; }
inline f32x16 max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }  // b if either is NaN
inline f32x16 min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }  // a * b + c
inline f32x16 fnma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }  // c - a * b
inline f32x16 abs(f32x16 a) { return {_mm512_abs_ps(a.v)}; }
inline f32x16 bits_as_f32(i32x16 a) { return {_mm512_castsi512_ps(a.v)}; }
inline i32x16 bits_as_i32(f32x16 a) { return {_mm512_castps_si512(a.v)}; }
inline f32x16 to_f32(i32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline i32x16 round_to_i32(f32x16 a) { return {_mm512_cvtps_epi32(a.v)}; }  // to nearest, ties to even
inline i32x16 truncate_to_i32(f32x16 a) { return {_mm512_cvttps_epi32(a.v)}; }
// One bit per lane, the lowest lane first.
inline uint32_t less_bits(f32x16 a, f32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ); }
// Lanes of high * 2^Shift + low.
template <int Shift> inline void store_i64(int64_t* p, i32x16 high, i32x16 low) {
    const auto join = [](__m256i a, __m256i b) {
        return _mm512_add_epi64(_mm512_slli_epi64(_mm512_cvtepi32_epi64(a), Shift), _mm512_cvtepi32_epi64(b));
    };
    _mm512_storeu_si512(p, join(_mm512_castsi512_si256(high.v), _mm512_castsi512_si256(low.v)));
    _mm512_storeu_si512(p + 8, join(_mm512_extracti64x4_epi64(high.v, 1), _mm512_extracti64x4_epi64(low.v, 1)));
}

inline i32x16 zero_i32() { return {_mm512_setzero_si512()}; }
inline i32x16 set_i32(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline i32x16 load_i32(const void* p) { return {_mm512_loadu_si512(p)}; }
inline void store_i32(void* p, i32x16 x) { _mm512_storeu_si512(p, x.v); }
inline i32x16 add(i32x16 a, i32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline i32x16 sub(i32x16 a, i32x16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline i32x16 max(i32x16 a, i32x16 b) { return {_mm512_max_epi32(a.v, b.v)}; }
inline i32x16 min(i32x16 a, i32x16 b) { return {_mm512_min_epi32(a.v, b.v)}; }
inline i32x16 bit_and(i32x16 a, i32x16 b) { return {_mm512_and_si512(a.v, b.v)}; }
inline i32x16 bit_or(i32x16 a, i32x16 b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int N> inline i32x16 shift_left(i32x16 a) { return {_mm512_slli_epi32(a.v, N)}; }
template <int N> inline i32x16 shift_right(i32x16 a) { return {_mm512_srli_epi32(a.v, N)}; }
template <int N> inline i32x16 shift_right_signed(i32x16 a) { return {_mm512_srai_epi32(a.v, N)}; }
inline i32x16 shift_right(i32x16 a, i32x16 n) { return {_mm512_srlv_epi32(a.v, n.v)}; }
inline i32x16 rotate_left(i32x16 a, i32x16 n) { return {_mm512_rolv_epi32(a.v, n.v)}; }
// The lanes of two vectors in turn: a0 b0 a1 b1 ..., first those of the lower halves.
inline void zip(i32x16 a, i32x16 b, i32x16& first, i32x16& last) {
    const __m512i lower = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i upper = _mm512_set_epi32(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8);
    first = {_mm512_permutex2var_epi32(a.v, lower, b.v)}, last = {_mm512_permutex2var_epi32(a.v, upper, b.v)};
}
inline i32x16 widen_u16(const void* p) {
    return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)))};
}
inline i32x16 widen_i16(const void* p) {
    return {_mm512_cvtepi16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)))};
}
inline i32x16 widen_i8(const void* p) {
    return {_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)))};
}
inline i32x16 widen_u8(const void* p) {
    return {_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)))};
}
// The low 16 or 8 bits of each lane.
inline void narrow_i16(void* p, i32x16 a) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a.v));
}
inline void narrow_i8(void* p, i32x16 a) { _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v)); }
// The lanes of four vectors, from -128 to 127, as bytes.
inline i32x16 narrow_i8(i32x16 a, i32x16 b, i32x16 c, i32x16 d) {
    const __m512i bytes = _mm512_packs_epi16(_mm512_packs_epi32(a.v, b.v), _mm512_packs_epi32(c.v, d.v));
    return {_mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), bytes)};
}
inline f32x16 load_f16(const void* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)))};
}
inline void store_f16(void* p, f32x16 a) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
// a where the lanes of `x` are ordered less than those of `y`, else b.
inline f32x16 select_less(f32x16 x, f32x16 y, f32x16 a, f32x16 b) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, y.v, _CMP_LT_OQ), b.v, a.v)};
}

// a * 2^n, n a whole number; 0 where the lanes of `x` are ordered less than those of `y`.
inline f32x16 scale_unless_less(f32x16 a, f32x16 n, f32x16 x, f32x16 y) {
    return {_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x.v, y.v, _CMP_NLT_UQ), a.v, n.v)};
}
// a where the lanes of `x` are NaN, else b.
inline f32x16 select_nan(f32x16 x, f32x16 a, f32x16 b) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q), b.v, a.v)};
}

// sum + the products of 16-bit pairs, both signed; exact as long as the sum fits.
//
// Here and below the instruction is inline assembly: for the intrinsic GCC 12 generates code that copies sums and
// spills.
inline i32x16 dot_i16(i32x16 sum, i32x16 a, i32x16 b) {
#if defined(__AVX512VNNI__)
    asm("vpdpwssd %2, %1, %0" : "+v"(sum.v) : "v"(a.v), "v"(b.v));
    return sum;
#else
    return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(a.v, b.v))};
#endif
}
// sum + the products of 8-bit quads, the first unsigned, the second signed; exact as long as the sum fits.
inline i32x16 dot_u8_i8(i32x16 sum, i32x16 a, i32x16 b) {
#if defined(__AVX512VNNI__)
    asm("vpdpbusd %2, %1, %0" : "+v"(sum.v) : "v"(a.v), "v"(b.v));
    return sum;
#else
    const __m512i low = _mm512_set1_epi16(0xff);
    __m512i even = _mm512_madd_epi16(_mm512_and_si512(a.v, low), _mm512_srai_epi16(_mm512_slli_epi16(b.v, 8), 8));
    __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(a.v, 8), _mm512_srai_epi16(b.v, 8));
    return {_mm512_add_epi32(sum.v, _mm512_add_epi32(even, odd))};
#endif
}
// The same, with the 4 bytes at `b` in each lane. On Zen 4 this is faster than a broadcast to a
// register for each product.
inline i32x16 dot_u8_i8(i32x16 sum, i32x16 a, const void* b) {
#if defined(__AVX512VNNI__)
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum.v) : "v"(a.v), "m"(*static_cast<const int32_t*>(b)));
    return sum;
#else
    int32_t bits;
    std::memcpy(&bits, b, 4);
    return dot_u8_i8(sum, a, set_i32(bits));
#endif
}
// Sums of the products of two neighbours as int16, exact if they fit; and sums of such sums in int32.
inline i32x16 pairs_u8_i8(i32x16 a, i32x16 b) { return {_mm512_maddubs_epi16(a.v, b.v)}; }
inline i32x16 add_i16(i32x16 a, i32x16 b) { return {_mm512_add_epi16(a.v, b.v)}; }
inline i32x16 add_pairs_i16(i32x16 sum, i32x16 a) {
    return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(a.v, _mm512_set1_epi16(1)))};
}
inline __m256 fold_add(f32x16 a) {
    return _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
}
inline __m256 fold_max(f32x16 a) {
    return _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
}
inline __m256i fold_add(i32x16 a) {
    return _mm256_add_epi32(_mm512_castsi512_si256(a.v), _mm512_extracti32x8_epi32(a.v, 1));
}
inline __m256i fold_max(i32x16 a) {
    return _mm256_max_epi32(_mm512_castsi512_si256(a.v), _mm512_extracti32x8_epi32(a.v, 1));
}

#elif defined(__AVX2__)  // with FMA and F16C

struct f32x16 { __m256 lo, hi; };
struct i32x16 { __m256i lo, hi; };

inline f32x16 zero_f32() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline f32x16 set_f32(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline f32x16 load_f32(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline f32x16 set_pairs_f32(const float* p) {
    double pair;
    std::memcpy(&pair, p, 8);
    const __m256 pairs = _mm256_castpd_ps(_mm256_set1_pd(pair));
    return {pairs, pairs};
}
inline void store_f32(float* p, f32x16 x) { _mm256_storeu_ps(p, x.lo), _mm256_storeu_ps(p + 8, x.hi); }
inline f32x16 add(f32x16 a, f32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline f32x16 add_pairs_f32(f32x16 a, f32x16 b) {
    const auto in_order = [](__m256 sums) {
        return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(sums), 0xd8));
    };
    return {in_order(_mm256_hadd_ps(a.lo, a.hi)), in_order(_mm256_hadd_ps(b.lo, b.hi))};
}
inline f32x16 sub(f32x16 a, f32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline f32x16 mul(f32x16 a, f32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline f32x16 div(f32x16 a, f32x16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline f32x16 sqrt(f32x16 a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
inline f32x16 max(f32x16 a, f32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline f32x16 min(f32x16 a, f32x16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline f32x16 fnma(f32x16 a, f32x16 b, f32x16 c) {
    return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
inline f32x16 abs(f32x16 a) {
    const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return {_mm256_and_ps(a.lo, mask), _mm256_and_ps(a.hi, mask)};
}
inline f32x16 bits_as_f32(i32x16 a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
inline i32x16 bits_as_i32(f32x16 a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
inline f32x16 to_f32(i32x16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline i32x16 round_to_i32(f32x16 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
inline i32x16 truncate_to_i32(f32x16 a) { return {_mm256_cvttps_epi32(a.lo), _mm256_cvttps_epi32(a.hi)}; }
inline uint32_t less_bits(f32x16 a, f32x16 b) {
    const int low = _mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ));
    const int high = _mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ));
    return static_cast<uint32_t>(low | high << 8);
}
template <int Shift> inline void store_i64(int64_t* p, i32x16 high, i32x16 low) {
    int32_t highs[kLanes], lows[kLanes];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(highs), high.lo);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(highs + 8), high.hi);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(lows), low.lo);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(lows + 8), low.hi);
    for (int i = 0; i < kLanes; i++) p[i] = (int64_t{highs[i]} << Shift) + lows[i];
}

inline __m256i load_256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline __m128i load_128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline __m128i load_64(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
inline const char* offset(const void* p, int bytes) { return static_cast<const char*>(p) + bytes; }
inline i32x16 zero_i32() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline i32x16 set_i32(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline i32x16 load_i32(const void* p) { return {load_256(p), load_256(offset(p, 32))}; }
inline void store_i32(void* p, i32x16 x) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), x.lo);
    _mm256_storeu_si256(static_cast<__m256i*>(p) + 1, x.hi);
}
inline i32x16 add(i32x16 a, i32x16 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline i32x16 sub(i32x16 a, i32x16 b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
inline i32x16 max(i32x16 a, i32x16 b) { return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)}; }
inline i32x16 min(i32x16 a, i32x16 b) { return {_mm256_min_epi32(a.lo, b.lo), _mm256_min_epi32(a.hi, b.hi)}; }
inline i32x16 bit_and(i32x16 a, i32x16 b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
inline i32x16 bit_or(i32x16 a, i32x16 b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
template <int N> inline i32x16 shift_left(i32x16 a) {
    return {_mm256_slli_epi32(a.lo, N), _mm256_slli_epi32(a.hi, N)};
}
template <int N> inline i32x16 shift_right(i32x16 a) {
    return {_mm256_srli_epi32(a.lo, N), _mm256_srli_epi32(a.hi, N)};
}
inline i32x16 shift_right(i32x16 a, i32x16 n) {
    return {_mm256_srlv_epi32(a.lo, n.lo), _mm256_srlv_epi32(a.hi, n.hi)};
}
inline i32x16 rotate_left(i32x16 a, i32x16 n) {
    const __m256i lo = _mm256_sub_epi32(_mm256_set1_epi32(32), n.lo), hi = _mm256_sub_epi32(_mm256_set1_epi32(32), n.hi);
    return {_mm256_or_si256(_mm256_sllv_epi32(a.lo, n.lo), _mm256_srlv_epi32(a.lo, lo)),
            _mm256_or_si256(_mm256_sllv_epi32(a.hi, n.hi), _mm256_srlv_epi32(a.hi, hi))};
}
template <int N> inline i32x16 shift_right_signed(i32x16 a) {
    return {_mm256_srai_epi32(a.lo, N), _mm256_srai_epi32(a.hi, N)};
}
inline i32x16 zip(__m256i a, __m256i b) {
    const __m256i low = _mm256_unpacklo_epi32(a, b), high = _mm256_unpackhi_epi32(a, b);
    return {_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31)};
}
inline void zip(i32x16 a, i32x16 b, i32x16& first, i32x16& last) { first = zip(a.lo, b.lo), last = zip(a.hi, b.hi); }
inline i32x16 widen_u16(const void* p) {
    return {_mm256_cvtepu16_epi32(load_128(p)), _mm256_cvtepu16_epi32(load_128(offset(p, 16)))};
}
inline i32x16 widen_i16(const void* p) {
    return {_mm256_cvtepi16_epi32(load_128(p)), _mm256_cvtepi16_epi32(load_128(offset(p, 16)))};
}
inline i32x16 widen_i8(const void* p) {
    return {_mm256_cvtepi8_epi32(load_64(p)), _mm256_cvtepi8_epi32(load_64(offset(p, 8)))};
}
inline i32x16 widen_u8(const void* p) {
    return {_mm256_cvtepu8_epi32(load_64(p)), _mm256_cvtepu8_epi32(load_64(offset(p, 8)))};
}
inline void narrow_i16(void* p, i32x16 a) {
    const i32x16 low = bit_and(a, set_i32(0xffff));
    const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(low.lo, low.hi), 0xd8);
    _mm256_storeu_si256(static_cast<__m256i*>(p), halves);
}
inline void narrow_i8(void* p, i32x16 a) {
    const i32x16 low = bit_and(a, set_i32(0xff));
    const __m256i halves = _mm256_packus_epi32(low.lo, low.hi), bytes = _mm256_packus_epi16(halves, halves);
    _mm_storeu_si128(static_cast<__m128i*>(p),
                     _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)));
}
inline i32x16 narrow_i8(i32x16 a, i32x16 b, i32x16 c, i32x16 d) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i low = _mm256_packs_epi16(_mm256_packs_epi32(a.lo, a.hi), _mm256_packs_epi32(b.lo, b.hi));
    const __m256i high = _mm256_packs_epi16(_mm256_packs_epi32(c.lo, c.hi), _mm256_packs_epi32(d.lo, d.hi));
    return {_mm256_permutevar8x32_epi32(low, order), _mm256_permutevar8x32_epi32(high, order)};
}
inline f32x16 load_f16(const void* p) {
    return {_mm256_cvtph_ps(load_128(p)), _mm256_cvtph_ps(load_128(offset(p, 16)))};
}
inline void store_f16(void* p, f32x16 a) {
    _mm_storeu_si128(static_cast<__m128i*>(p), _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(static_cast<__m128i*>(p) + 1, _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}
inline f32x16 select_less(f32x16 x, f32x16 y, f32x16 a, f32x16 b) {
    return {_mm256_blendv_ps(b.lo, a.lo, _mm256_cmp_ps(x.lo, y.lo, _CMP_LT_OQ)),
            _mm256_blendv_ps(b.hi, a.hi, _mm256_cmp_ps(x.hi, y.hi, _CMP_LT_OQ))};
}
inline f32x16 scale_unless_less(f32x16 a, f32x16 n, f32x16 x, f32x16 y) {
    const i32x16 exponent = round_to_i32(n);
    // Two factors: the largest power of two that may be needed is not representable as one.
    const i32x16 half = shift_right_signed<1>(exponent), rest = sub(exponent, half);
    const f32x16 first = bits_as_f32(shift_left<23>(add(half, set_i32(127))));
    const f32x16 second = bits_as_f32(shift_left<23>(add(rest, set_i32(127))));
    return select_less(x, y, zero_f32(), mul(mul(a, first), second));
}
inline f32x16 select_nan(f32x16 x, f32x16 a, f32x16 b) {
    return {_mm256_blendv_ps(b.lo, a.lo, _mm256_cmp_ps(x.lo, x.lo, _CMP_UNORD_Q)),
            _mm256_blendv_ps(b.hi, a.hi, _mm256_cmp_ps(x.hi, x.hi, _CMP_UNORD_Q))};
}
// Sums, added in the order that is written: of intrinsics GCC would make a tree, and spill all its leaves.
inline __m256i add_i16(__m256i sum, __m256i a) {
    asm("vpaddw %1, %0, %0" : "+x"(sum) : "x"(a));
    return sum;
}
inline __m256i add_i32(__m256i sum, __m256i a) {
    asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(a));
    return sum;
}
#if defined(PENSTOCK_VNNI_256)
inline __m256i dot_i16(__m256i sum, __m256i a, __m256i b) {
    asm(PENSTOCK_VNNI_256 "vpdpwssd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return sum;
}
inline __m256i dot_u8_i8(__m256i sum, __m256i a, __m256i b) {
    asm(PENSTOCK_VNNI_256 "vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return sum;
}
#else
inline __m256i dot_i16(__m256i sum, __m256i a, __m256i b) { return add_i32(sum, _mm256_madd_epi16(a, b)); }
inline __m256i dot_u8_i8(__m256i sum, __m256i a, __m256i b) {
    const __m256i low = _mm256_set1_epi16(0xff);
    __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, low), _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
    __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
    return add_i32(sum, _mm256_add_epi32(even, odd));
}
#endif
inline i32x16 dot_i16(i32x16 sum, i32x16 a, i32x16 b) { return {dot_i16(sum.lo, a.lo, b.lo), dot_i16(sum.hi, a.hi, b.hi)}; }
inline i32x16 dot_u8_i8(i32x16 sum, i32x16 a, i32x16 b) {
    return {dot_u8_i8(sum.lo, a.lo, b.lo), dot_u8_i8(sum.hi, a.hi, b.hi)};
}
inline i32x16 dot_u8_i8(i32x16 sum, i32x16 a, const void* b) {
    int32_t bits;
    std::memcpy(&bits, b, 4);
    return dot_u8_i8(sum, a, set_i32(bits));
}
inline i32x16 pairs_u8_i8(i32x16 a, i32x16 b) {
    return {_mm256_maddubs_epi16(a.lo, b.lo), _mm256_maddubs_epi16(a.hi, b.hi)};
}
inline i32x16 add_i16(i32x16 a, i32x16 b) { return {add_i16(a.lo, b.lo), add_i16(a.hi, b.hi)}; }
inline i32x16 add_pairs_i16(i32x16 sum, i32x16 a) {
    const __m256i one = _mm256_set1_epi16(1);
    return {add_i32(sum.lo, _mm256_madd_epi16(a.lo, one)), add_i32(sum.hi, _mm256_madd_epi16(a.hi, one))};
}
#if defined(PENSTOCK_SIGNS_BYTES)
inline i32x16 less_128_i8(i32x16 a) {
    const __m256i top = _mm256_set1_epi8(-128);
    return {_mm256_xor_si256(a.lo, top), _mm256_xor_si256(a.hi, top)};
}
inline i32x16 abs_i8(i32x16 a) { return {_mm256_abs_epi8(a.lo), _mm256_abs_epi8(a.hi)}; }
// a with the signs of b, zero where b is.
inline i32x16 sign_i8(i32x16 a, i32x16 b) { return {_mm256_sign_epi8(a.lo, b.lo), _mm256_sign_epi8(a.hi, b.hi)}; }
// All bits of the bytes that are negative.
inline i32x16 negative_i8(i32x16 a) {
    const __m256i zero = _mm256_setzero_si256();
    return {_mm256_cmpgt_epi8(zero, a.lo), _mm256_cmpgt_epi8(zero, a.hi)};
}
inline i32x16 bit_xor(i32x16 a, i32x16 b) { return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)}; }
#endif
inline __m256 fold_add(f32x16 a) { return _mm256_add_ps(a.lo, a.hi); }
inline __m256 fold_max(f32x16 a) { return _mm256_max_ps(a.lo, a.hi); }
inline __m256i fold_add(i32x16 a) { return _mm256_add_epi32(a.lo, a.hi); }
inline __m256i fold_max(i32x16 a) { return _mm256_max_epi32(a.lo, a.hi); }

#endif

#if defined(__AVX2__)
// The sum of all lanes, in one order on every machine: halves are added until one lane is left.
inline float sum_lanes(f32x16 a) {
    __m256 half = fold_add(a);
    __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}
inline float max_lane(f32x16 a) {
    __m256 half = fold_max(a);
    __m128 quarter = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    quarter = _mm_max_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_max_ss(quarter, _mm_movehdup_ps(quarter)));
}
inline int32_t sum_lanes(i32x16 a) {
    __m256i half = fold_add(a);
    __m128i quarter = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    quarter = _mm_add_epi32(quarter, _mm_shuffle_epi32(quarter, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(quarter, _mm_shuffle_epi32(quarter, 0xb1)));
}
inline int32_t max_lane(i32x16 a) {
    __m256i half = fold_max(a);
    __m128i quarter = _mm_max_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    quarter = _mm_max_epi32(quarter, _mm_shuffle_epi32(quarter, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(quarter, _mm_shuffle_epi32(quarter, 0xb1)));
}
#endif

// bfloat16: the upper half of a float32. Rounding is to nearest, ties to even; NaN stays NaN.
PENSTOCK_INLINE f32x16 load_bf16(const void* p) { return bits_as_f32(shift_left<16>(widen_u16(p))); }
PENSTOCK_INLINE i32x16 round_to_bf16(f32x16 a) {  // in the upper halves; the lower halves are undefined
    const i32x16 bits = bits_as_i32(a), odd = bit_and(shift_right<16>(bits), set_i32(1));
    const i32x16 rounded = add(bits, add(odd, set_i32(0x7fff))), quiet = bit_or(bits, set_i32(1 << 22));
    return bits_as_i32(select_nan(a, bits_as_f32(quiet), bits_as_f32(rounded)));
}
PENSTOCK_INLINE f32x16 as_bf16(f32x16 a) {
    return bits_as_f32(bit_and(round_to_bf16(a), set_i32(static_cast<int32_t>(0xffff0000))));
}
#if defined(__AVX512BF16__)  // the same, but subnormal numbers become zeros
PENSTOCK_INLINE void store_bf16(void* p, f32x16 a) {
    const __m256bh rounded = _mm512_cvtneps_pbh(a.v);
    std::memcpy(p, &rounded, sizeof rounded);
}
#else
PENSTOCK_INLINE void store_bf16(void* p, f32x16 a) { narrow_i16(p, shift_right<16>(round_to_bf16(a))); }
#endif
// Concatenation.
PENSTOCK_INLINE void store_bf16(void* p, f32x16 a, f32x16 b) {
#if defined(__AVX512BF16__)
    const __m512bh rounded = _mm512_cvtne2ps_pbh(b.v, a.v);
    std::memcpy(p, &rounded, sizeof rounded);
#elif defined(__AVX512F__)
    alignas(64) static const uint16_t upper[] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                 33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    const __m512i low = round_to_bf16(a).v, high = round_to_bf16(b).v;
    _mm512_storeu_si512(p, _mm512_permutex2var_epi16(low, _mm512_load_si512(upper), high));
#else
    store_bf16(p, a), store_bf16(static_cast<uint16_t*>(p) + kLanes, b);
#endif
}
// The even and the odd elements of 32 bfloat16s, which are 16 pairs.
inline f32x16 even_bf16(i32x16 pairs) { return bits_as_f32(shift_left<16>(pairs)); }
inline f32x16 odd_bf16(i32x16 pairs) { return bits_as_f32(bit_and(pairs, set_i32(static_cast<int32_t>(0xffff0000)))); }
// sum + the products of pairs of bfloat16s, first of the odd elements, then of the even: float32 sums of exact
// products.
#if !defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
inline f32x16 dot_bf16(f32x16 sum, i32x16 a, i32x16 b) {
#if defined(__AVX512BF16__)
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum.v) : "v"(a.v), "v"(b.v));  // subnormal numbers count as zeros
    return sum;
#else
    return fma(even_bf16(a), even_bf16(b), fma(odd_bf16(a), odd_bf16(b), sum));
#endif
}
#endif
#if defined(__AVX512BF16__) || defined(PENSTOCK_TILES_EMULATED)  // one instruction, or its emulation
#define PENSTOCK_MULTIPLIES_BFLOAT16

// A table of 16 bytes, repeated four times; lookup of the byte at each index below 16; and, in each quarter, the first
// or last 8 bytes of `low` and `high` interleaved to 16 bits.
inline i32x16 load_table(const void* p) {
    return {_mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(p)))};
}
inline i32x16 pick_bytes(i32x16 table, i32x16 index) { return {_mm512_shuffle_epi8(table.v, index.v)}; }
inline i32x16 join_first(i32x16 low, i32x16 high) { return {_mm512_unpacklo_epi8(low.v, high.v)}; }
inline i32x16 join_last(i32x16 low, i32x16 high) { return {_mm512_unpackhi_epi8(low.v, high.v)}; }

// Converts e4m3 to bfloat16 in each 16-bit half of a lane: `codes` have it in the low bytes, `magnitudes` have its
// lower 7 bits in the bits 4 to 10, and `signs` its sign in bit 15; their other bits are ignored.
inline i32x16 e4m3_as_bf16(i32x16 codes, i32x16 magnitudes, i32x16 signs) {
    alignas(64) static constexpr uint16_t small[32] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
    const __m512i magnitude = _mm512_and_si512(magnitudes.v, _mm512_set1_epi16(0x07f0));
    const __mmask32 is_small = _mm512_testn_epi16_mask(magnitude, _mm512_set1_epi16(0x0780));  // its exponent is 0
    const __m512i value = _mm512_mask_permutexvar_epi16(_mm512_add_epi16(magnitude, _mm512_set1_epi16(120 << 7)),
                                                        is_small, codes.v, _mm512_load_si512(small));
    return {_mm512_or_si512(value, _mm512_and_si512(signs.v, _mm512_set1_epi16(static_cast<int16_t>(0x8000))))};
}
#endif

// 1 / x for positive x, with a relative error below 2e-7; x is clamped to 2^125. Newton's method, starting from the
// negated exponent, is several times as fast as a division.
PENSTOCK_INLINE f32x16 reciprocal(f32x16 x) {
    const f32x16 one = set_f32(1.0f), d = min(x, set_f32(0x1p125f));
    f32x16 y = bits_as_f32(sub(set_i32(0x7ef311c7), bits_as_i32(d)));
#pragma GCC unroll 3
    for (int i = 0; i < 3; i++) y = fma(y, fnma(d, y, one), y);
    return y;
}

constexpr float kLog2E = 1.44269504f;

// 2^x for x at most 126, or NaN: relative error below 2e-7; 0 for x below -126.
PENSTOCK_INLINE f32x16 exp2(f32x16 x) {
    const f32x16 to_integer = set_f32(12582912.0f);  // 1.5 * 2^23: sums with it have no fraction
    const f32x16 shifted = add(x, to_integer), n = sub(shifted, to_integer), r = sub(x, n);
    f32x16 p = set_f32(1.3264727e-3f);
    p = fma(p, r, set_f32(9.671513e-3f));
    p = fma(p, r, set_f32(5.5507336e-2f));
    p = fma(p, r, set_f32(2.4022242e-1f));
    p = fma(p, r, set_f32(6.9314700e-1f));
    p = fma(p, r, set_f32(1.0f));
#if defined(__AVX512F__)
    return scale_unless_less(p, n, x, set_f32(-126.0f));
#else
    // The lowest bits of `shifted` are those of n, and 2^n is a normal number.
    const f32x16 power = bits_as_f32(add(shift_left<23>(bits_as_i32(shifted)), set_i32(127 << 23)));
    return select_less(x, set_f32(-126.0f), zero_f32(), mul(p, power));
#endif
}

PENSTOCK_INLINE f32x16 sigmoid(f32x16 x) {
    const f32x16 power = min(set_f32(126.0f), mul(x, set_f32(-kLog2E)));  // NaN stays NaN in this order
    return reciprocal(add(set_f32(1.0f), exp2(power)));
}

PENSTOCK_INLINE f32x16 silu(f32x16 x) { return mul(x, sigmoid(x)); }

// e^x: relative error below 2e-7 if the result is normal; 0 for x below -87.3.
PENSTOCK_INLINE f32x16 exp(f32x16 x) {
    const f32x16 lowest = set_f32(-87.33654f), highest = set_f32(89.0f);  // above `highest` the result is infinite
    const f32x16 clamped = min(highest, x);                               // NaN stays NaN in this order
    const f32x16 to_integer = set_f32(12582912.0f);                       // 1.5 * 2^23: sums with it have no fraction
    const f32x16 n = sub(fma(clamped, set_f32(1.44269504f), to_integer), to_integer);
    f32x16 r = fnma(n, set_f32(-2.12194440e-4f), fnma(n, set_f32(0.693359375f), clamped));
    f32x16 p = set_f32(1.9875691500e-4f);
    p = fma(p, r, set_f32(1.3981999507e-3f));
    p = fma(p, r, set_f32(8.3334519073e-3f));
    p = fma(p, r, set_f32(4.1665795894e-2f));
    p = fma(p, r, set_f32(1.6666665459e-1f));
    p = fma(p, r, set_f32(5.0000001201e-1f));
    p = add(fma(mul(r, r), p, r), set_f32(1.0f));
    return scale_unless_less(p, n, x, lowest);
}

// log(1 + exp(x)): relative error below 1e-6. With u = exp(-|x|), log(1 + u) is 2 atanh(u / (2 + u)), whose argument is
// at most 1/3.
PENSTOCK_INLINE f32x16 softplus(f32x16 x) {
    const f32x16 u = exp(sub(zero_f32(), abs(x))), s = div(u, add(u, set_f32(2.0f))), square = mul(s, s);
    f32x16 p = set_f32(1.0f / 15.0f);
#pragma GCC unroll 7
    for (int odd = 13; odd > 0; odd -= 2) p = fma(p, square, set_f32(1.0f / static_cast<float>(odd)));
    return fma(add(s, s), p, max(zero_f32(), x));  // NaN stays NaN in this order
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
