// RMS normalisation (Zhang and Sennrich, 2019, arXiv:1910.07467), alone or after the residual sum.
//
// A row is summed in an order that depends on its columns alone.
#include <cmath>

#include "ops.h"
#include "rows.h"
#include "simd.h"
#include "threads.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

void norm_row(const NormArgs& args, int64_t row) {
    const int64_t first = row * args.stride, count = args.columns;
    const void* source = args.x;
    f32x16 squares[4] = {zero_f32(), zero_f32(), zero_f32(), zero_f32()};
    if (args.residual) {
        source = args.residual;
        for (int64_t i = 0; i < count; i += kLanes) {
            const f32x16 x = load_some_as_f32(args.x, args.dtype, first + i, count - i);
            const f32x16 residual = load_some_as_f32(args.residual, args.dtype, first + i, count - i);
            const f32x16 sum = fma(x, set_f32(args.factor), residual);
            write_row(args.residual, args.dtype, first + i, count - i, sum);
        }
    }
    for (int64_t i = 0; i < count; i += kLanes) {
        const f32x16 x = load_some_as_f32(source, args.dtype, first + i, count - i);
        f32x16& sum = squares[i / kLanes % 4];
        sum = fma(x, x, sum);
    }
    const float total = sum_lanes(add(add(squares[0], squares[1]), add(squares[2], squares[3])));
    const f32x16 scale = set_f32(1.0f / std::sqrt(total / static_cast<float>(count) + args.eps));
    for (int64_t i = 0; i < count; i += kLanes) {
        const f32x16 x = load_some_as_f32(source, args.dtype, first + i, count - i);
        const f32x16 weight = load_some_as_f32(args.weight, args.weight_dtype, i, count - i);
        write_row(args.y, args.dtype, first + i, count - i, mul(mul(x, scale), weight));
    }
}

}  // namespace

void rms_norm(const NormArgs& args) {
    parallel(
        [&](int64_t thread, int64_t threads) {
            const int64_t end = args.rows * (thread + 1) / threads;
            for (int64_t row = args.rows * thread / threads; row < end; row++) norm_row(args, row);
        },
        args.rows * args.columns);
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
