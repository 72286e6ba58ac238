// The Walsh-Hadamard transform of heads for an int8 cache. It spreads each element over all others, so that a head has no
// outliers that would widen the steps of its integers, and leaves scores unchanged, as it is orthogonal up to a factor
// (Ashkboos et al., 2024, arXiv:2404.00456).
#pragma once

#include "ops.h"
#include "rows.h"
#include "simd.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

// Elements that are transformed together: the largest power of two that divides a head. Transforming them twice
// multiplies them by this number.
inline int64_t hadamard_size(int64_t head_dim) { return head_dim & -head_dim; }

// One run of elements. A stage adds and subtracts the halves and interleaves the results; after log2(size) stages each
// element has met every other one and is back in its place.
template <int Vectors>
inline void transform(float* x) {
    f32x16 a[Vectors], b[Vectors];
#pragma GCC unroll 32
    for (int i = 0; i < Vectors; i++) a[i] = load_f32(x + i * kLanes);
    for (int size = 1; size < Vectors * kLanes; size *= 2) {
#pragma GCC unroll 16
        for (int i = 0; i < Vectors / 2; i++) {
            i32x16 first, last;
            zip(bits_as_i32(add(a[i], a[i + Vectors / 2])), bits_as_i32(sub(a[i], a[i + Vectors / 2])), first, last);
            b[2 * i] = bits_as_f32(first), b[2 * i + 1] = bits_as_f32(last);
        }
#pragma GCC unroll 32
        for (int i = 0; i < Vectors; i++) a[i] = b[i];
    }
#pragma GCC unroll 32
    for (int i = 0; i < Vectors; i++) store_f32(x + i * kLanes, a[i]);
}

// Fewer elements than two vectors.
inline void transform_few(float* x, int64_t size) {
    float y[kLanes];
    for (int64_t stage = 1; stage < size; stage *= 2) {
        for (int64_t i = 0; i < size / 2; i++) {
            y[2 * i] = x[i] + x[i + size / 2];
            y[2 * i + 1] = x[i] - x[i + size / 2];
        }
        std::memcpy(x, y, static_cast<size_t>(size) * sizeof(float));
    }
}

// Transforms a head in place.
inline void hadamard(float* x, int64_t head_dim) {
    const int64_t size = hadamard_size(head_dim);
    for (float* end = x + head_dim; x < end; x += size) {
        switch (size) {
            case 32: transform<2>(x); break;
            case 64: transform<4>(x); break;
            case 128: transform<8>(x); break;
            case 256: transform<16>(x); break;
            case 512: transform<32>(x); break;
            default: transform_few(x, size);
        }
    }
}

}  // namespace
}  // namespace PENSTOCK_ISA
}  // namespace penstock
