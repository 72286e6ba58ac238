// Multiplies heads by the sigmoids of their gates, which the projection of the queries computes beside the queries.
#include "ops.h"
#include "rows.h"
#include "simd.h"
#include "threads.h"

namespace penstock {
namespace PENSTOCK_ISA {

void head_gates(const HeadGatesArgs& args) {
    const int64_t heads = args.rows * args.num_heads, count = args.head_dim;
    parallel(
        [&](int64_t thread, int64_t threads) {
            const int64_t end = heads * (thread + 1) / threads;
            for (int64_t head = heads * thread / threads; head < end; head++) {
                const int64_t gate =
                    head / args.num_heads * args.gate_stride + head % args.num_heads * args.gate_step;
                for (int64_t i = 0; i < count; i += kLanes) {
                    const f32x16 x = load_some_as_f32(args.x, args.dtype, head * count + i, count - i);
                    const f32x16 by = sigmoid(load_some_as_f32(args.gate, args.dtype, gate + i, count - i));
                    write_row(args.x, args.dtype, head * count + i, count - i, mul(x, by));
                }
            }
        },
        heads * count);
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
