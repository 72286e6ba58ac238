// Activations of a gate, and the product with its other half.
#pragma once

#include "ops.h"
#include "simd.h"

namespace penstock {
namespace PENSTOCK_ISA {

// x / (1 + 2^power).
PENSTOCK_INLINE f32x16 gated_by(f32x16 x, f32x16 power) {
    const f32x16 most = min(set_f32(126.0f), power);  // NaN stays NaN in this order
    return mul(x, reciprocal(add(set_f32(1.0f), exp2(most))));
}

// GELU, tanh approximation: x times the sigmoid of 2 * sqrt(2 / pi) * (x + 0.044715 x^3).
PENSTOCK_INLINE f32x16 gelu_tanh(f32x16 x) {
    const f32x16 inner = mul(x, fma(mul(x, x), set_f32(0.044715f), set_f32(1.0f)));
    return gated_by(x, mul(inner, set_f32(-1.5957691216f * kLog2E)));
}

// GELU: x times the normal distribution function of x. Its tail beyond |x| is approximated by exp(-x^2 / 2) times a
// polynomial of 1 / (1 + 0.2316... |x|), with an error of at most 7.5e-8 (Abramowitz and Stegun, 7.1.26).
PENSTOCK_INLINE f32x16 gelu(f32x16 x) {
    const f32x16 size = abs(x), t = reciprocal(fma(size, set_f32(0.23164189f), set_f32(1.0f)));
    f32x16 p = set_f32(0.5307027145f);
    p = fma(p, t, set_f32(-0.7265760135f));
    p = fma(p, t, set_f32(0.7107068705f));
    p = fma(p, t, set_f32(-0.142248368f));
    p = fma(p, t, set_f32(0.1274147959f));
    const f32x16 beyond = mul(mul(p, t), exp2(mul(mul(x, x), set_f32(-0.5f * kLog2E))));
    return fnma(size, beyond, max(zero_f32(), x));  // NaN stays NaN in this order
}

PENSTOCK_INLINE f32x16 squared_relu(f32x16 x) {
    const f32x16 positive = max(zero_f32(), x);
    return mul(positive, positive);
}

// The activations of one argument.
PENSTOCK_INLINE f32x16 activated(int32_t activation, f32x16 x) {
    if (activation == kGelu) return gelu(x);
    if (activation == kGeluTanh) return gelu_tanh(x);
    return activation == kSquaredRelu ? squared_relu(x) : gated_by(x, mul(x, set_f32(-kLog2E)));
}

// gpt-oss: both arguments are clamped, and 1 is added to `up`.
PENSTOCK_INLINE f32x16 clamped_swiglu(f32x16 gate, f32x16 up) {
    const f32x16 limit = set_f32(7.0f), x = min(limit, gate), y = max(set_f32(-7.0f), min(limit, up));
    return mul(gated_by(x, mul(x, set_f32(-1.702f * kLog2E))), add(y, set_f32(1.0f)));
}

PENSTOCK_INLINE f32x16 activated(int32_t activation, f32x16 gate, f32x16 up) {
    if (activation == kClampedSwiglu) return clamped_swiglu(gate, up);
    return mul(activated(activation, gate), up);
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
