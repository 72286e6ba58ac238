// How weights are packed, and the sums of products over a slice of them.
//
// A weight is cut into panels of 64 rows, and a panel into blocks along its columns; blocks of a panel follow one
// another, so that a thread reads its panels as one stream. In a block there is for each step of 4 bytes along the
// columns (4 int8, 2 of 16 bits, or 1 float32) a line of the panel's rows: [steps][4 vectors][16 rows][4 bytes].
//
//   float32   block = 1 column       1 step
//   bfp16   block = 64 columns     [64 rows] scales (bfloat16), then 32 steps of 2 int16
//   bfloat16  block = 32 columns     16 steps of 2 bfloat16
//   bfloat12  block = 128 columns    [4 vectors][16] upper bytes, then 16 units of 8 columns, each [4 vectors] of
//                                    64 bytes of nibbles and 2 x 64 lower bytes: 4 steps of 2 bfloat16
//   int8      block = 64 columns     16 steps of 4 uint8, value + 128
//   int4      block = 128 columns    [64 rows] scales (float16), [64 rows] 16 - zero (uint8), then 16 steps of 4 bytes:
//                                    low nibbles are the columns 4 s to 4 s + 3, high nibbles those 64 further on
//   int6      block = 128 columns    [64 rows] scales (float16), then the lower 4 bits of value + 32 as in int4, then 8
//                                    steps of their upper 2 bits: bits 2 i and 2 i + 1 are the columns 4 (s + 8 i) on
//
// A gated weight has 32 rows of the gate in the first halves of its panels and their 32 rows of `up` in the second.
//
// A slice is what of a panel stays in the first cache while all tokens of a tile meet it. Between slices the sums of a
// tile lie in memory. Where there are several tiles, int8 has longer slices: they come from the second cache fast enough,
// and the sums are fetched and stored less often.
//
// bfloat16 is for machines that multiply it, by vectors or by tiles (`linear_tiles.h`): a vector's lines are a tile of 16
// lines of 64 bytes, 256 apart.
//
// bfp16 is how bfloat16 weights meet the integer units of machines without bfloat16 arithmetic, at twice the rate of
// float32: 64 neighbours share the exponent of their largest, whose magnitude takes 13 bits for weights and 12 bits
// for activations; 64 products of them fit an int32. A bfloat16 (8 bits) within 2⁻⁵ of its block's largest weight, or
// within 2⁻⁴ of the largest activation, is held exactly; what is smaller is rounded at 2⁻¹³ or 2⁻¹² of the largest.
#pragma once

#include <algorithm>

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

// A thread's weights are one stream of megabytes. Zen 5 runs ahead in that by itself where nothing breaks it, and reads
// it up to a third faster than in parts. What is fetched there for one use (locality 0) does not go into the third cache,
// which keeps what Python needs between the passes over the weights.
#if defined(PENSTOCK_MULTIPLIES_BFLOAT16) && !defined(PENSTOCK_TILES)
using Fetch = PrefetchThrough<1, 0>;
#else
using Fetch = Prefetch;
#endif

struct alignas(64) Sums {
    float lane[kVectors][kLanes];  // of int8 their int32 bits

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
struct DotInt8 {
    using Sum = i32x16;
    static i32x16 add(i32x16 sum, i32x16 weight, i32x16 x) { return dot_u8_i8(sum, weight, x); }
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

// One row to pack: floating point `values`, or the `bytes` of integers with scales and zeros of their groups.
struct Source {
    Row values;
    const uint8_t* bytes;
    const uint16_t* scales;  // float16
    const uint8_t* zeros;

    // The bytes of N columns from `first` on, 0 beyond the last.
    template <int N>
    void copy(int64_t first, uint8_t* target) const {
        const int64_t count = values.count - first;
        if (count < N) std::memset(target, 0, N);
        if (count > 0) std::memcpy(target, bytes + first, static_cast<size_t>(std_min(count, N)));
    }
};

struct InBlocks {
    static constexpr bool kOutliers = false;  // whether any follow the blocks of a panel
    static constexpr int kTileTokens = 48;    // tokens whose sums stay in the first cache, beside a slice
};

// A kind packs a block of a row: what belongs to the panel's header it puts there, into the row's lane, and the 4 bytes
// of each step into `words`, one after another. It takes blocks apart again. `prepare` brings a row of x into its form,
// and `accumulate` adds the products of R of them with a slice to their sums, which `begin` sets up and `total` reads;
// it is never inlined, as compilers run short of registers where several are in one function; nor is
// `accumulate_opened`, a part of it, for the same reason. R is kRows at most, or kRowsAlone where those are all. `open`
// makes of a slice what many tokens are multiplied with, in kOpened bytes where it needs them.
struct Float32 : InBlocks {
    static constexpr int kColumns = 1, kHeader = 0, kBytes = kLine, kSteps = 1, kSlice = 32, kLongSlice = kSlice,
                         kRows = kMaxRows, kRowsAlone = kRows, kOpened = 1;
    float* x;
    int64_t stride;

