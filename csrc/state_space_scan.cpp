// The scan of Mamba 2 (Dao and Gu, 2024, arXiv:2405.21060): updates a head's memory S [state_size, head_dim] per token.
//
//   S = decay * S + B (t x)ᵀ;   y = Sᵀ C + skip * x
//
// Slices of the memory's columns are independent. All sums run over the rows in order.
#include "state_walk.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

constexpr int64_t kMostState = 512;
constexpr int64_t kMostDim = 512;

// A head's operands for the tokens of a tile.
struct Tile {
    int64_t count;
    alignas(64) float input[kTile][kMostState];
    alignas(64) float output[kTile][kMostState];
    alignas(64) float x[kTile][kMostDim];  // input, overwritten by the output
    alignas(64) float decay[kTile];
    alignas(64) float step[kTile];
};

struct Head {
    const ScanArgs& args;
    int64_t head;

    void load(int64_t row, int64_t count, Tile& tile) const {
        const int64_t inner = args.heads * args.head_dim, size = args.state_size;
        const int64_t group = head / (args.heads / args.groups);
        tile.count = count;
        for (int64_t i = 0; i < count; i++) {
            const int64_t at = (row + i) * args.xbc_stride, input = at + inner + group * size;
            widen_row(args.xbc, args.dtype, at + head * args.head_dim, args.head_dim, 1.0f, tile.x[i]);
            widen_row(args.xbc, args.dtype, input, size, 1.0f, tile.input[i]);
            widen_row(args.xbc, args.dtype, input + args.groups * size, size, 1.0f, tile.output[i]);
        }
        const int64_t first = row * args.steps_stride + head;
        const f32x16 given = load_column(args.steps, args.dtype, first, args.steps_stride, count);
        const f32x16 speed = exp(set_f32(args.log_decay[head]));
        const f32x16 time = softplus(add(given, set_f32(args.step_bias[head])));
        // NaN stays NaN in this order.
        const f32x16 step = min(set_f32(args.longest_step), max(set_f32(args.shortest_step), time));
        store_f32(tile.step, step);
        store_f32(tile.decay, exp(sub(zero_f32(), mul(speed, step))));
    }

    // The tokens of a tile over the slice that begins with column `first`; the state before them is `source`. What the
    // last one leaves is `target`.
    void pass(Tile& tile, int64_t first, const float* source, float* target) const {
        const f32x16 skip = set_f32(args.skip[head]);
        for (int64_t t = 0; t < tile.count; t++) {
            const f32x16 decay = set_f32(tile.decay[t]);
            const float *input = tile.input[t], *output = tile.output[t];
            float* values = tile.x[t] + first;
            f32x16 scaled[kSliceVectors], out[kSliceVectors];
            for (int v = 0; v < kSliceVectors; v++) {
                const f32x16 x = load_f32(values + v * kLanes);
                scaled[v] = mul(x, set_f32(tile.step[t]));
                out[v] = zero_f32();
            }
            for (int64_t i = 0; i < args.state_size; i++) {
                for (int v = 0; v < kSliceVectors; v++) {
                    const int64_t at = i * kSlice + v * kLanes;
                    const f32x16 memory = fma(scaled[v], set_f32(input[i]), mul(decay, load_f32(source + at)));
                    store_f32(target + at, memory);
                    out[v] = fma(memory, set_f32(output[i]), out[v]);
                }
            }
            for (int v = 0; v < kSliceVectors; v++)
                store_f32(values + v * kLanes, fma(skip, load_f32(values + v * kLanes), out[v]));
            source = target;
        }
    }

    void operator()(const Run& run, Tile& tile) const {
        const int64_t slices = num_slices(args.head_dim), elements = args.state_size * kSlice;
        const int64_t at = head * slices * elements;
        float* target = run.target + at;
        const float* source = run.source ? run.source + at : target;
        if (!run.source) std::memset(target, 0, static_cast<size_t>(slices * elements) * sizeof(float));
        for (int64_t done = 0; done < run.count; done += kTile) {
            load(run.row + done, std_min(kTile, run.count - done), tile);
            for (int64_t slice = 0; slice < slices; slice++)
                pass(tile, slice * kSlice, source + slice * elements, target + slice * elements);
            for (int64_t i = 0; i < tile.count; i++) {
                const int64_t out = ((run.row + done + i) * args.heads + head) * args.head_dim;
                for (int64_t column = 0; column < args.head_dim; column += kLanes)
                    write_row(args.out, args.dtype, out + column, args.head_dim - column,
                              load_f32(tile.x[i] + column));
            }
            source = target;
        }
    }
};

}  // namespace

void state_space_scan(const ScanArgs& args) {
    walk(args.state, *args.batch, args.heads, [&](int64_t head, const Run& run) {
        Tile tile;
        Head{args, head}(run, tile);
    });
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
