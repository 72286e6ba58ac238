// RMS normalisation (Zhang and Sennrich, 2019, arXiv:1910.07467), alone or after the residual sum; with a bias, layer
// normalisation (Ba et al., 2016, arXiv:1607.06450).
//
// The order of a row's sum depends on its columns alone.
#include <cmath>

#include "ops.h"
#include "rows.h"
#include "simd.h"
#include "threads.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

// The sum of f(i) over the columns, in a fixed order.
template <class F>
float sum_over(int64_t count, const F& f) {
    f32x16 sums[4] = {zero_f32(), zero_f32(), zero_f32(), zero_f32()};
    for (int64_t first = 0; first < count; first += 4 * kLanes) {
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {  // unrolled, so that sums stay in registers
            const int64_t i = first + v * kLanes;
            if (i < count) sums[v] = f(i, sums[v]);
        }
    }
    return sum_lanes(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

// The factor that normalises elements whose mean square is `total` / `count`.
f32x16 scale_of(float total, int64_t count, float eps) {
    return set_f32(1.0f / std::sqrt(total / static_cast<float>(count) + eps));
}

// The residual plus x; x is normalised first if there is an `after` norm.
void add_to_residual(const NormArgs& args, int64_t first) {
    const int64_t count = args.columns;
    const auto x_at = [&](int64_t i) { return load_some_as_f32(args.x, args.dtype, first + i, count - i); };
    const auto residual_at = [&](int64_t i) { return load_some_as_f32(args.residual, args.dtype, first + i, count - i); };
    const auto put = [&](int64_t i, f32x16 sum) {
        if (args.total) sum = mul(sum, set_f32(*args.total));
        write_row(args.residual, args.dtype, first + i, count - i, sum);
    };
    const f32x16 factor = set_f32(args.factor);
    if (!args.after) {
        for (int64_t i = 0; i < count; i += kLanes) put(i, fma(x_at(i), factor, residual_at(i)));
        return;
    }
    const float squares = sum_over(count, [&](int64_t i, f32x16 sum) {
        const f32x16 x = x_at(i);
        return fma(x, x, sum);
    });
    const f32x16 scale = scale_of(squares, count, args.after_eps);
    for (int64_t i = 0; i < count; i += kLanes) {
        const f32x16 weight = load_some_as_f32(args.after, args.after_dtype, i, count - i);
        put(i, fma(mul(mul(x_at(i), scale), weight), factor, residual_at(i)));
    }
}

void norm_row(const NormArgs& args, int64_t first) {
    const int64_t count = args.columns;
    if (args.residual) add_to_residual(args, first);
    const void* source = args.residual ? args.residual : args.x;
    float mean = 0.0f;
    if (args.bias) {
        mean = sum_over(count, [&](int64_t i, f32x16 sum) {
                   return add(sum, load_some_as_f32(source, args.dtype, first + i, count - i));
               }) / static_cast<float>(count);
    }
    const auto centred = [&](int64_t i) {
        const f32x16 x = load_some_as_f32(source, args.dtype, first + i, count - i);
        if (!args.bias) return x;
        if (count - i >= kLanes) return sub(x, set_f32(mean));
        alignas(64) float lanes[kLanes];  // zeros beyond the last column
        store_f32(lanes, sub(x, set_f32(mean)));
        return load_some(lanes, count - i);
    };
    const float squares = sum_over(count, [&](int64_t i, f32x16 sum) {
        const f32x16 x = centred(i);
        return fma(x, x, sum);
    });
    const f32x16 scale = scale_of(squares, count, args.eps);
    for (int64_t i = 0; i < count; i += kLanes) {
        f32x16 y = mul(mul(centred(i), scale), load_some_as_f32(args.weight, args.weight_dtype, i, count - i));
        if (args.bias) y = add(y, load_some_as_f32(args.bias, args.weight_dtype, i, count - i));
        write_row(args.y, args.dtype, first + i, count - i, y);
    }
}

// Prefetches a row, as hardware fetches no further than to the end of a page.
void fetch(const NormArgs& args, int64_t first) {
    Row{args.x, args.dtype, first, args.columns}.fetch(0);
    if (args.residual) Row{args.residual, args.dtype, first, args.columns}.fetch(0);
}

}  // namespace

void rms_norm(const NormArgs& args) {
    parallel(
        [&](int64_t thread, int64_t threads) {
            const int64_t parts = args.rows * args.groups, end = parts * (thread + 1) / threads;
            const auto first = [&](int64_t part) { return part / args.groups * args.stride + part % args.groups * args.columns; };
            for (int64_t part = parts * thread / threads; part < end; part++) {
                if (part + 1 < end) fetch(args, first(part + 1));
                norm_row(args, first(part));
            }
        },
        args.rows * args.groups * args.columns);
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