    static int64_t bytes_per_token(int64_t columns) { return 4 * columns + kSkewBytes; }
    Float32(uint8_t* scratch, int64_t, int64_t columns)
        : x(reinterpret_cast<float*>(scratch)), stride(columns + kSkewBytes / 4) {}

    static void pack(const Source& source, int64_t at, uint8_t*, int, uint8_t* words) {
        const float value = value_of(source.values.data, source.values.dtype, source.values.first + at);
        std::memcpy(words, &value, 4);
    }
    static void unpack(const uint8_t* block, int lane, float* values) {
        std::memcpy(values, element(block, 0, lane), 4);
    }

    void prepare(const Row& row, int64_t token) const {
        float* target = x + token * stride;
        for (int64_t i = 0; i < row.count; i += kLanes) row.store_f32_at(target, i, row.at(i));
    }

    static const uint8_t* open(const Slice& slice, uint8_t*) { return slice.data; }

    template <int R>
    __attribute__((noinline)) void accumulate(const Slice& slice, const uint8_t*, int64_t token, Fetch& prefetch,
                                              Sums* sums) const {
        for (int first = 0; first < kVectors; first += kWide) {
            f32x16 sum[R][kWide];
            for_sums<R>([&](int r, int v) { sum[r][v] = load_f32(sums[r].lane[first + v]); });
            multiply<DotFloat32, R>(sum, slice.data + 64 * first,
                                    reinterpret_cast<const uint8_t*>(x + token * stride + slice.first), 4 * stride,
                                    slice.count, prefetch);
            for_sums<R>([&](int r, int v) { store_f32(sums[r].lane[first + v], sum[r][v]); });
        }
    }

    static void begin(int64_t, Sums& sums) { sums.fill(zero_f32()); }
    static f32x16 total(const Sums& sums, int v, int64_t) { return load_f32(sums.lane[v]); }
};

struct Bfp16 : InBlocks {
    static constexpr int kColumns = 64, kHeader = 2 * kPanel, kBytes = kHeader + 32 * kLine, kSteps = 32,
                         kSlice = 1, kLongSlice = kSlice, kRows = kMaxRows, kRowsAlone = kRows, kOpened = 1;
    int16_t* x;     // [tokens][blocks][64]
    float* scales;  // [tokens][blocks]
    int64_t blocks, stride;

    static int64_t bytes_per_token(int64_t columns) {
        return round_up(columns, kColumns) * 2 + kSkewBytes + round_up(columns, kColumns) / kColumns * 4;
    }
    Bfp16(uint8_t* scratch, int64_t tokens, int64_t columns)
        : x(reinterpret_cast<int16_t*>(scratch)), blocks(round_up(columns, kColumns) / kColumns),
          stride(blocks * kColumns + kSkewBytes / 2) {
        scales = reinterpret_cast<float*>(x + tokens * stride);
    }

    static void pack(const Source& source, int64_t at, uint8_t* block, int lane, uint8_t* words) {
        int16_t values[kColumns];
        write_value(block, kBFloat16, lane, share_exponent(source.values, at * kColumns, 13, 8190, values));
        std::memcpy(words, values, sizeof values);
    }
    static void unpack(const uint8_t* block, int lane, float* values) {
        const float scale = value_of(block, kBFloat16, lane);
        for (int i = 0; i < kColumns; i++) {
            int16_t value;
            std::memcpy(&value, element(block + kHeader, i / 2, lane) + 2 * (i % 2), 2);
            values[i] = static_cast<float>(value) * scale;
        }
    }

    void prepare(const Row& row, int64_t token) const {
        for (int64_t b = 0; b < blocks; b++)
            scales[token * blocks + b] =
                share_exponent(row, b * kColumns, 12, 4095, x + token * stride + b * kColumns);
    }

    static const uint8_t* open(const Slice& slice, uint8_t*) { return slice.data; }

    template <int R>
    __attribute__((noinline)) void accumulate(const Slice& slice, const uint8_t*, int64_t token, Fetch& prefetch,
                                              Sums* sums) const {
        for (int first = 0; first < kVectors; first += kWide) {
            i32x16 sum[R][kWide];
            for_sums<R>([&](int r, int v) { sum[r][v] = zero_i32(); });
            multiply<DotInt16, R>(sum, slice.data + kHeader + 64 * first,
                                  reinterpret_cast<const uint8_t*>(x + token * stride + slice.first * kColumns),
                                  2 * stride, kColumns / 2, prefetch);
            const auto weight_scale = [&](int v) { return load_bf16(slice.data + 32 * (first + v)); };
            add_scaled<R>([&](int r) { return [&of = sum[r]](int v) { return to_f32(of[v]); }; }, weight_scale,
                          scales + token * blocks + slice.first, blocks, first, sums);
        }
    }

    static void begin(int64_t, Sums& sums) { sums.fill(zero_f32()); }
    static f32x16 total(const Sums& sums, int v, int64_t) { return load_f32(sums.lane[v]); }
};

// A weight whose upper byte is none of the 16 that its block has for its vector.
struct Outlier {
    uint32_t place;   // column * 64 + lane
    uint16_t weight;  // bfloat16
    uint16_t stored;  // what stands in its place
};

// What follows the blocks of a panel.
struct Outliers {
    int64_t count;
    Outlier at[1];  // room for `most`

