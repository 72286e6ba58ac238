// bfloat16 weights, multiplied as bfloat16 by vectors or by tiles (`linear_tiles.h`): stored in 16 or in 12 bits.
//
//   bfloat16  block = 32 columns     16 steps of 2 bfloat16
//   bfloat12  block = 128 columns    [4 vectors][16] upper bytes, then 16 units of 8 columns, each [4 vectors] of
//                                    64 bytes of nibbles and 2 x 64 lower bytes: 4 steps of 2 bfloat16
//
// For AMX, a vector's lines form a tile of 16 lines of 64 bytes, 256 bytes apart.
#pragma once

#include <algorithm>

#include "linear_kind.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

// A weight whose upper byte is not among the 16 in the table of its vector and block.
struct Outlier {
    uint32_t place;   // column * 64 + lane
    uint16_t weight;  // bfloat16
    uint16_t stored;  // bfloat16 that the block holds in its place
};

// The outlier list after the blocks of a panel.
struct Outliers {
    int64_t count;
    Outlier at[1];  // capacity `most`

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

// Activations in bfloat16, sums in float32. A block has `Columns` columns.
template <int Columns, int Header, int Bytes>
struct BFloat16Rows : AlikeBlocks<Columns, Header, Bytes> {
    using AlikeBlocks<Columns, Header, Bytes>::kColumns;
    static constexpr int kSteps = Columns / 2, kRows = kMaxRows, kRowsAlone = kRows;
    uint16_t* x;     // [tokens][blocks][Columns], and a skew
    int64_t stride;  // elements between rows

    static int64_t bytes_per_token(int64_t columns) { return round_up(columns, kColumns) * 2 + kSkewBytes; }
    BFloat16Rows(const Weight& weight, uint8_t* scratch, int64_t)
        : x(reinterpret_cast<uint16_t*>(scratch)), stride(bytes_per_token(weight.columns) / 2) {}

    void prepare(const Row& row, int64_t token) const {
        for (int64_t i = 0; i < stride - kSkewBytes / 2; i += kLanes) store_bf16(x + token * stride + i, row.at(i));
    }

    const uint8_t* row_at(int64_t token, int64_t block) const {
        return reinterpret_cast<const uint8_t*>(x + token * stride + block * kColumns);
    }

    template <int R>
    __attribute__((noinline)) void accumulate_opened(const Slice& slice, const uint8_t* opened, int64_t token,
                                                     Fetch& prefetch, Sums* sums) const {
        const uint8_t* row = row_at(token, slice.first);
        for (int first = 0; first < kVectors; first += kWide) {
            f32x16 sum[R][kWide];
            for_sums<R>([&](int r, int v) { sum[r][v] = load_f32(sums[r].lane[first + v]); });
            multiply<DotBFloat16, R>(sum, opened + 64 * first, row, 2 * stride, slice.count * kSteps, prefetch);
            for_sums<R>([&](int r, int v) { store_f32(sums[r].lane[first + v], sum[r][v]); });
        }
    }

    static void begin(int64_t, Sums& sums) { sums.fill(zero_f32()); }
};

struct BFloat16 : BFloat16Rows<32, 0, 16 * kLine> {
    using BFloat16Rows::BFloat16Rows;
    static constexpr int kSlice = 4, kLongSlice = 16, kOpened = 1;

    static void pack(const Weight&, const Source& source, int64_t at, uint8_t*, int, uint8_t* words) {
        for (int i = 0; i < kColumns; i += kLanes) store_bf16(words + 2 * i, source.values.at(at * kColumns + i));
    }
    static void unpack(const Weight&, const uint8_t* block, int64_t, int lane, float* values) {
        for (int i = 0; i < kColumns; i++) values[i] = value_of(element(block, i / 2, lane), kBFloat16, i % 2);
    }

    static const uint8_t* open(const Slice& slice, uint8_t*) { return slice.data; }

    template <int R>
    void accumulate(const Slice& slice, const uint8_t* opened, int64_t token, Fetch& prefetch, Sums* sums) const {
        accumulate_opened<R>(slice, opened, token, prefetch, sums);
    }
};

struct BFloat12 : BFloat16Rows<128, 16 * kVectors, 16 * kVectors + 16 * kVectors * 3 * 64> {
    using BFloat16Rows::BFloat16Rows;
    static constexpr bool kOutliers = true;
    static constexpr int kUnit = 8;       // columns per unit
    static constexpr uint8_t kFree = 1;  // marks a free table entry; as an upper byte it means numbers near 1e-38
    static constexpr int kVectorBytes = 3 * 64, kUnitBytes = kVectors * kVectorBytes, kSlice = 1, kLongSlice = 8,
                         kTileTokens = 384, kRowsAlone = kMaxRows + 2, kOpened = kLongSlice * kSteps * kLine;
    static_assert(kBytes == kHeader + kColumns / kUnit * kUnitBytes);

