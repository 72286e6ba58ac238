// What all kinds of weights share: panels, blocks, slices, and the inner loop.
//
// A weight is divided into panels of 64 rows, and a panel into blocks along its columns; the blocks of a panel are
// contiguous, so that a thread reads its panels as one stream. A block has a line for each step of 4 bytes along the
// columns (4 int8, 2 16-bit values, or 1 float32): [steps][4 vectors][16 rows][4 bytes]. `linear_float32.h` and the
// other kinds' headers draw their blocks.
//
// A gated weight has 32 rows of the gate in the first half of each panel and the same 32 rows of `up` in the second.
//
// A slice is the part of a panel that stays in L1 while all tokens of a tile are multiplied with it. Between slices the
// sums of a tile are in memory. With several tiles some kinds use longer slices: L2 delivers them fast enough, and sums
// are loaded and stored less often.
#pragma once

#include "ops.h"
#include "prefetch.h"
#include "rows.h"
#include "simd.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

constexpr int kVectors = 4, kPanel = kVectors * kLanes;
constexpr int kLine = 4 * kPanel;  // bytes of a step
#if defined(__AVX512F__)
constexpr int kMaxRows = 6, kWide = 4;  // rows of x and vectors of weights per group: their sums fill the registers
constexpr int kMaxRowsHalf = 12;        // with half as many vectors
#elif defined(__AVX2__)
constexpr int kMaxRows = 2, kWide = 2, kMaxRowsHalf = 4;
#else
constexpr int kMaxRows = 2, kWide = 2, kMaxRowsHalf = kMaxRows;
#endif
constexpr int kSkewBytes = 64;  // between rows of activations, against cache set conflicts

// A thread's weights are a stream of megabytes: some processors read one stream faster than several.
using Fetch = PrefetchThrough<kRunsAhead ? 1 : 4>;

}  // namespace

// Sums of a token or of one of its rows over a panel.
struct alignas(64) Sums {
    float lane[kVectors][kLanes];

    void fill(f32x16 value) {
        for (auto& lanes : lane) store_f32(lanes, value);
    }
};

namespace {

// Blocks of a panel.
struct Slice {
    const uint8_t* data;
    int64_t first, count;
};

struct DotFloat32 {
    using Sum = f32x16;
    static f32x16 add(f32x16 sum, i32x16 weight, i32x16 x) { return fma(bits_as_f32(x), bits_as_f32(weight), sum); }
};
struct DotBFloat16 {
    using Sum = f32x16;
    static f32x16 add(f32x16 sum, i32x16 weight, i32x16 x) { return dot_bf16(sum, weight, x); }
};
struct DotInt16 {
    using Sum = i32x16;
    static i32x16 add(i32x16 sum, i32x16 weight, i32x16 x) { return dot_i16(sum, x, weight); }
};

// Add to `sum` the products of R rows of x, `stride` bytes apart, with kWide vectors of weights, over some steps.
template <class Dot, int R, int Steps>
inline __attribute__((always_inline)) void multiply_steps(typename Dot::Sum (&sum)[R][kWide], const uint8_t* weights,
                                                          const uint8_t* x, int64_t stride) {
#pragma GCC unroll 4
    for (int step = 0; step < Steps; step++) {
        i32x16 weight[kWide];
#pragma GCC unroll 4
        for (int v = 0; v < kWide; v++) weight[v] = load_i32(weights + step * kLine + 64 * v);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            int32_t bits;
            std::memcpy(&bits, x + r * stride + 4 * step, 4);
            const i32x16 value = set_i32(bits);
#pragma GCC unroll 4
            for (int v = 0; v < kWide; v++) sum[r][v] = Dot::add(sum[r][v], weight[v], value);
        }
    }
}

template <class Dot, int R>
inline __attribute__((always_inline)) void multiply(typename Dot::Sum (&sum)[R][kWide], const uint8_t* weights,
                                                    const uint8_t* x, int64_t stride, int64_t steps,
                                                    Fetch& fetched) {
    Fetch prefetch = fetched;  // in registers
    int64_t step = 0;
    for (; step + 4 <= steps; step += 4, weights += 4 * kLine, x += 16) {
        prefetch.steps(4);
        multiply_steps<Dot, R, 4>(sum, weights, x, stride);
    }
    for (; step < steps; step++, weights += kLine, x += 4) {
        prefetch.steps(1);
        multiply_steps<Dot, R, 1>(sum, weights, x, stride);
    }
    fetched = prefetch;
}