    static int64_t most(int64_t columns) { return 31 + columns / 32; }
    static int64_t bytes(int64_t columns) { return round_up((1 + most(columns)) * 8, 64); }
};

inline float widen(uint16_t bfloat16) {
    const uint32_t bits = static_cast<uint32_t>(bfloat16) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

#if defined(PENSTOCK_MULTIPLIES_BFLOAT16)

// Rows of x as bfloat16, and sums in float32. A block has `Columns` columns.
template <int Columns>
struct BFloat16Rows : InBlocks {
    static constexpr int kColumns = Columns, kSteps = Columns / 2, kRows = kMaxRows, kRowsAlone = kRows;
    uint16_t* x;     // [tokens][blocks][Columns], and a skew
    int64_t stride;  // elements between rows

    static int64_t bytes_per_token(int64_t columns) { return round_up(columns, kColumns) * 2 + kSkewBytes; }
    BFloat16Rows(uint8_t* scratch, int64_t, int64_t columns)
        : x(reinterpret_cast<uint16_t*>(scratch)), stride(bytes_per_token(columns) / 2) {}

    void prepare(const Row& row, int64_t token) const {
        for (int64_t i = 0; i < stride - kSkewBytes / 2; i += kLanes) store_bf16(x + token * stride + i, row.at(i));
    }

    const uint8_t* row_at(int64_t token, int64_t block) const {
        return reinterpret_cast<const uint8_t*>(x + token * stride + block * kColumns);
    }

    template <int R>
    __attribute__((noinline)) void accumulate_opened(const Slice& slice, const uint8_t* opened, int64_t token,
                                                     Fetch& prefetch, Sums* sums) const {
        f32x16 sum[R][kWide];
        for_sums<R>([&](int r, int v) { sum[r][v] = load_f32(sums[r].lane[v]); });
        const uint8_t* row = row_at(token, slice.first);
        multiply<DotBFloat16, R>(sum, opened, row, 2 * stride, slice.count * kSteps, prefetch);
        for_sums<R>([&](int r, int v) { store_f32(sums[r].lane[v], sum[r][v]); });
    }

    static void begin(int64_t, Sums& sums) { sums.fill(zero_f32()); }
    static f32x16 total(const Sums& sums, int v, int64_t) { return load_f32(sums.lane[v]); }
};

struct BFloat16 : BFloat16Rows<32> {
    using BFloat16Rows::BFloat16Rows;
    static constexpr int kHeader = 0, kBytes = 16 * kLine, kSlice = 4, kLongSlice = 16, kOpened = 1;

    static void pack(const Source& source, int64_t at, uint8_t*, int, uint8_t* words) {
        for (int i = 0; i < kColumns; i += kLanes) store_bf16(words + 2 * i, source.values.at(at * kColumns + i));
    }
    static void unpack(const uint8_t* block, int lane, float* values) {
        for (int i = 0; i < kColumns; i++) values[i] = value_of(element(block, i / 2, lane), kBFloat16, i % 2);
    }

    static const uint8_t* open(const Slice& slice, uint8_t*) { return slice.data; }

    template <int R>
    void accumulate(const Slice& slice, const uint8_t* opened, int64_t token, Fetch& prefetch, Sums* sums) const {
        accumulate_opened<R>(slice, opened, token, prefetch, sums);
    }
};

struct BFloat12 : BFloat16Rows<128> {
    using BFloat16Rows::BFloat16Rows;
    static constexpr bool kOutliers = true;
    static constexpr int kUnit = 8;       // columns of it
    static constexpr uint8_t kFree = 1;  // numbers near 1e-38
    static constexpr int kVectorBytes = 3 * 64, kUnitBytes = kVectors * kVectorBytes, kHeader = 16 * kVectors,
                         kBytes = kHeader + kColumns / kUnit * kUnitBytes, kSlice = 1, kLongSlice = 8,
                         kTileTokens = 384, kRowsAlone = 8, kOpened = kLongSlice * kSteps * kLine;

    // A lane's bytes of a unit: eight weights, each of which has a nibble, that says which of the upper bytes it has,
    // and 64 or 128 bytes further on its lower byte.
    static int64_t place_of(int lane, int unit) {
        return kHeader + unit * kUnitBytes + lane / kLanes * kVectorBytes + lane % kLanes / 4 * 16 + lane % 4 * 2;
    }
    static int64_t byte_of(int column) { return column / 2 % 2 * 8 + column % 2; }

    // Pack the lanes of a vector whose `values` [16][kColumns] are not null; the block's first column has number
    // `first` of `columns`. False: there are more outliers than there is room for.
    static bool pack(const uint16_t* const* values, int v, int64_t first, int64_t columns, uint8_t* block,
                     Outliers* outliers) {
        uint8_t* upper = block + 16 * v;
        if (!upper[15] || upper[15] == kFree) choose_upper(values, std_min(columns - first, kColumns), upper);
        uint8_t codes[256];
        std::memset(codes, 16, sizeof codes);
        for (uint8_t i = 0; i < 16; i++) codes[upper[i]] = i;
        codes[kFree] = 16;  // what is free now may be filled later
        for (int row = 0; row < kLanes; row++) {
            for (int unit = 0; values[row] && unit < kColumns / kUnit; unit++) {
                const uint16_t* value = values[row] + unit * kUnit;
                uint8_t code[kUnit], any = 0;
                for (int i = 0; i < kUnit; i++) any |= code[i] = codes[value[i] >> 8];
                for (int i = 0; any & 16 && i < kUnit; i++) {
                    const int64_t column = first + unit * kUnit + i;
                    if (code[i] < 16) continue;
                    code[i] = 0;
                    if (column >= columns) continue;
                    if (outliers->count == Outliers::most(columns)) return false;
                    const uint32_t place = static_cast<uint32_t>(column * kPanel + v * kLanes + row);
                    const uint16_t stored = static_cast<uint16_t>(upper[0] << 8 | (value[i] & 255));
                    outliers->at[outliers->count++] = {place, value[i], stored};
                }
                uint8_t* bytes = block + place_of(v * kLanes + row, unit);
                for (int i = 0; i < kUnit / 2; i++) {
                    bytes[byte_of(i)] = static_cast<uint8_t>(code[i] | code[i + kUnit / 2] << 4);
                    bytes[byte_of(i) + 64] = static_cast<uint8_t>(value[i]);
                    bytes[byte_of(i) + 128] = static_cast<uint8_t>(value[i + kUnit / 2]);
                }
            }
        }
        return true;
    }

    // Fill what is free of a block's upper bytes with the most frequent ones of finite numbers. Free is what holds
    // kFree, and all before the first rows are packed; later ones, whose vector is cut between two calls, go on.
    static void choose_upper(const uint16_t* const* values, int64_t count, uint8_t* upper) {
        uint16_t counts[2][256] = {};  // in turn, as one count would wait for the other
        for (int row = 0; row < kLanes; row++)
            for (int64_t column = 0; values[row] && column < count; column++)
                counts[column % 2][values[row][column] >> 8]++;
        if (!upper[15]) std::memset(upper, kFree, 16);
        counts[0][kFree] = counts[1][kFree] = 0;
        for (int i = 0; i < 16; i++) counts[0][upper[i]] = counts[1][upper[i]] = 0;
        struct Found {
            int count, byte;
        } found[256];
        int kinds = 0;
        for (int byte = 0; byte < 256; byte++) {
            const int both = counts[0][byte] + counts[1][byte];
            if (both && (byte & 0x7f) != 0x7f) found[kinds++] = {both, byte};
        }
        std::sort(found, found + kinds,
                  [](Found a, Found b) { return a.count > b.count || (a.count == b.count && a.byte > b.byte); });
        for (int i = 0, next = 0; i < 16 && next < kinds; i++) {
            if (upper[i] != kFree) continue;
            if (i == 15 && found[next].byte == 0 && ++next == kinds) return;  // that says that nothing is packed
            upper[i] = static_cast<uint8_t>(found[next++].byte);
        }
    }

    static void unpack(const uint8_t* block, int lane, float* values) {
        const uint8_t* upper = block + lane / kLanes * 16;
        for (int unit = 0; unit < kColumns / kUnit; unit++, values += kUnit) {
            for (int i = 0; i < kUnit / 2; i++) {
                const uint8_t* at = block + place_of(lane, unit) + byte_of(i);
                values[i] = widen(static_cast<uint16_t>(upper[at[0] & 15] << 8 | at[64]));
                values[i + kUnit / 2] = widen(static_cast<uint16_t>(upper[at[0] >> 4] << 8 | at[128]));
            }
        }
    }
    // What a row has there instead, of a block whose first column is `first`.
    static void unpack_outliers(const Outliers& outliers, uint32_t lane, uint32_t first, float* values) {
        for (int64_t i = 0; i < outliers.count; i++) {
            const Outlier& one = outliers.at[i];
            const uint32_t column = one.place / kPanel - first;
            if (one.place % kPanel == lane && column < kColumns) values[column] = widen(one.weight);
        }
    }

    // A vector's weights of a unit: four steps of them.
    static inline __attribute__((always_inline)) void open_vector(const uint8_t* data, i32x16 table, i32x16 (&steps)[4]) {
        const i32x16 mask = set_i32(0x0f0f0f0f), nibbles = load_i32(data);
        const i32x16 first = pick_bytes(table, bit_and(nibbles, mask));
        const i32x16 second = pick_bytes(table, bit_and(shift_right<4>(nibbles), mask));
        const i32x16 low = load_i32(data + 64), more = load_i32(data + 128);
        steps[0] = join_first(low, first), steps[1] = join_last(low, first);
        steps[2] = join_first(more, second), steps[3] = join_last(more, second);
    }

    // The steps of a slice's blocks as those of bfloat16, in `bytes` [kOpened].
    static const uint8_t* open(const Slice& slice, uint8_t* bytes) {
        uint8_t* lines = bytes;
        for (const uint8_t* data = slice.data; data < slice.data + slice.count * kBytes;) {
            i32x16 table[kVectors];
            for (int v = 0; v < kVectors; v++) table[v] = load_table(data + 16 * v);
            data += kHeader;
            for (int unit = 0; unit < kColumns / kUnit; unit++, lines += 4 * kLine) {
#pragma GCC unroll 4
                for (int v = 0; v < kVectors; v++, data += kVectorBytes) {
                    i32x16 steps[4];
                    open_vector(data, table[v], steps);
#pragma GCC unroll 4
                    for (int step = 0; step < 4; step++) store_i32(lines + step * kLine + 64 * v, steps[step]);
                }
            }
        }
        return bytes;
    }

    template <int R, int Wide>
    inline __attribute__((always_inline)) void multiply_packed(f32x16 (&sum)[R][Wide], const uint8_t* block, int first,
                                                               const uint8_t* row, Fetch& fetched) const {
        constexpr int together = Wide == kWide ? 1 : Wide;  // vectors, as registers allow
        Fetch prefetch = fetched;  // in registers
        i32x16 table[Wide];
#pragma GCC unroll 4
        for (int v = 0; v < Wide; v++) table[v] = load_table(block + 16 * (first + v));
        const uint8_t* data = block + kHeader + first * kVectorBytes;
        for (int unit = 0; unit < kColumns / kUnit; unit++, row += 2 * kUnit, data += kUnitBytes) {
            prefetch.steps(kUnit / 2 * Wide / kWide);
#pragma GCC unroll 4
            for (int v = 0; v < Wide; v += together) {
                i32x16 steps[together][4];
#pragma GCC unroll 2
                for (int i = 0; i < together; i++) open_vector(data + (v + i) * kVectorBytes, table[v + i], steps[i]);
#pragma GCC unroll 4
                for (int step = 0; step < 4; step++) {
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++) {
                        int32_t bits;
                        std::memcpy(&bits, row + 2 * r * stride + 4 * step, 4);
                        const i32x16 pair = set_i32(bits);
#pragma GCC unroll 2
                        for (int i = 0; i < together; i++)
                            sum[r][v + i] = dot_bf16(sum[r][v + i], steps[i][step], pair);
                    }
                }
            }
        }
        fetched = prefetch;
    }

    // Few rows meet the packed weights themselves, more of them what was opened.
    template <int R>
    __attribute__((noinline)) void accumulate(const Slice& slice, const uint8_t* opened, int64_t token,
                                              Fetch& prefetch, Sums* sums) const {
        if constexpr (R <= kRows) {
            if (opened != slice.data) return accumulate_opened<R>(slice, opened, token, prefetch, sums);
        }
        constexpr int wide = R > kRows ? kWide / 2 : kWide;
        for (int first = 0; first < kVectors; first += wide) {
            f32x16 sum[R][wide];
            for_sums<R, wide>([&](int r, int v) { sum[r][v] = load_f32(sums[r].lane[first + v]); });
            const uint8_t* row = row_at(token, slice.first);
            for (int64_t b = 0; b < slice.count; b++, row += 2 * kColumns)
                multiply_packed<R, wide>(sum, slice.data + b * kBytes, first, row, prefetch);
            for_sums<R, wide>([&](int r, int v) { store_f32(sums[r].lane[first + v], sum[r][v]); });
        }
    }

    // Put the outliers of a panel in the place of what is stored, in the sums of tokens `begin` to `end`.
    void add_outliers(const Outliers& outliers, int64_t begin, int64_t end, Sums* sums) const {
        for (int64_t i = 0; i < outliers.count; i++) {
            const Outlier& one = outliers.at[i];
            const float difference = widen(one.weight) - widen(one.stored);
            const uint32_t lane = one.place % kPanel, column = one.place / kPanel;
            for (int64_t token = begin; token < end; token++) {
                float& sum = sums[token - begin].lane[lane / kLanes][lane % kLanes];
                sum = __builtin_fmaf(difference, widen(x[token * stride + column]), sum);
            }
        }
    }
};

#endif

struct Int8 : InBlocks {
    static constexpr int kColumns = 64, kHeader = 0, kBytes = 16 * kLine, kSteps = 16, kSlice = 4,
                         kLongSlice = 48, kRows = kMaxRows, kRowsAlone = kRows, kOpened = 1;
    int8_t* x;        // [tokens][width]
    float* scales;    // [tokens]
    int32_t* offset;  // [tokens]: what the weights' offset of 128 adds to a sum, negated
    int64_t width, stride;

