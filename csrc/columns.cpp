// Copies columns of rows to columns of other rows, head by head: as they are, converted, or with pairs deinterleaved.
#include <cstring>

#include "ops.h"
#include "rows.h"
#include "simd.h"
#include "threads.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

// x0 y0 x1 y1 .. becomes x0 x1 .. y0 y1 ..
template <class Element>
void take_apart(const Element* source, Element* target, int64_t count) {
    for (int64_t i = 0; i < count / 2; i++) {
        target[i] = source[2 * i];
        target[count / 2 + i] = source[2 * i + 1];
    }
}

void copy_row(const ColumnsArgs& args, int64_t row) {
    const int64_t size = bytes_of(args.dtype);
    const uint8_t* source = args.x + (row * args.x_stride + args.first) * size;
    uint8_t* target = args.y + (row * args.y_stride + args.to) * size;
    for (int64_t head = 0; head < args.heads; head++) {
        if (!args.paired)
            std::memcpy(target, source, static_cast<size_t>(args.count * size));
        else if (size == 4)
            take_apart(reinterpret_cast<const uint32_t*>(source), reinterpret_cast<uint32_t*>(target), args.count);
        else
            take_apart(reinterpret_cast<const uint16_t*>(source), reinterpret_cast<uint16_t*>(target), args.count);
        source += args.step * size;
        target += args.to_step * size;
    }
}

void convert_row(const ColumnsArgs& args, int64_t row) {
    int64_t from = row * args.x_stride + args.first, to = row * args.y_stride + args.to;
    for (int64_t head = 0; head < args.heads; head++, from += args.step, to += args.to_step)
        for (int64_t i = 0; i < args.count; i += kLanes)
            write_row(args.y, args.y_dtype, to + i, args.count - i,
                      load_some_as_f32(args.x, args.dtype, from + i, args.count - i));
}

}  // namespace

void copy_columns(const ColumnsArgs& args) {
    parallel(
        [&](int64_t thread, int64_t threads) {
            const int64_t end = args.rows * (thread + 1) / threads;
            for (int64_t row = args.rows * thread / threads; row < end; row++)
                args.dtype == args.y_dtype ? copy_row(args, row) : convert_row(args, row);
        },
        args.rows * args.heads * args.count);
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
