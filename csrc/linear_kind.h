// What the kinds of weights have in common: panels, blocks and slices of them, and the loop that multiplies.
//
// A weight is cut into panels of 64 rows, and a panel into blocks along its columns; blocks of a panel follow one
// another, so that a thread reads its panels as one stream. In a block there is for each step of 4 bytes along the
// columns (4 int8, 2 of 16 bits, or 1 float32) a line of the panel's rows: [steps][4 vectors][16 rows][4 bytes].
// `linear_float32.h` and its neighbours draw the blocks of each kind.
//
// A gated weight has 32 rows of the gate in the first halves of its panels and their 32 rows of `up` in the second.
//
// A slice is what of a panel stays in the first cache while all tokens of a tile meet it. Between slices the sums of a
// tile lie in memory. Where there are several tiles, some kinds have longer slices: they come from the second cache fast
// enough, and the sums are fetched and stored less often.
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
constexpr int kMaxRows = 6, kWide = 4;  // rows of x and vectors of weights at a time: their sums fill the registers
constexpr int kMaxRowsHalf = 12;        // by half as many vectors
#else
constexpr int kMaxRows = 2, kWide = 2, kMaxRowsHalf = kMaxRows;
#endif
constexpr int kSkewBytes = 64;  // between rows of activations, which would else compete for the same places in the cache

// A thread's weights are one stream of megabytes, which is read faster as one than in parts where processors run ahead.
using Fetch = PrefetchThrough<kRunsAhead ? 1 : 4>;

struct alignas(64) Sums {
    float lane[kVectors][kLanes];

    void fill(f32x16 value) {
        for (auto& lanes : lane) store_f32(lanes, value);
    }
};

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

// Add to `sum` the products of R rows of x, `stride` bytes apart, and kWide vectors of weights, over some steps.
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

// Run body(r, v) for each of the sums that are in registers.
template <int R, int Wide = kWide, class Body>
inline __attribute__((always_inline)) void for_sums(const Body& body) {
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < Wide; v++) body(r, v);
    }
}

// Add a block's sums, value(r)(v), times the scales of the weights, weight_scale(v), and of x, `step` apart.
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

// The 4 bytes of a row in a step.
inline uint8_t* element(uint8_t* lines, int64_t step, int lane) { return lines + step * kLine + 4 * lane; }
inline const uint8_t* element(const uint8_t* lines, int64_t step, int lane) { return lines + step * kLine + 4 * lane; }

// One row to pack: floating point `values`, or integers, one a byte of `bytes`, with their scales and offsets.
struct Source {
    Row values;
    const uint8_t* bytes;
    const uint8_t *scales, *offsets, *super_scales, *super_offsets;  // of the types that the weight has

    // The bytes of N columns from `first` on, 0 beyond the last.
    template <int N>
    void copy(int64_t first, uint8_t* target) const {
        const int64_t count = values.count - first;
        if (count < N) std::memset(target, 0, N);
        if (count > 0) std::memcpy(target, bytes + first, static_cast<size_t>(std_min(count, N)));
    }
};

// A kind of weights: how a panel is packed, and the sums of products over a slice of one.
//
//   kColumns, kSteps        columns and steps of a block
//   kSlice, kLongSlice      blocks of a slice where one tile of tokens meets it, and where several do
//   kOpensLong              whether slices that are opened are long ones always
//   kTileTokens             tokens whose sums stay in the first cache, beside a slice
//   kRows, kRowsAlone       rows of x that `accumulate` takes at most, and where those are all
//   kOpened                 bytes that `open` needs at most
//   kOutliers               whether any follow the blocks of a panel, whose rows are packed together then
//   Kind(weight, scratch, tokens)   memory for the tokens in the kind's form; `bytes_per_token` of it
//   prepare(row, token)     brings a row of x into that form
//   open(slice, bytes)      makes of a slice what many tokens are multiplied with
//   accumulate<R>           adds the products of R rows of x with a slice to their sums. It is never inlined, as compilers
//                           run short of registers where several are in one function; nor is `accumulate_opened`
//   begin                   sets up a row's sums
//
// Where a block lies, and how a row's part of it is packed and unpacked, are functions of the weight, since integers have
// many layouts: `block_bytes`, `header_bytes` and `offset_of`, in bytes. `pack` puts what belongs to the header there, into
// the row's lane, and the 4 bytes of each step into `words`, one after another.
struct InBlocks {
    static constexpr bool kOutliers = false, kOpensLong = false;
    static constexpr int kTileTokens = 48;
};

// Blocks that are alike and follow one another.
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