    static int64_t bytes_per_token(int64_t columns) { return round_up(columns, kColumns) + kSkewBytes + 8; }
    Int8(uint8_t* scratch, int64_t tokens, int64_t columns)
        : x(reinterpret_cast<int8_t*>(scratch)), width(round_up(columns, kColumns)), stride(width + kSkewBytes) {
        scales = reinterpret_cast<float*>(x + tokens * stride);
        offset = reinterpret_cast<int32_t*>(scales + tokens);
    }

    static void pack(const Source& source, int64_t at, uint8_t*, int, uint8_t* words) {
        source.copy<kColumns>(at * kColumns, words);
    }
    // Without the row's scale.
    static void unpack(const uint8_t* block, int lane, float* values) {
        for (int i = 0; i < kColumns; i++) values[i] = static_cast<float>(element(block, i / 4, lane)[i % 4] - 128);
    }

    void prepare(const Row& row, int64_t token) const {
        int32_t sum;
        scales[token] = to_int8(row, 0, width, x + token * stride, &sum);
        // Unsigned: of a row that holds what is no number, the sum may be any.
        offset[token] = static_cast<int32_t>(0u - 128u * static_cast<uint32_t>(sum));
    }

    static const uint8_t* open(const Slice& slice, uint8_t*) { return slice.data; }

