// The gated delta rule (Yang et al., 2024, arXiv:2412.06464): a head's memory S [key_dim, value_dim] after each token.
//
//   S = decay * S;   S = S + k (rate * (v - Sᵀ k))ᵀ;   o = Sᵀ q
//
// `by_channel` (Kimi Team, 2025, arXiv:2510.26692): each row of S has a decay of its own.
//
// Slices of the memory's columns are independent. Each token takes one pass over a slice, which updates it, sums o, and
// sums Sᵀ k for the next token's key. All sums run over the rows in order.
#include <cmath>

#include "state_walk.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

constexpr int64_t kMostDim = 512;  // of keys and of values

// A head's operands for the tokens of a tile.
struct Tile {
    int64_t count;
    alignas(64) float query[kTile][kMostDim];
    alignas(64) float key[kTile][kMostDim];
    alignas(64) float value[kTile][kMostDim];
    alignas(64) float decay[kTile];
    alignas(64) float rate[kTile];
    // by channel alone
    alignas(64) float decays[kTile][kMostDim];
    alignas(64) float decayed_key[kTile][kMostDim];
};

struct Head {
    const DeltaArgs& args;
    int64_t head;

    int64_t key_head() const {
        return args.in_turn ? head % args.key_heads : head / (args.value_heads / args.key_heads);
    }

    // `count` elements normalised to unit length, times `scale`.
    void unit_row(int64_t at, float scale, float* target) const {
        f32x16 squares = zero_f32();
        for (int64_t i = 0; i < args.key_dim; i += kLanes) {
            const f32x16 x = load_some_as_f32(args.qkv, args.dtype, at + i, args.key_dim - i);
            squares = fma(x, x, squares);
        }
        widen_row(args.qkv, args.dtype, at, args.key_dim, scale / std::sqrt(sum_lanes(squares) + 1e-6f), target);
    }

    void load(int64_t row, int64_t count, Tile& tile) const {
        const int64_t keys = args.key_heads * args.key_dim;
        const float scale = 1.0f / std::sqrt(static_cast<float>(args.key_dim));
        tile.count = count;
        for (int64_t i = 0; i < count; i++) {
            const int64_t at = (row + i) * args.qkv_stride, key = at + key_head() * args.key_dim;
            unit_row(key, scale, tile.query[i]);
            unit_row(keys + key, 1.0f, tile.key[i]);
            widen_row(args.qkv, args.dtype, at + 2 * keys + head * args.value_dim, args.value_dim, 1.0f, tile.value[i]);
        }
        const int64_t gate = row * args.gates_stride + head;
        const f32x16 rate = load_column(args.gates, args.dtype, gate, args.gates_stride, count);
        store_f32(tile.rate, sigmoid(rate));
        if (args.by_channel) return load_decays(row, tile);
        const f32x16 step = load_column(args.gates, args.dtype, gate + args.value_heads, args.gates_stride, count);
        store_f32(tile.decay, decay_of(add(step, set_f32(args.step_bias[head]))));
    }

    f32x16 decay_of(f32x16 step) const {
        return exp(sub(zero_f32(), mul(exp(set_f32(args.log_decay[head])), softplus(step))));
    }

    void load_decays(int64_t row, Tile& tile) const {
        for (int64_t t = 0; t < tile.count; t++) {
            const int64_t steps = (row + t) * args.gates_stride + args.value_heads + head * args.key_dim;
            for (int64_t i = 0; i < args.key_dim; i += kLanes) {
                const f32x16 step = load_some_as_f32(args.gates, args.dtype, steps + i, args.key_dim - i);
                const f32x16 bias = load_some(args.step_bias + head * args.key_dim + i, args.key_dim - i);
                const f32x16 decay = decay_of(add(step, bias));
                store_f32(tile.decays[t] + i, decay);
                store_f32(tile.decayed_key[t] + i, mul(decay, load_f32(tile.key[t] + i)));
            }
        }
    }

    // Process the tokens of a tile for the slice that begins with column `first`: read the state before them from
    // `source`, and write the state after the last one to `target`.
    template <bool kByChannel>
    void pass(Tile& tile, int64_t first, const float* source, float* target) const {
        const auto& recalling = kByChannel ? tile.decayed_key : tile.key;
        f32x16 recalled[kSliceVectors] = {zero_f32(), zero_f32()};
        for (int64_t i = 0; i < args.key_dim; i++)
            for (int v = 0; v < kSliceVectors; v++)
                recalled[v] = fma(load_f32(source + i * kSlice + v * kLanes), set_f32(recalling[0][i]), recalled[v]);
        for (int64_t t = 0; t < tile.count; t++) {
            const f32x16 head_decay = kByChannel ? zero_f32() : set_f32(tile.decay[t]), rate = set_f32(tile.rate[t]);
            const float *key = tile.key[t], *query = tile.query[t], *next = recalling[std_min(t + 1, tile.count - 1)];
            float* value = tile.value[t] + first;
            f32x16 delta[kSliceVectors], out[kSliceVectors];
            for (int v = 0; v < kSliceVectors; v++) {
                const f32x16 wanted = load_f32(value + v * kLanes);
                delta[v] = mul(rate, kByChannel ? sub(wanted, recalled[v]) : fnma(head_decay, recalled[v], wanted));
                recalled[v] = out[v] = zero_f32();
            }
            for (int64_t i = 0; i < args.key_dim; i++) {
                const f32x16 decay = kByChannel ? set_f32(tile.decays[t][i]) : head_decay;
                for (int v = 0; v < kSliceVectors; v++) {
                    const int64_t at = i * kSlice + v * kLanes;
                    const f32x16 memory = fma(delta[v], set_f32(key[i]), mul(decay, load_f32(source + at)));
                    store_f32(target + at, memory);
                    out[v] = fma(memory, set_f32(query[i]), out[v]);
                    recalled[v] = fma(memory, set_f32(next[i]), recalled[v]);
                }
            }
            for (int v = 0; v < kSliceVectors; v++) store_f32(value + v * kLanes, out[v]);
            source = target;
        }
    }

    void operator()(const Run& run, Tile& tile) const {
        const int64_t slices = num_slices(args.value_dim), elements = args.key_dim * kSlice;
        const int64_t at = head * slices * elements;
        float* target = run.target + at;
        const float* source = run.source ? run.source + at : target;
        if (!run.source) std::memset(target, 0, static_cast<size_t>(slices * elements) * sizeof(float));
        for (int64_t done = 0; done < run.count; done += kTile) {
            load(run.row + done, std_min(kTile, run.count - done), tile);
            for (int64_t slice = 0; slice < slices; slice++) {
                const float* before = source + slice * elements;
                if (args.by_channel)
                    pass<true>(tile, slice * kSlice, before, target + slice * elements);
                else
                    pass<false>(tile, slice * kSlice, before, target + slice * elements);
            }
            for (int64_t i = 0; i < tile.count; i++) {
                const int64_t out = (run.row + done + i) * args.value_heads * args.value_dim + head * args.value_dim;
                for (int64_t column = 0; column < args.value_dim; column += kLanes)
                    write_row(args.out, args.dtype, out + column, args.value_dim - column,
                              load_f32(tile.value[i] + column));
            }
            source = target;
        }
    }
};

}  // namespace

void gated_delta_rule(const DeltaArgs& args) {
    walk(args.state, *args.batch, args.value_heads, [&](int64_t head, const Run& run) {
        Tile tile;
        Head{args, head}(run, tile);
    });
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
