// Iteration of recurrent layers over a step: each sequence's tokens in order, with its state in the blocks of its block
// table (`kernels/recurrent/__init__.py` draws one).
#pragma once

#include "ops.h"
#include "rows.h"
#include "simd.h"
#include "threads.h"

namespace penstock {
namespace PENSTOCK_ISA {

// Columns of a slice of a matrix state: a slice of 128 rows fits in the L1 cache.
constexpr int64_t kSlice = 32;
constexpr int kSliceVectors = kSlice / kLanes;
// Tokens whose operands are prepared together, one per lane of a vector.
constexpr int64_t kTile = kLanes;

inline int64_t num_slices(int64_t columns) { return (columns + kSlice - 1) / kSlice; }

// Consecutive tokens of a sequence whose states go to the same block.
struct Run {
    int64_t row;    // of the first token, in the step
    int64_t count;  // tokens
    const float* source;  // the state before the first; null: zeros
    float* target;        // the state after the last
};

// Calls body(run) for each run of a sequence, in order.
template <class Body>
void for_runs(const StatePart& state, const Batch& batch, int64_t seq, const Body& body) {
    const int64_t first = batch.query_start[seq], end = batch.seq_lens[seq];
    const int32_t* table = batch.blocks + batch.table_start[seq];
    const auto at = [&](int64_t position) { return table[position / state.block_size]; };
    const auto block = [&](int32_t index) { return state.data + index * state.block_stride; };
    const int64_t start = end - (batch.query_start[seq + 1] - first);
    const int32_t branch = batch.branches ? batch.branches[seq] : -1;
    // tokens before `own` go to the table's blocks
    const int64_t own = branch < 0 ? end : start + batch.branches[batch.num_seqs + seq];
    const float* source = start > 0 ? block(at(start - 1)) : nullptr;
    for (int64_t position = start, stop; position < end; position = stop) {
        const int32_t target = position < own ? at(position) : branch;
        stop = end;
        if (position < own) {
            stop = (position / state.block_size + 1) * state.block_size;
            while (stop < own && at(stop) == target) stop += state.block_size;
            stop = std_min(stop, own);
        }
        body(Run{first + position - start, stop - position, source, block(target)});
        source = block(target);
    }
}

// Calls body(item, run) for each item, sequence and run; items and sequences are distributed over the threads.
template <class Body>
void walk(const StatePart& state, const Batch& batch, int64_t items, const Body& body) {
    parallel([&](int64_t, int64_t) {
        take_turns(batch.num_seqs * items, [&](int64_t index, int64_t) {
            for_runs(state, batch, index / items, [&](const Run& run) { body(index % items, run); });
        });
    });
}

// Loads a column of `count` rows, `stride` elements apart, into lanes; the remaining lanes are 0.
inline f32x16 load_column(const void* data, int32_t dtype, int64_t first, int64_t stride, int64_t count) {
    alignas(64) float lanes[kLanes] = {};
    for (int64_t i = 0; i < count; i++) lanes[i] = value_of(data, dtype, first + i * stride);
    return load_f32(lanes);
}

// Loads `count` elements as float32, multiplied by `factor`, zero-padded to whole slices.
inline void widen_row(const void* data, int32_t dtype, int64_t first, int64_t count, float factor, float* target) {
    for (int64_t i = 0; i < num_slices(count) * kSlice; i += kLanes)
        store_f32(target + i, mul(load_some_as_f32(data, dtype, first + i, count - i), set_f32(factor)));
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