    template <int R>
    __attribute__((noinline)) void accumulate(const Slice& slice, const uint8_t*, int64_t token, Fetch& prefetch,
                                              Sums* sums) const {
        for (int first = 0; first < kVectors; first += kWide) {
            i32x16 sum[R][kWide];
            for_sums<R>([&](int r, int v) { sum[r][v] = load_i32(sums[r].lane[first + v]); });
            multiply<DotInt8, R>(sum, slice.data + 64 * first,
                                 reinterpret_cast<const uint8_t*>(x + token * stride + slice.first * kColumns), stride,
                                 slice.count * kColumns / 4, prefetch);
            for_sums<R>([&](int r, int v) { store_i32(sums[r].lane[first + v], sum[r][v]); });
        }
    }

    void begin(int64_t token, Sums& sums) const { sums.fill(bits_as_f32(set_i32(offset[token]))); }
    f32x16 total(const Sums& sums, int v, int64_t token) const {
        return mul(to_f32(load_i32(sums.lane[v])), set_f32(scales[token]));
    }
};

struct Int4 : InBlocks {
    static constexpr int kColumns = 128, kZeros = 2 * kPanel, kHeader = 3 * kPanel, kBytes = kHeader + 16 * kLine,
                         kSteps = 32, kSlice = 1, kLongSlice = kSlice, kRows = kMaxRows, kRowsAlone = kMaxRowsHalf,
                         kOpened = 32 * kLine, kTileTokens = 96;
    int8_t* x;        // [tokens][blocks][128]
    float* scales;    // [tokens][blocks]
    int32_t* offset;  // [tokens][blocks]: what the opened weights' offset of 16 adds to a sum, negated
    int64_t blocks, stride;

