// Layer normalisation (Ba et al., 2016, arXiv:1607.06450), alone or after the residual sum.
//
// A row is summed in an order that depends on its columns alone: first for its mean, then for the squares around that.
#include <cmath>

#include "ops.h"
#include "rows.h"
#include "simd.h"
#include "threads.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

// The sum over a row of body(i), by four vectors in turn.
template <class Body>
float sum_of(int64_t count, const Body& body) {
    f32x16 sums[4] = {zero_f32(), zero_f32(), zero_f32(), zero_f32()};
    for (int64_t i = 0; i < count; i += kLanes) sums[i / kLanes % 4] = add(sums[i / kLanes % 4], body(i));
    return sum_lanes(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

void layer_norm_row(const LayerNormArgs& args, int64_t row) {
    const int64_t count = args.columns, first = row * count;
    const void* source = args.x;
    if (args.residual) {
        void* target = args.keeps_sum ? args.residual : args.y;
        for (int64_t i = 0; i < count; i += kLanes) {
            const f32x16 x = load_some_as_f32(args.x, args.dtype, first + i, count - i);
            const f32x16 residual = load_some_as_f32(args.residual, args.dtype, first + i, count - i);
            write_row(target, args.dtype, first + i, count - i, fma(x, set_f32(args.factor), residual));
        }
        source = target;
    }
    const auto at = [&](int64_t i) { return load_some_as_f32(source, args.dtype, first + i, count - i); };
    const float mean = sum_of(count, at) / static_cast<float>(count);
    const float squares = sum_of(count, [&](int64_t i) {
        f32x16 x = sub(at(i), set_f32(mean));
        if (count - i < kLanes) {  // what is beyond the last column is not around the mean
            alignas(64) float lanes[kLanes];
            store_f32(lanes, x);
            x = load_some(lanes, count - i);
        }
        return mul(x, x);
    });
    const f32x16 scale = set_f32(1.0f / std::sqrt(squares / static_cast<float>(count) + args.eps));
    for (int64_t i = 0; i < count; i += kLanes) {
        const f32x16 weight = load_some_as_f32(args.weight, args.dtype, i, count - i);
        const f32x16 bias = args.bias ? load_some_as_f32(args.bias, args.dtype, i, count - i) : zero_f32();
        write_row(args.y, args.dtype, first + i, count - i, fma(mul(sub(at(i), set_f32(mean)), scale), weight, bias));
    }
}

}  // namespace

void layer_norm(const LayerNormArgs& args) {
    parallel(
        [&](int64_t thread, int64_t threads) {
            const int64_t end = args.rows * (thread + 1) / threads;
            for (int64_t row = args.rows * thread / threads; row < end; row++) layer_norm_row(args, row);
        },
        2 * args.rows * args.columns);
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