// Run body(r, v) for each of the sums in registers.
template <int R, int Wide = kWide, class Body>
inline __attribute__((always_inline)) void for_sums(const Body& body) {
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < Wide; v++) body(r, v);
    }
}

// Add a block's sums, value(r)(v), times the weight scales, weight_scale(v), and the scales of x, `step` apart.
template <int R, int Wide = kWide, class Value, class Scale>
inline __attribute__((always_inline)) void add_scaled(const Value& value, const Scale& weight_scale,
                                                      const float* scales, int64_t step, int first, Sums* sums) {
    f32x16 scale[Wide];
#pragma GCC unroll 4
    for (int v = 0; v < Wide; v++) scale[v] = weight_scale(v);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
        const f32x16 row_scale = set_f32(scales[r * step]);
        const auto value_of_row = value(r);
#pragma GCC unroll 4
        for (int v = 0; v < Wide; v++) {
            float* lanes = sums[r].lane[first + v];
            store_f32(lanes, fma(value_of_row(v), mul(scale[v], row_scale), load_f32(lanes)));
        }
    }
}

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// A row's 4 bytes of a step.
inline uint8_t* element(uint8_t* lines, int64_t step, int lane) { return lines + step * kLine + 4 * lane; }
inline const uint8_t* element(const uint8_t* lines, int64_t step, int lane) { return lines + step * kLine + 4 * lane; }

// A row to pack: floating point `values`, or integers, one per byte of `bytes`, with their scales and offsets.
struct Source {
    Row values;
    const uint8_t* bytes;
    const uint8_t *scales, *offsets, *super_scales, *super_offsets;  // of the weight's types

    // The bytes of N columns from `first` on, 0 beyond the last.
    template <int N>
    void copy(int64_t first, uint8_t* target) const {
        const int64_t count = values.count - first;
        if (count < N) std::memset(target, 0, N);
        if (count > 0) std::memcpy(target, bytes + first, static_cast<size_t>(std_min(count, N)));
    }
};

// The interface of a kind of weights: packing a panel, and multiplying a slice of it.
//
//   kColumns, kSteps        columns and steps of a block
//   kSlice, kLongSlice      blocks per slice with one tile of tokens, and with several
//   kOpensLong              whether unpacked slices are always long
//   kPackedGroups           with more groups of rows than this, a slice is unpacked first
//   kTileTokens             tokens whose sums fit L1 beside a slice
//   kNearGroups             maximum groups of rows that leave room in L1 for the next weights
//   kRows, kRowsAlone       maximum rows of x for `accumulate`; kRowsAlone: if there are no other rows
//   kTiledRows              maximum rows of x for `accumulate_tiled`, which multiplies unpacked slices; 0: there is none
//   kOpened                 maximum bytes written by `open`
//   Registers               in scope while a panel is multiplied
//   kOutliers               whether outliers follow the blocks of a panel; its rows are then packed together
//   Kind(weight, scratch, tokens)   uses `bytes_per_token` of `scratch` for each prepared token
//   prepare(row, token)     converts a row of x to the kind's form
//   open(slice, bytes)      unpacks a slice for use by many tokens
//   accumulate<R>           adds the products of R rows of x with a slice to their sums. Never inlined, as compilers
// run                           short of registers with several in one function; likewise `accumulate_opened`
//   begin                   initializes a row's sums
//
// The position and packing of blocks are functions of the weight, since integers have many layouts: `block_bytes`,
// `header_bytes` and `offset_of`, in bytes. `pack` writes a row's header fields to its lane of the header, and the 4
// bytes of each step to consecutive elements of `words`.
struct InBlocks {
    static constexpr bool kOutliers = false, kOpensLong = false;
    static constexpr int kTileTokens = 48, kNearGroups = 8, kPackedGroups = 1, kTiledRows = 0;
    struct Registers {
        Registers() {}
    };
};

// Consecutive blocks of the same layout.
template <int Columns, int Header, int Bytes>
struct AlikeBlocks : InBlocks {
    static constexpr int kColumns = Columns, kHeader = Header, kBytes = Bytes;
    static int64_t block_bytes(const Weight&) { return Bytes; }
    static int64_t header_bytes(const Weight&) { return Header; }
    static int64_t offset_of(const Weight&, int64_t block) { return block * Bytes; }
};

}  // namespace
}  // namespace PENSTOCK_ISA
}  // namespace penstock