    static int64_t bytes_per_token(int64_t columns) {
        return round_up(columns, kColumns) + kSkewBytes + round_up(columns, kColumns) / kColumns * 8;
    }
    Int4(uint8_t* scratch, int64_t tokens, int64_t columns)
        : x(reinterpret_cast<int8_t*>(scratch)), blocks(round_up(columns, kColumns) / kColumns),
          stride(blocks * kColumns + kSkewBytes) {
        scales = reinterpret_cast<float*>(x + tokens * stride);
        offset = reinterpret_cast<int32_t*>(scales + tokens * blocks);
    }

    static void pack(const Source& source, int64_t at, uint8_t* block, int lane, uint8_t* words) {
        std::memcpy(block + 2 * lane, source.scales + at, 2);
        block[kZeros + lane] = static_cast<uint8_t>(16 - source.zeros[at]);
        uint8_t values[kColumns];
        source.copy<kColumns>(at * kColumns, values);
        for (int i = 0; i < kColumns / 2; i++)
            words[i] = static_cast<uint8_t>((values[i] & 15) | values[i + kColumns / 2] << 4);
    }
    static void unpack(const uint8_t* block, int lane, float* values) {
        const float scale = value_of(block, kFloat16, lane);
        const int zero = 16 - block[kZeros + lane];
        for (int i = 0; i < kColumns; i++) {
            const int byte = element(block + kHeader, i % 64 / 4, lane)[i % 4];
            values[i] = static_cast<float>((i < 64 ? byte & 15 : byte >> 4) - zero) * scale;
        }
    }

    void prepare(const Row& row, int64_t token) const {
        for (int64_t b = 0; b < blocks; b++) {
            int32_t sum;
            scales[token * blocks + b] =
                to_int8(row, b * kColumns, kColumns, x + token * stride + b * kColumns, &sum);
            offset[token * blocks + b] = static_cast<int32_t>(0u - 16u * static_cast<uint32_t>(sum));
        }
    }

    const uint8_t* row_at(int64_t token, int64_t block) const {
        return reinterpret_cast<const uint8_t*>(x + token * stride + block * kColumns);
    }

