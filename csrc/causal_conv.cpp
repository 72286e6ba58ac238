// Causal convolution: each channel over a token and the few tokens before it.
//
// A result is the bias, then the products of the taps in order, oldest first.
#include "state_walk.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

constexpr int64_t kChannels = 256;  // of one work item
constexpr int64_t kMostTaps = 16;

struct Conv {
    const ConvArgs& args;
    int64_t first, count;  // channels

    // The value of 16 channels from `c` on: of the `back`-th token before the run's first where row is -back.
    f32x16 value(const Run& run, const float* before, int64_t row, int64_t c) const {
        const int64_t rest = first + count - c;
        if (row < 0)
            return before ? load_some(before + (args.kernel - 1 + row) * args.channels + c, rest) : zero_f32();
        const int64_t at = (run.row + row) * args.x_stride;
        const f32x16 x = load_some_as_f32(args.x, args.dtype, at + args.values + c, rest);
        return args.before < 0 ? x : mul(x, load_some_as_f32(args.x, args.dtype, at + args.before + c, rest));
    }

    void convolve(const Run& run, int64_t row, int64_t c) const {
        const int64_t rest = first + count - c;
        f32x16 sum = args.bias ? load_some(args.bias + c, rest) : zero_f32();
        for (int64_t tap = 0; tap < args.kernel; tap++) {
            const f32x16 factor = load_some(args.taps + tap * args.channels + c, rest);
            sum = fma(factor, value(run, run.source, row - (args.kernel - 1) + tap, c), sum);
        }
        if (args.silu) sum = silu(sum);
        if (args.after >= 0) {
            const int64_t at = (run.row + row) * args.x_stride + args.after + c;
            sum = mul(load_some_as_f32(args.x, args.dtype, at, rest), sum);
        }
        write_row(args.out, args.dtype, (run.row + row) * args.channels + c, rest, sum);
    }

    void operator()(const Run& run) const {
        for (int64_t row = 0; row < run.count; row++)
            for (int64_t c = first; c < first + count; c += kLanes) convolve(run, row, c);
        // The source may be the target: all values of a channel are read before the first is written.
        for (int64_t c = first; c < first + count; c += kLanes) {
            f32x16 last[kMostTaps];
            for (int64_t i = 0; i < args.kernel - 1; i++)
                last[i] = value(run, run.source, run.count - (args.kernel - 1) + i, c);
            for (int64_t i = 0; i < args.kernel - 1; i++)
                write_row(run.target, kFloat32, i * args.channels + c, first + count - c, last[i]);
        }
    }
};

}  // namespace

void causal_conv(const ConvArgs& args) {
    walk(args.state, *args.batch, (args.channels + kChannels - 1) / kChannels, [&](int64_t item, const Run& run) {
        const int64_t first = item * kChannels;
        Conv{args, first, std_min(kChannels, args.channels - first)}(run);
    });
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
