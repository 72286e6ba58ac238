// Activations of the elements of rows, and, between a division and a product, the soft cap of logits (tanh) and limits
// (clip); limits of columns.
#include "activations.h"
#include "ops.h"
#include "rows.h"
#include "simd.h"
#include "threads.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

// Relative error below 2e-7. Near 0 a polynomial (Cephes, tanhf), as the quotient would cancel.
f32x16 tanh(f32x16 x) {
    const f32x16 size = abs(x), square = mul(x, x), one = set_f32(1.0f);
    f32x16 p = set_f32(-5.70498872745e-3f);
    p = fma(p, square, set_f32(2.06390887954e-2f));
    p = fma(p, square, set_f32(-5.37397155531e-2f));
    p = fma(p, square, set_f32(1.33314422036e-1f));
    p = fma(p, square, set_f32(-3.33332819422e-1f));
    const f32x16 near = fma(mul(p, square), x, x);
    const f32x16 far = sub(one, div(set_f32(2.0f), add(exp(add(size, size)), one)));
    const i32x16 sign = bit_and(bits_as_i32(x), set_i32(INT32_MIN));
    return select_less(size, set_f32(0.625f), near, bits_as_f32(bit_or(bits_as_i32(far), sign)));  // NaN: `far`
}

// Of NaN it is NaN, unlike the sigmoid of `simd.h`.
f32x16 logistic(f32x16 x) {
    const f32x16 one = set_f32(1.0f);
    return div(one, add(one, exp(sub(zero_f32(), x))));
}

// xIELU (Huang and Schlag, 2024, arXiv:2411.13010): quadratic above 0, an integrated ELU below.
constexpr float kXieluBeta = 0.5f;

f32x16 xielu(f32x16 x, f32x16 alpha_p, f32x16 alpha_n) {
    const f32x16 beta = set_f32(kXieluBeta), positive = mul(x, fma(alpha_p, x, beta));
    const f32x16 grown = sub(exp(min(set_f32(-1e-6f), x)), set_f32(1.0f));  // NaN stays NaN in this order
    return select_less(zero_f32(), x, positive, fma(alpha_n, sub(grown, x), mul(beta, x)));
}

f32x16 activation_of(int32_t activation, f32x16 x, f32x16 alpha_p, f32x16 alpha_n) {
    switch (activation) {
        case kNoActivation: return x;
        case kRelu: return max(zero_f32(), x);  // NaN stays NaN in this order
        case kLogistic: return logistic(x);
        case kTanh: return tanh(x);
        case kClip: return max(set_f32(-1.0f), min(set_f32(1.0f), x));  // NaN stays NaN in this order
        case kXielu: return xielu(x, alpha_p, alpha_n);
        default: return activated(activation, x);
    }
}

}  // namespace

void activate(const ActivateArgs& args) {
    const bool has_alphas = args.activation == kXielu;
    const f32x16 alpha_p = has_alphas ? softplus(set_f32(*args.alpha_p)) : zero_f32();
    const f32x16 alpha_n = has_alphas ? add(set_f32(kXieluBeta), softplus(set_f32(*args.alpha_n))) : zero_f32();
    parallel(
        [&](int64_t thread, int64_t threads) {
            const int64_t elements = args.rows * args.columns, vectors = (elements + kLanes - 1) / kLanes;
            const int64_t end = vectors * (thread + 1) / threads * kLanes;
            for (int64_t i = vectors * thread / threads * kLanes; i < end; i += kLanes) {
                const f32x16 x = div(load_some_as_f32(args.x, args.dtype, i, elements - i), set_f32(args.divisor));
                const f32x16 y = mul(activation_of(args.activation, x, alpha_p, alpha_n), set_f32(args.factor));
                write_row(args.x, args.dtype, i, elements - i, y);
            }
        },
        args.rows * args.columns * (args.activation == kNoActivation ? 1 : 4));  // products alone are cheap
}

void limit(const LimitArgs& args) {
    const f32x16 low = set_f32(*args.low), high = set_f32(*args.high);
    parallel(
        [&](int64_t thread, int64_t threads) {
            const int64_t count = args.columns, end = args.rows * (thread + 1) / threads;
            for (int64_t row = args.rows * thread / threads; row < end; row++) {
                for (int64_t i = 0; i < count; i += kLanes) {
                    const int64_t at = row * args.stride + i;
                    const f32x16 x = load_some_as_f32(args.x, args.dtype, at, count - i);
                    write_row(args.x, args.dtype, at, count - i, min(high, max(low, x)));
                }
            }
        },
        args.rows * args.columns);
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