    // The only block's 32 steps of 4 uint8, value - zero + 16, in `bytes` [kOpened].
    static const uint8_t* open(const Slice& slice, uint8_t* bytes) {
        const uint8_t* block = slice.data;
        const i32x16 mask = set_i32(0x0f0f0f0f);
        i32x16 add_to[kVectors];
        for (int v = 0; v < kVectors; v++) add_to[v] = repeat_bytes(widen_u8(block + kZeros + v * kLanes));
        const uint8_t* nibbles = block + kHeader;
        for (int step = 0; step < 16; step++, nibbles += kLine, bytes += kLine) {
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; v++) {
                const i32x16 both = load_i32(nibbles + 64 * v);
                store_i32(bytes + 64 * v, add(bit_and(both, mask), add_to[v]));  // no byte exceeds 31
                store_i32(bytes + 16 * kLine + 64 * v, add(bit_and(shift_right<4>(both), mask), add_to[v]));
            }
        }
        return bytes - 16 * kLine;
    }
    template <int R, int Wide>
    inline __attribute__((always_inline)) void multiply_nibbles(i32x16 (&sum)[R][Wide], const uint8_t* nibbles,
                                                                const uint8_t* row, Fetch& fetched) const {
        Fetch prefetch = fetched;  // in registers
        const i32x16 mask = set_i32(0x0f0f0f0f);
        for (int step = 0; step < 16; step++, nibbles += kLine, row += 4) {
            prefetch.steps(2 * Wide / kWide);
            i32x16 low[Wide], high[Wide];
#pragma GCC unroll 4
            for (int v = 0; v < Wide; v++) {
                const i32x16 both = load_i32(nibbles + 64 * v);
                low[v] = bit_and(both, mask), high[v] = bit_and(shift_right<4>(both), mask);
            }
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                int32_t bits[2];
                std::memcpy(bits, row + r * stride, 4);
                std::memcpy(bits + 1, row + r * stride + kColumns / 2, 4);
                const i32x16 left = set_i32(bits[0]), right = set_i32(bits[1]);
#pragma GCC unroll 4
                for (int v = 0; v < Wide; v++)
                    sum[r][v] = dot_u8_i8(dot_u8_i8(sum[r][v], low[v], left), high[v], right);
            }
        }
        fetched = prefetch;
    }

    static f32x16 weight_scales(const uint8_t* block, int v) { return load_f16(block + 32 * v); }
    static i32x16 repeat_bytes(i32x16 low) {
        const i32x16 two = bit_or(low, shift_left<8>(low));
        return bit_or(two, shift_left<16>(two));
    }

    template <int R>
    __attribute__((noinline)) void accumulate_opened(const Slice& slice, const uint8_t* opened, int64_t token,
                                                     Fetch& prefetch, Sums* sums) const {
        const uint8_t* row = row_at(token, slice.first);
        const int64_t at = token * blocks + slice.first;
        for (int first = 0; first < kVectors; first += kWide) {
            i32x16 sum[R][kWide];
            for_sums<R>([&](int r, int v) { sum[r][v] = set_i32(offset[at + r * blocks]); });
            for (int r = 0; r < R; r++) {  // the rows' next blocks, which lie in the second cache by now
                for (int64_t line = kColumns; line < 2 * kColumns; line += 64)
                    _mm_prefetch(reinterpret_cast<const char*>(row + r * stride + line), _MM_HINT_T0);
            }
            multiply<DotInt8, R>(sum, opened + 64 * first, row, stride, kColumns / 4, prefetch);
            add_scaled<R>([&](int r) { return [&of = sum[r]](int v) { return to_f32(of[v]); }; },
                          [&](int v) { return weight_scales(slice.data, first + v); }, scales + at, blocks, first, sums);
        }
    }

    // Few rows meet the nibbles themselves, more of them what was opened.
    template <int R>
    __attribute__((noinline)) void accumulate(const Slice& slice, const uint8_t* opened, int64_t token,
                                              Fetch& prefetch, Sums* sums) const {
        if constexpr (R <= kRows) {
            if (opened != slice.data) return accumulate_opened<R>(slice, opened, token, prefetch, sums);
        }
        constexpr int wide = R > kRows ? kWide / 2 : kWide;
        const uint8_t* block = slice.data;
        const uint8_t* row = row_at(token, slice.first);
        const int64_t at = token * blocks + slice.first;
        for (int first = 0; first < kVectors; first += wide) {
            i32x16 sum[R][wide];
            for_sums<R, wide>([&](int r, int v) { sum[r][v] = zero_i32(); });
            multiply_nibbles<R, wide>(sum, block + kHeader + 64 * first, row, prefetch);
            f32x16 zeros[wide];  // / 16
#pragma GCC unroll 4
            for (int v = 0; v < wide; v++) {
                const f32x16 stored = to_f32(widen_u8(block + kZeros + (first + v) * kLanes));
                zeros[v] = fnma(stored, set_f32(0.0625f), set_f32(1.0f));
            }
            // Below 2^24, so exact in float32.
            const auto value = [&](int r) {
                const f32x16 of_zeros = to_f32(set_i32(offset[at + r * blocks]));
                return [&, &of = sum[r], of_zeros](int v) { return fma(zeros[v], of_zeros, to_f32(of[v])); };
            };
            const auto weight_scale = [&](int v) { return weight_scales(block, first + v); };
            add_scaled<R, wide>(value, weight_scale, scales + at, blocks, first, sums);
        }
    }

    static void begin(int64_t, Sums& sums) { sums.fill(zero_f32()); }
    static f32x16 total(const Sums& sums, int v, int64_t) { return load_f32(sums.lane[v]); }
};

