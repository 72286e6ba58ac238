// The last step of a linear map: scales, bias and activation of the sums. Compiled once, not per kind of weights, which
// would take half a minute.
#include "activations.h"
#include "linear_map.h"
#include "rows.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

// What an adapter multiplies the products of a row of x by; null: nothing.
inline const float* factors_of(const LinearArgs& args, int64_t token) {
    const int32_t slot = args.lora ? args.row_slots[token] : -1;
    const float* factors = slot < 0 ? nullptr : args.lora[slot * args.lora_stride].factors;
    return factors ? factors + args.lora_first : nullptr;
}

template <bool Gated>
__attribute__((noinline)) void finish_sums(const LinearArgs& given, int64_t begin, int64_t end, int64_t panel,
                                           const Sums* sums) {
    const LinearArgs args = given;  // a copy, which stores cannot alias
    constexpr int outputs = Gated ? kVectors / 2 : kVectors;
    const Weight& weight = *args.weight;
    const int64_t rows = weight.x_bytes;  // per token
    const int64_t width = Gated ? weight.rows / 2 : weight.rows, first = panel * outputs * kLanes;
    const bool activates = Gated || args.after_gate || args.activation != kNoActivation;
    f32x16 scale[kVectors], bias[kVectors];
    for (int v = 0; v < kVectors; v++) {
        const int64_t row = first + v % outputs * kLanes;
        scale[v] = weight.row_scales ? load_f32(weight.row_scales + panel * kPanel + v * kLanes) : set_f32(1.0f);
        bias[v] = args.bias ? load_some(args.bias + v / outputs * width + row, width - row) : zero_f32();
    }
    const auto at = [&](int64_t token, int v) { return token * args.y_stride + first + v * kLanes; };
    const bool whole = width - first >= outputs * kLanes;
    for (int64_t token = begin; token < end; token++) {
        const Sums* of_token = sums + (token - begin) * rows;
        const float* factors = factors_of(args, token);
        f32x16 y[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) {
            const f32x16 one = load_f32(of_token[0].lane[v]);
            const f32x16 total = rows == 1 ? one : add(one, load_f32(of_token[1].lane[v]));
            y[v] = factors ? mul(total, scale[v]) : fma(total, scale[v], bias[v]);
        }
        for (int v = 0; factors && v < kVectors; v++) {
            const int64_t row = first + v % outputs * kLanes;
            y[v] = fma(y[v], load_some(factors + v / outputs * width + row, width - row), bias[v]);
        }
        for (int v = 0; args.added && v < kVectors; v++) {
            const int64_t row = first + v % outputs * kLanes;
            y[v] = add(y[v], load_some(args.added + token * args.added_stride + v / outputs * width + row, width - row));
        }
        for (int v = 0; activates && v < outputs; v++) {  // one loop for all: each body has every activation's code
            f32x16 gate = y[v], up = Gated ? y[v + outputs] : set_f32(1.0f);
            if (!Gated && args.after_gate) {
                up = gate;
                gate = load_some_as_f32(args.y, args.y_dtype, at(token, v), width - first - v * kLanes);
            }
            y[v] = activated(args.activation, gate, up);
        }
        if (args.y_dtype == kFloat32 && whole) {
#pragma GCC unroll 4
            for (int v = 0; v < outputs; v++) store_f32(static_cast<float*>(args.y) + at(token, v), y[v]);
        } else if (args.y_dtype == kBFloat16 && whole) {
#pragma GCC unroll 2
            for (int v = 0; v < outputs; v += 2)
                store_bf16(static_cast<uint16_t*>(args.y) + at(token, v), y[v], y[v + 1]);
        } else {
            for (int v = 0; v < outputs; v++)
                write_row(args.y, args.y_dtype, at(token, v), width - first - v * kLanes, y[v]);
        }
    }
}

}  // namespace

void finish(const LinearArgs& args, int64_t begin, int64_t end, int64_t panel, const Sums* sums) {
    args.weight->gated ? finish_sums<true>(args, begin, end, panel, sums)
                       : finish_sums<false>(args, begin, end, panel, sums);
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
