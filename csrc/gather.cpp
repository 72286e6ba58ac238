// Operations of one pass over memory: rows from and to a table by one index or three, neighbouring rows, sums of rows.
#include <cstring>

#include "ops.h"
#include "rows.h"
#include "simd.h"
#include "threads.h"

namespace penstock {
namespace PENSTOCK_ISA {

void gather(const GatherArgs& args) {
    parallel(
        [&](int64_t thread, int64_t threads) {
            const int64_t end = args.num_rows * (thread + 1) / threads;
            for (int64_t row = args.num_rows * thread / threads; row < end; row++)
                std::memcpy(args.y + row * args.row_bytes, args.table + args.row_ids[row] * args.table_stride,
                            static_cast<size_t>(args.row_bytes));
        },
        args.num_rows * args.row_bytes);
}

void gather_axes(const GatherAxesArgs& args) {
    const int64_t columns = args.columns;
    parallel(
        [&](int64_t thread, int64_t threads) {
            const int64_t end = args.rows * (thread + 1) / threads;
            for (int64_t row = args.rows * thread / threads; row < end; row++) {
                for (int64_t i = 0; i < 2 * columns; i++) {
                    const int64_t from = args.row_ids[3 * row + args.axes[i % columns]];
                    args.y[row * 2 * columns + i] = args.table[from * 2 * columns + i];
                }
            }
        },
        args.rows * 2 * columns);
}

void scatter(const ScatterArgs& args) {
    parallel(
        [&](int64_t thread, int64_t threads) {
            const int64_t end = args.num_rows * (thread + 1) / threads;
            for (int64_t row = args.num_rows * thread / threads; row < end; row++)
                std::memcpy(args.table + args.row_ids[row] * args.table_stride, args.x + row * args.row_bytes,
                            static_cast<size_t>(args.row_bytes));
        },
        args.num_rows * args.row_bytes);
}

void neighbours(const NeighboursArgs& args) {
    const Batch& batch = *args.batch;
    parallel(
        [&](int64_t thread, int64_t threads) {
            const int64_t end = batch.num_tokens * (thread + 1) / threads, around = args.width / 2;
            int64_t seq = 0;
            for (int64_t row = batch.num_tokens * thread / threads; row < end; row++) {
                while (batch.query_start[seq + 1] <= row) seq++;
                uint8_t* y = args.y + row * args.y_bytes;
                std::memset(y, 0, static_cast<size_t>(args.y_bytes));
                const int64_t first = std_max(row - around, batch.query_start[seq]);
                const int64_t last = std_min(row + around + 1, batch.query_start[seq + 1]);
                std::memcpy(y + (first - row + around) * args.x_bytes, args.x + first * args.x_bytes,
                            static_cast<size_t>((last - first) * args.x_bytes));
            }
        },
        batch.num_tokens * args.y_bytes);
}

void add_rows(const AddArgs& args) {
    parallel(
        [&](int64_t thread, int64_t threads) {
            const int64_t elements = args.rows * args.columns, vectors = (elements + kLanes - 1) / kLanes;
            const int64_t end = vectors * (thread + 1) / threads * kLanes;
            for (int64_t i = vectors * thread / threads * kLanes; i < end; i += kLanes) {
                const f32x16 x = load_some_as_f32(args.x, args.dtype, i, elements - i);
                const f32x16 residual = load_some_as_f32(args.residual, args.dtype, i, elements - i);
                const f32x16 sum = fma(x, set_f32(args.factor), residual);
                write_row(args.residual, args.dtype, i, elements - i, args.total ? mul(sum, set_f32(*args.total)) : sum);
            }
        },
        args.rows * args.columns);
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
