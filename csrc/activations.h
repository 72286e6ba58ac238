// What becomes of a gate, and of what it is for.
#pragma once

#include "ops.h"
#include "simd.h"

namespace penstock {
namespace PENSTOCK_ISA {

// x over (1 + 2 to the power of `power`).
inline f32x16 gated_by(f32x16 x, f32x16 power) {
    const f32x16 most = min(set_f32(126.0f), power);  // in this order what is no number stays so
    return mul(x, reciprocal(add(set_f32(1.0f), exp2(most))));
}

// gelu's approximation by tanh: x times the sigmoid of 2 * sqrt(2 / pi) * (x + 0.044715 x^3).
inline f32x16 gelu_tanh(f32x16 x) {
    const f32x16 bent = mul(x, fma(mul(x, x), set_f32(0.044715f), set_f32(1.0f)));
    return gated_by(x, mul(bent, set_f32(-1.5957691216f * kLog2E)));
}

// gpt-oss: both are clamped, and `up` begins at 1.
inline f32x16 clamped_swiglu(f32x16 gate, f32x16 up) {
    const f32x16 limit = set_f32(7.0f), x = min(limit, gate), y = max(set_f32(-7.0f), min(limit, up));
    return mul(gated_by(x, mul(x, set_f32(-1.702f * kLog2E))), add(y, set_f32(1.0f)));
}

inline f32x16 activated(int32_t activation, f32x16 gate, f32x16 up) {
    if (activation == kClampedSwiglu) return clamped_swiglu(gate, up);
    return mul(activation == kGeluTanh ? gelu_tanh(gate) : gated_by(gate, mul(gate, set_f32(-kLog2E))), up);
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
