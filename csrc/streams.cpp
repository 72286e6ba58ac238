// What AltUp's streams and Gemma 3n's sparse MLPs need: sums of streams, magnitudes, and activations far above the mean.
//
// The order of a row's sums depends on its columns alone.
#include <cmath>

#include "ops.h"
#include "rows.h"
#include "simd.h"
#include "threads.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

// The sum of f(the elements) of a row, in a fixed order.
template <class F>
float sum_of(const void* data, int32_t dtype, int64_t first, int64_t count, const F& f) {
    f32x16 sum = zero_f32();
    alignas(64) float lanes[kLanes];
    for (int64_t i = 0; i < count; i += kLanes) {
        store_f32(lanes, f(load_some_as_f32(data, dtype, first + i, count - i)));
        sum = add(sum, load_some(lanes, count - i));  // nothing beyond the last column
    }
    return sum_lanes(sum);
}

template <class Body>
void for_rows(int64_t rows, int64_t columns, const Body& body) {
    parallel(
        [&](int64_t thread, int64_t threads) {
            const int64_t end = rows * (thread + 1) / threads;
            for (int64_t row = rows * thread / threads; row < end; row++) body(row);
        },
        rows * columns);
}

}  // namespace

void mix_streams(const MixStreamsArgs& args) {
    for_rows(args.rows, args.inputs * args.outputs * args.size, [&](int64_t row) {
        const float* factors = args.factors + row * args.factors_stride;
        for (int64_t out = 0; out < args.outputs; out++, factors += args.inputs) {
            for (int64_t i = 0; i < args.size; i += kLanes) {
                f32x16 sum = zero_f32();
                for (int64_t in = 0; in < args.inputs; in++) {
                    const int64_t at = row * args.x_stride + in * args.size + i;
                    sum = fma(load_some_as_f32(args.x, args.dtype, at, args.size - i), set_f32(factors[in]), sum);
                }
                if (args.scale) sum = mul(sum, load_some(args.scale + i, args.size - i));
                write_row(args.out, args.dtype, (row * args.outputs + out) * args.size + i, args.size - i, sum);
            }
        }
    });
}

void match_magnitude(const MatchArgs& args) {
    const auto square = [](f32x16 x) { return mul(x, x); };
    const float count = static_cast<float>(args.columns);
    for_rows(args.rows, args.columns, [&](int64_t row) {
        const int64_t first = row * args.columns;
        const float wanted = sum_of(args.like, args.dtype, row * args.like_stride, args.columns, square) / count;
        const float found = sum_of(args.x, args.dtype, first, args.columns, square) / count;
        const float factor = std::sqrt(wanted) / std::sqrt(found < args.least ? args.least : found);
        for (int64_t i = 0; i < args.columns; i += kLanes) {
            const f32x16 x = load_some_as_f32(args.x, args.dtype, first + i, args.columns - i);
            write_row(args.x, args.dtype, first + i, args.columns - i, mul(x, set_f32(factor)));
        }
    });
}

void keep_above(const KeepAboveArgs& args) {
    const float count = static_cast<float>(args.columns);
    for_rows(args.rows, args.columns, [&](int64_t row) {
        const int64_t first = row * args.columns;
        const float mean = sum_of(args.x, args.dtype, first, args.columns, [](f32x16 x) { return x; }) / count;
        const float squares = sum_of(args.x, args.dtype, first, args.columns, [&](f32x16 x) {
            const f32x16 away = sub(x, set_f32(mean));
            return mul(away, away);
        });
        const f32x16 least = set_f32(mean + args.deviations * std::sqrt(squares / count));
        for (int64_t i = 0; i < args.columns; i += kLanes) {
            const f32x16 x = load_some_as_f32(args.x, args.dtype, first + i, args.columns - i);
            // NaN stays NaN in this order.
            write_row(args.x, args.dtype, first + i, args.columns - i, max(zero_f32(), sub(x, least)));
        }
    });
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
