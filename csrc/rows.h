// Rows of activations of any type, as vectors of float32, and their conversion to integers.
#pragma once

#include "ops.h"
#include "simd.h"

namespace penstock {
namespace PENSTOCK_ISA {

inline int64_t std_min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t std_max(int64_t a, int64_t b) { return a > b ? a : b; }

PENSTOCK_INLINE f32x16 load_as_f32(const void* data, int32_t dtype, int64_t at) {
    if (dtype == kFloat32) return load_f32(static_cast<const float*>(data) + at);
    const uint16_t* halves = static_cast<const uint16_t*>(data) + at;
    return dtype == kBFloat16 ? load_bf16(halves) : load_f16(halves);
}

PENSTOCK_INLINE void store_from_f32(void* data, int32_t dtype, int64_t at, f32x16 x) {
    if (dtype == kFloat32) return store_f32(static_cast<float*>(data) + at, x);
    uint16_t* halves = static_cast<uint16_t*>(data) + at;
    return dtype == kBFloat16 ? store_bf16(halves, x) : store_f16(halves, x);
}

inline int64_t bytes_of(int32_t dtype) { return dtype == kFloat32 ? 4 : 2; }

// The first `count` of 16 elements, below 16; the others are 0. Not inlined, as the next: most rows are whole vectors.
inline __attribute__((noinline)) f32x16 load_part_as_f32(const void* data, int32_t dtype, int64_t at, int64_t count) {
    alignas(64) uint8_t lanes[4 * kLanes] = {};
    if (count > 0)
        std::memcpy(lanes, static_cast<const uint8_t*>(data) + at * bytes_of(dtype), count * bytes_of(dtype));
    return load_as_f32(lanes, dtype, 0);
}

inline __attribute__((noinline)) void write_part(void* data, int32_t dtype, int64_t at, int64_t count, f32x16 x) {
    alignas(64) uint8_t lanes[4 * kLanes];
    store_from_f32(lanes, dtype, 0, x);
    if (count > 0) std::memcpy(static_cast<uint8_t*>(data) + at * bytes_of(dtype), lanes, count * bytes_of(dtype));
}

// The first `count` of 16 elements; the others are 0.
PENSTOCK_INLINE f32x16 load_some_as_f32(const void* data, int32_t dtype, int64_t at, int64_t count) {
    return count >= kLanes ? load_as_f32(data, dtype, at) : load_part_as_f32(data, dtype, at, count);
}

PENSTOCK_INLINE f32x16 load_some(const float* data, int64_t count) { return load_some_as_f32(data, kFloat32, 0, count); }

// Write the first `count` of 16 elements.
PENSTOCK_INLINE void write_row(void* data, int32_t dtype, int64_t at, int64_t count, f32x16 x) {
    count >= kLanes ? store_from_f32(data, dtype, at, x) : write_part(data, dtype, at, count, x);
}

inline float value_of(const void* data, int32_t dtype, int64_t at) {
    alignas(64) float lanes[kLanes];
    store_f32(lanes, load_some_as_f32(data, dtype, at, 1));
    return lanes[0];
}

inline void write_value(void* data, int32_t dtype, int64_t at, float x) { write_row(data, dtype, at, 1, set_f32(x)); }

// One row of a matrix.
struct Row {
    const void* data;
    int32_t dtype;
    int64_t first;  // element of `data` that the row begins with
    int64_t count;

    f32x16 at(int64_t i) const { return load_some_as_f32(data, dtype, first + i, count - i); }
    // Prefetch the row that begins `elements` after this one.
    void fetch(int64_t elements) const {
        const char* begin = static_cast<const char*>(data) + (first + elements) * bytes_of(dtype);
        for (int64_t i = 0; i < count * bytes_of(dtype); i += 64) __builtin_prefetch(begin + i);
    }
    void store_f32_at(float* target, int64_t i, f32x16 x) const { write_row(target, kFloat32, i, count - i, x); }

    // Calls body(load), where load(i) returns `at(from + i)` for i below `size`; faster for the usual types of rows.
    template <class Body>
    auto reading(int64_t from, int64_t size, const Body& body) const {
        if (dtype == kBFloat16 && from + size <= count) {
            const uint16_t* elements = static_cast<const uint16_t*>(data) + first + from;
            return body([=](int64_t i) { return load_bf16(elements + i); });
        }
        if (dtype == kFloat32 && from + size <= count) {
            const float* elements = static_cast<const float*>(data) + first + from;
            return body([=](int64_t i) { return load_f32(elements + i); });
        }
        return body([=](int64_t i) { return at(from + i); });
    }
};

// The largest magnitude of load(0) and so on, `count` elements (a multiple of 16); NaN counts as the largest.
template <class Load>
float largest(const Load& load, int64_t count) {
    i32x16 most = zero_i32();
    // Compared as integers: the bits of NaN are above those of all numbers.
    for (int64_t i = 0; i < count; i += kLanes) most = max(most, bits_as_i32(abs(load(i))));
    const int32_t bits = max_lane(most);
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Converts 64 elements from `first` on to integers with a shared exponent, so that the largest has `bits` bits and
// magnitudes are at most `limit`. Returns the integers' unit, a power of two; 0 if all elements are too small, NaN if
// one is NaN or infinite.
inline float share_exponent(const Row& row, int64_t first, int bits, int32_t limit, int16_t* target) {
    const float most = largest([&](int64_t i) { return row.at(first + i); }, 64);
    uint32_t word;
    std::memcpy(&word, &most, 4);
    const int32_t exponent = static_cast<int32_t>(word >> 23);  // biased by 127
    const int32_t unit = exponent - (bits - 1);                 // of the result, likewise
    if (unit < 1 || exponent == 255) {
        std::memset(target, 0, 64 * sizeof(int16_t));
        return 0.0f * most;
    }
    const f32x16 factor = bits_as_f32(set_i32((254 - unit) << 23));
    for (int i = 0; i < 4; i++) {
        const i32x16 rounded = round_to_i32(mul(row.at(first + i * kLanes), factor));
        narrow_i16(target + i * kLanes, max(min(rounded, set_i32(limit)), set_i32(-limit)));
    }
    const uint32_t scale_word = static_cast<uint32_t>(unit) << 23;
    float scale;
    std::memcpy(&scale, &scale_word, 4);
    return scale;
}

// Converts `count` elements (a multiple of 16) from `first` on to integers from -127 to 127, written with `bias` added,
// and sums the integers. Returns the scale; NaN if an element is NaN or infinite (the integers are then undefined).
inline float to_int8(const Row& row, int64_t first, int64_t count, int8_t* target, int32_t* sum, int32_t bias = 0) {
    return row.reading(first, count, [=](const auto& load) {
        const float most = largest(load, count);
        const bool usable = most >= 1e-30f && most <= 3e38f;
        const f32x16 factor = set_f32(usable ? 127.0f / most : 0.0f);
        i32x16 total = zero_i32();
        for (int64_t i = 0; i < count; i += kLanes) {
            const i32x16 rounded = round_to_i32(mul(load(i), factor));
            narrow_i8(target + i, add(rounded, set_i32(bias)));
            total = add(total, rounded);
        }
        *sum = sum_lanes(total);
        return usable ? most / 127.0f : 0.0f * most;
    });
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