    // A lane's bytes of a unit: eight weights. Each weight has a nibble, the table index of its upper byte, and 64 or
    // 128 bytes further on its lower byte.
    static int64_t place_of(int lane, int unit) {
        return kHeader + unit * kUnitBytes + lane / kLanes * kVectorBytes + lane % kLanes / 4 * 16 + lane % 4 * 2;
    }
    static int64_t byte_of(int column) { return column / 2 % 2 * 8 + column % 2; }

    // Pack the lanes of a vector whose `values` [16][kColumns] are not null; `first` is the block's first column, of
    // `columns`. Returns false if the outlier list is full.
    static bool pack(const uint16_t* const* values, int v, int64_t first, int64_t columns, uint8_t* block,
                     Outliers* outliers) {
        uint8_t* upper = block + 16 * v;
        if (!upper[15] || upper[15] == kFree) choose_upper(values, std_min(columns - first, kColumns), upper);
        uint8_t codes[256];
        std::memset(codes, 16, sizeof codes);
        for (uint8_t i = 0; i < 16; i++) codes[upper[i]] = i;
        codes[kFree] = 16;  // entries free now may be filled later
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

    // Fill the free entries of a block's table with the most frequent upper bytes of finite numbers. Free entries hold
    // kFree; all are free before the first rows are packed. Rows of a vector packed in a later call continue the table.
    static void choose_upper(const uint16_t* const* values, int64_t count, uint8_t* upper) {
        uint16_t counts[2][256] = {};  // alternating, to shorten the dependency chain
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
            if (i == 15 && found[next].byte == 0 && ++next == kinds) return;  // marks a table before packing
            upper[i] = static_cast<uint8_t>(found[next++].byte);
        }
    }

    static void unpack(const Weight&, const uint8_t* block, int64_t, int lane, float* values) {
        const uint8_t* upper = block + lane / kLanes * 16;
        for (int unit = 0; unit < kColumns / kUnit; unit++, values += kUnit) {
            for (int i = 0; i < kUnit / 2; i++) {
                const uint8_t* at = block + place_of(lane, unit) + byte_of(i);
                values[i] = widen(static_cast<uint16_t>(upper[at[0] & 15] << 8 | at[64]));
                values[i + kUnit / 2] = widen(static_cast<uint16_t>(upper[at[0] >> 4] << 8 | at[128]));
            }
        }
    }
    // The placeholders that a row has instead of outliers, in a block whose first column is `first`.
    static void unpack_outliers(const Outliers& outliers, uint32_t lane, uint32_t first, float* values) {
        for (int64_t i = 0; i < outliers.count; i++) {
            const Outlier& one = outliers.at[i];
            const uint32_t column = one.place / kPanel - first;
            if (one.place % kPanel == lane && column < kColumns) values[column] = widen(one.weight);
        }
    }

    // A vector's weights of a unit, as four steps.
    static inline __attribute__((always_inline)) void open_vector(const uint8_t* data, i32x16 table, i32x16 (&steps)[4]) {
        const i32x16 mask = set_i32(0x0f0f0f0f), nibbles = load_i32(data);
        const i32x16 first = pick_bytes(table, bit_and(nibbles, mask));
        const i32x16 second = pick_bytes(table, bit_and(shift_right<4>(nibbles), mask));
        const i32x16 low = load_i32(data + 64), more = load_i32(data + 128);
        steps[0] = join_first(low, first), steps[1] = join_last(low, first);
        steps[2] = join_first(more, second), steps[3] = join_last(more, second);
    }

    // Unpack a slice's blocks to bfloat16 steps, in `bytes` [kOpened].
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
        constexpr int together = Wide == kWide ? 1 : Wide;  // vectors, limited by registers
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

    // Few rows use the packed weights directly; more rows use the unpacked slice.
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

    // Correct the sums of tokens `begin` to `end` for the outliers of a panel, which replace their placeholders.
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

}  // namespace
}  // namespace PENSTOCK_ISA
}  // namespace penstock