// Meets activations as Int4 does. Its zero is 32 everywhere.
struct Int6 : Int4 {
    using Int4::Int4;
    static constexpr int kHeader = 2 * kPanel, kPairs = 16 * kLine, kBytes = kHeader + 24 * kLine;

    static void pack(const Source& source, int64_t at, uint8_t* block, int lane, uint8_t* words) {
        std::memcpy(block + 2 * lane, source.scales + at, 2);
        uint8_t values[kColumns];
        source.copy<kColumns>(at * kColumns, values);
        for (int i = 0; i < kColumns / 2; i++)
            words[i] = static_cast<uint8_t>((values[i] & 15) | values[i + kColumns / 2] << 4);
        for (int i = 0; i < kColumns / 4; i++) {
            int pairs = 0;
            for (int part = 0; part < 4; part++) pairs |= values[i + part * kColumns / 4] >> 4 << 2 * part;
            words[kColumns / 2 + i] = static_cast<uint8_t>(pairs);
        }
    }
    static void unpack(const uint8_t* block, int lane, float* values) {
        const float scale = value_of(block, kFloat16, lane);
        for (int i = 0; i < kColumns; i++) {
            const int nibbles = element(block + kHeader, i % 64 / 4, lane)[i % 4];
            const int pairs = element(block + kHeader + kPairs, i % 32 / 4, lane)[i % 4];
            const int value = (i < 64 ? nibbles & 15 : nibbles >> 4) | (pairs >> i / 32 * 2 & 3) << 4;
            values[i] = static_cast<float>(value - 32) * scale;
        }
    }

    void prepare(const Row& row, int64_t token) const {
        Int4::prepare(row, token);
        for (int64_t b = 0; b < blocks; b++) offset[token * blocks + b] *= 2;  // 32, not 16
    }

    // The steps `step`, and 8, 16 and 24 after it, of a vector that begins at `lines`.
    static inline __attribute__((always_inline)) void open_vector(const uint8_t* lines, int step, i32x16 (&steps)[4]) {
        const i32x16 nibble = set_i32(0x0f0f0f0f), pair = set_i32(0x30303030);
        const i32x16 first = load_i32(lines + step * kLine), second = load_i32(lines + (step + 8) * kLine);
        const i32x16 pairs = load_i32(lines + kPairs + step * kLine);
        steps[0] = bit_or(bit_and(first, nibble), bit_and(shift_left<4>(pairs), pair));
        steps[1] = bit_or(bit_and(second, nibble), bit_and(shift_left<2>(pairs), pair));
        steps[2] = bit_or(bit_and(shift_right<4>(first), nibble), bit_and(pairs, pair));
        steps[3] = bit_or(bit_and(shift_right<4>(second), nibble), bit_and(shift_right<2>(pairs), pair));
    }

    // The only block's 32 steps of 4 uint8, value + 32, in `bytes` [kOpened].
    static const uint8_t* open(const Slice& slice, uint8_t* bytes) {
        for (int step = 0; step < 8; step++) {
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; v++) {
                i32x16 steps[4];
                open_vector(slice.data + kHeader + 64 * v, step, steps);
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) store_i32(bytes + (step + 8 * i) * kLine + 64 * v, steps[i]);
            }
        }
        return bytes;
    }

    // Few rows meet the packed weights themselves, more of them what was opened.
    template <int R>
    __attribute__((noinline)) void accumulate(const Slice& slice, const uint8_t* opened, int64_t token,
                                              Fetch& fetched, Sums* sums) const {
        if constexpr (R <= kRows) {
            if (opened != slice.data) return accumulate_opened<R>(slice, opened, token, fetched, sums);
        }
        constexpr int wide = R > kRows ? kWide / 2 : kWide;
        const uint8_t* row = row_at(token, slice.first);
        const int64_t at = token * blocks + slice.first;
        for (int first = 0; first < kVectors; first += wide) {
            i32x16 sum[R][wide];
            for_sums<R, wide>([&](int r, int v) { sum[r][v] = set_i32(offset[at + r * blocks]); });
            Fetch prefetch = fetched;  // in registers
            for (int step = 0; step < 8; step++) {
                prefetch.steps(4 * wide / kWide);
#pragma GCC unroll 4
                for (int v = 0; v < wide; v++) {
                    i32x16 steps[4];
                    open_vector(slice.data + kHeader + 64 * (first + v), step, steps);
#pragma GCC unroll 4
                    for (int i = 0; i < 4; i++) {
#pragma GCC unroll 12
                        for (int r = 0; r < R; r++) {
                            int32_t bits;
                            std::memcpy(&bits, row + r * stride + 4 * (step + 8 * i), 4);
                            sum[r][v] = dot_u8_i8(sum[r][v], steps[i], set_i32(bits));
                        }
                    }
                }
            }
            fetched = prefetch;
            add_scaled<R, wide>([&](int r) { return [&of = sum[r]](int v) { return to_f32(of[v]); }; },
                                [&](int v) { return weight_scales(slice.data, first + v); }, scales + at, blocks, first,
                                sums);
        }
    }
};

}  // namespace
}  // namespace PENSTOCK_ISA
}  // namespace penstock
