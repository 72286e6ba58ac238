// Gating: activation(x) * y, elementwise.
#include "activations.h"
#include "ops.h"
#include "rows.h"
#include "simd.h"
#include "threads.h"

namespace penstock {
namespace PENSTOCK_ISA {

void gate(const GateArgs& args) {
    parallel(
        [&](int64_t thread, int64_t threads) {
            const int64_t count = args.columns, end = args.rows * (thread + 1) / threads;
            for (int64_t row = args.rows * thread / threads; row < end; row++) {
                for (int64_t i = 0; i < count; i += kLanes) {
                    const f32x16 x = load_some_as_f32(args.x, args.dtype, row * count + i, count - i);
                    const f32x16 y = load_some_as_f32(args.y, args.dtype, row * args.y_stride + i, count - i);
                    write_row(args.x, args.dtype, row * count + i, count - i, activated(args.activation, x, y));
                }
            }
        },
        args.rows * args.columns);
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
