// RMS normalisation of groups of columns, with a gate before or after it.
//
// The order of a group's sum depends on its columns alone.
#include <cmath>

#include "ops.h"
#include "rows.h"
#include "simd.h"
#include "threads.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

// The columns of a row from `first` to `first + group`, which are `at` of x and `gate` of the gate.
void norm_group(const GatedNormArgs& args, int64_t first, int64_t at, int64_t gate) {
    const auto factor = [&](int64_t i) {
        return silu(load_some_as_f32(args.gate, args.dtype, gate + i, args.group - i));
    };
    const auto value = [&](int64_t i) {
        const f32x16 x = load_some_as_f32(args.x, args.dtype, at + i, args.group - i);
        return args.gate_first ? mul(x, factor(i)) : x;
    };
    f32x16 squares[4] = {zero_f32(), zero_f32(), zero_f32(), zero_f32()};
    for (int64_t i = 0; i < args.group; i += kLanes) {
        const f32x16 x = value(i);
        squares[i / kLanes % 4] = fma(x, x, squares[i / kLanes % 4]);
    }
    const float total = sum_lanes(add(add(squares[0], squares[1]), add(squares[2], squares[3])));
    const f32x16 scale = set_f32(1.0f / std::sqrt(total / static_cast<float>(args.group) + args.eps));
    for (int64_t i = 0; i < args.group; i += kLanes) {
        const f32x16 weight = load_some_as_f32(args.weight, args.dtype, first % args.weights + i, args.group - i);
        const f32x16 normed = mul(mul(value(i), scale), weight);
        write_row(args.x, args.dtype, at + i, args.group - i, args.gate_first ? normed : mul(normed, factor(i)));
    }
}

}  // namespace

void gated_rms_norm(const GatedNormArgs& args) {
    const int64_t groups = args.columns / args.group;
    parallel(
        [&](int64_t thread, int64_t threads) {
            const int64_t end = args.rows * groups * (thread + 1) / threads;
            for (int64_t index = args.rows * groups * thread / threads; index < end; index++) {
                const int64_t row = index / groups, first = index % groups * args.group;
                norm_group(args, first, row * args.columns + first, row * args.gate_stride + first);
            }
        },
        args.rows * args.columns);
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
