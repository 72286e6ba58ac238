// The scan of Mamba (Gu and Dao, 2023, arXiv:2312.00752): updates the memory S [state_size, channels] per token.
//
//   S = exp(-exp(log_decay) t) * S + B (t x)ᵀ;   y = Sᵀ C + skip * x
//
// Slices of channels are independent, and divided among the threads. All sums run over the rows in order.
#include "state_walk.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

constexpr int64_t kMostState = 512;

// The operands of a slice's channels: for all tokens, and for those of a tile.
struct Tile {
    int64_t count;
    alignas(64) float speed[kMostState][kSlice];
    alignas(64) float skip[kSlice];
    alignas(64) float bias[kSlice];
    alignas(64) float input[kTile][kMostState];
    alignas(64) float output[kTile][kMostState];
    alignas(64) float x[kTile][kSlice];  // input, overwritten by the output
    alignas(64) float step[kTile][kSlice];
};

struct Slice {
    const SelectiveScanArgs& args;
    int64_t first;  // channel

    int64_t channels() const { return std_min(kSlice, args.channels - first); }

    void load_parameters(Tile& tile) const {
        for (int64_t i = 0; i < args.state_size; i++) {
            for (int64_t c = 0; c < kSlice; c += kLanes) {
                const f32x16 log_decay = load_column(args.log_decay, kFloat32, (first + c) * args.state_size + i,
                                                     args.state_size, std_min(kLanes, channels() - c));
                store_f32(tile.speed[i] + c, exp(log_decay));
            }
        }
        widen_row(args.skip, kFloat32, first, channels(), 1.0f, tile.skip);
        widen_row(args.step_bias, kFloat32, first, channels(), 1.0f, tile.bias);
    }

    void load(int64_t row, int64_t count, Tile& tile) const {
        tile.count = count;
        for (int64_t t = 0; t < count; t++) {
            const int64_t inputs = (row + t) * args.inputs_stride;
            widen_row(args.x, args.dtype, (row + t) * args.x_stride + first, channels(), 1.0f, tile.x[t]);
            widen_row(args.steps, args.dtype, (row + t) * args.steps_stride + first, channels(), 1.0f, tile.step[t]);
            widen_row(args.inputs, args.dtype, inputs, args.state_size, 1.0f, tile.input[t]);
            widen_row(args.inputs, args.dtype, inputs + args.state_size, args.state_size, 1.0f, tile.output[t]);
            for (int64_t c = 0; c < kSlice; c += kLanes)
                store_f32(tile.step[t] + c, softplus(add(load_f32(tile.step[t] + c), load_f32(tile.bias + c))));
        }
    }

    // The tokens of a tile: reads the state before them from `source`, writes the state after the last to `target`.
    void pass(Tile& tile, const float* source, float* target) const {
        for (int64_t t = 0; t < tile.count; t++) {
            f32x16 step[kSliceVectors], scaled[kSliceVectors], out[kSliceVectors];
            for (int v = 0; v < kSliceVectors; v++) {
                step[v] = load_f32(tile.step[t] + v * kLanes);
                scaled[v] = mul(load_f32(tile.x[t] + v * kLanes), step[v]);
                out[v] = zero_f32();
            }
            for (int64_t i = 0; i < args.state_size; i++) {
                for (int v = 0; v < kSliceVectors; v++) {
                    const int64_t at = i * kSlice + v * kLanes;
                    const f32x16 speed = load_f32(tile.speed[i] + v * kLanes);
                    const f32x16 decay = exp(sub(zero_f32(), mul(speed, step[v])));
                    const f32x16 memory =
                        fma(scaled[v], set_f32(tile.input[t][i]), mul(decay, load_f32(source + at)));
                    store_f32(target + at, memory);
                    out[v] = fma(memory, set_f32(tile.output[t][i]), out[v]);
                }
            }
            for (int v = 0; v < kSliceVectors; v++) {
                const f32x16 x = load_f32(tile.x[t] + v * kLanes);
                store_f32(tile.x[t] + v * kLanes, fma(load_f32(tile.skip + v * kLanes), x, out[v]));
            }
            source = target;
        }
    }

    void operator()(const Run& run, Tile& tile) const {
        const int64_t elements = args.state_size * kSlice, at = first / kSlice * elements;
        float* target = run.target + at;
        const float* source = run.source ? run.source + at : target;
        if (!run.source) std::memset(target, 0, static_cast<size_t>(elements) * sizeof(float));
        load_parameters(tile);
        for (int64_t done = 0; done < run.count; done += kTile) {
            load(run.row + done, std_min(kTile, run.count - done), tile);
            pass(tile, source, target);
            for (int64_t t = 0; t < tile.count; t++) {
                const int64_t out = (run.row + done + t) * args.channels + first;
                for (int64_t c = 0; c < kSlice; c += kLanes)
                    write_row(args.out, args.dtype, out + c, channels() - c, load_f32(tile.x[t] + c));
            }
            source = target;
        }
    }
};

}  // namespace

void selective_scan(const SelectiveScanArgs& args) {
    walk(args.state, *args.batch, num_slices(args.channels), [&](int64_t slice, const Run& run) {
        Tile tile;
        Slice{args, slice * kSlice}(run, tile);
    });
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
