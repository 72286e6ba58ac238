// Products with integer weights, which `linear_integer_layout.h` draws.
//
// Activations are rounded to int8 by 32 columns. The products of a group of 32 are summed as integers, scaled by the
// weights' scale, then by the activations', and added to the row's float32 sum, group after group: so the bits are the
// same for vectors of any length, and whether weights are multiplied as they lie or have been opened to bytes.
#pragma once

#include "linear_integer_layout.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

// Add the products of R rows of x, `stride` bytes apart, with Wide vectors of a group's values, which have `Most` bits at
// most, over Steps steps from First on.
template <int Bits, int Most, int First, int Steps, int R, int Wide>
inline __attribute__((always_inline)) void multiply_values(i32x16 (&sum)[R][Wide], const uint8_t* lines, int group,
                                                           const uint8_t* x, int64_t stride) {
    constexpr int fitting = 8 >> (Most - 4);  // steps whose products fit an int16
    constexpr int alike = Bits == 4 || Bits == 8 ? 4 : Steps;  // steps after which the next are like the first
    constexpr int unroll = Steps < alike ? Steps : alike, together = unroll < fitting ? unroll : fitting;
    const i32x16 shift = set_i32(4 * group);
    i32x16 part[R][Wide];
    for (int begin = 0; begin < Steps; begin += unroll, lines += unroll * kLine, x += 4 * unroll) {
        unrolled<unroll>([&](auto index) __attribute__((always_inline)) {
            i32x16 weight[Wide];
#pragma GCC unroll 4
            for (int v = 0; v < Wide; v++)
                weight[v] = Values<Bits>::template step<First + index>(lines + 64 * v, group, shift);
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                int32_t bits;
                std::memcpy(&bits, x + r * stride + 4 * (First + index), 4);
                const i32x16 value = set_i32(bits);
#pragma GCC unroll 4
                for (int v = 0; v < Wide; v++) {
                    if constexpr (kDotsBytes || Most == 8) {
                        sum[r][v] = dot_u8_i8(sum[r][v], weight[v], value);
                    } else {
                        const i32x16 pairs = pairs_u8_i8(weight[v], value);
                        part[r][v] = index % together == 0 ? pairs : add_i16(part[r][v], pairs);
                        if (index % together == together - 1) sum[r][v] = add_pairs_i16(sum[r][v], part[r][v]);
                    }
                }
            }
        });
    }
    (void)part, (void)together;
}

// A block's lines, and its scales and offsets as `IntegerLayout::read` gives them.
struct OpenBlock {
    const uint8_t* lines;
    const float *scales, *offsets;
    int32_t offset;

    bool takes_zeros() const { return offset == kZero || offset == kFraction; }
};

// Rows of x in int8, by 32 columns.
struct Int8Rows {
    int8_t* x;       // [tokens][blocks][64], and a skew
    float* scales;   // [tokens][groups of 32]
    float* sums;     // [tokens][groups]: of x, of 32 or 16 columns
    int32_t* first;  // [tokens][groups]: what their products begin with, as the centre's are among them
    int64_t groups, stride;

    // Add the products of R rows with the block `at` to their sums. Halves: its groups are of 16 columns.
    template <int Bits, int Most, bool Halves, int R, int Wide>
    inline __attribute__((always_inline)) void add_block(const OpenBlock& block, int64_t at, int64_t token,
                                                         Fetch& fetched, Sums* totals) const {
        const uint8_t* row = reinterpret_cast<const uint8_t*>(x + token * stride + at * IntegerLayout::kColumns);
        const bool takes = block.takes_zeros();
        const Int8Rows of = *this;  // nothing that is written can be theirs
        const OpenBlock weights = block;
        Fetch prefetch = fetched;  // in registers
        for (int first_vector = 0; first_vector < kVectors; first_vector += Wide) {
            for (int group = 0; group < 2; group++) {
                prefetch.steps(8 * Wide / kWide);
                const int64_t place = token * of.groups + 2 * at + group;
                f32x16 scaled[R][Wide];
                constexpr int halves = Halves ? 2 : 1, steps = 8 / halves;
                unrolled<halves>([&](auto half) __attribute__((always_inline)) {
                    i32x16 sum[R][Wide];
                    for_sums<R, Wide>([&](int r, int v) {
                        sum[r][v] = takes ? zero_i32() : set_i32(of.first[(place + r * of.groups) * halves + half]);
                    });
                    multiply_values<Bits, Most, steps * half, steps>(sum, weights.lines + 64 * first_vector, group,
                                                                     row + 32 * group, of.stride);
                    of.scale_group<Halves, R, Wide, half>(
                        sum, weights, (halves * group + half) * kPanel + first_vector * kLanes,
                        of.sums + place * halves + half, scaled);
                });
                for_sums<R, Wide>([&](int r, int v) {
                    float* lanes = totals[r].lane[first_vector + v];
                    store_f32(lanes, fma(scaled[r][v], set_f32(of.scales[place + r * of.groups]), load_f32(lanes)));
                });
                // Where registers have no room for them as well, the sums stay in memory, not in copies on the stack.
                if constexpr (R * Wide > kMaxRows * kWide / 2) asm volatile("" ::: "memory");
            }
        }
        fetched = prefetch;
    }

    // The same with a block that has been opened to bytes of `Most` bits.
    template <int Most, bool Halves, int R>
    __attribute__((noinline)) void add_opened(const OpenBlock& block, int64_t at, int64_t token, Fetch& prefetch,
                                              Sums* totals) const {
        const char* next = reinterpret_cast<const char*>(x + token * stride + (at + 1) * IntegerLayout::kColumns);
        for (int r = 0; r < R; r++) _mm_prefetch(next + r * stride, _MM_HINT_T0);  // in the second cache by now
        add_block<8, Most, Halves, R, Halves ? kWide / 2 : kWide>(block, at, token, prefetch, totals);
    }

  private:
    // The products of a group, or the first or second half of one, times its scale, less its minimum.
    template <bool Halves, int R, int Wide, int Half>
    inline __attribute__((always_inline)) void scale_group(const i32x16 (&sum)[R][Wide], const OpenBlock& block,
                                                           int64_t at, const float* x_sums,
                                                           f32x16 (&scaled)[R][Wide]) const {
        f32x16 value[R][Wide];
        const auto x_sum = [&](int r) { return set_f32(x_sums[r * groups * (Halves ? 2 : 1)]); };
        for_sums<R, Wide>([&](int r, int v) { value[r][v] = to_f32(sum[r][v]); });
        if (block.takes_zeros()) {
            for_sums<R, Wide>([&](int r, int v) {
                value[r][v] = fnma(load_f32(block.offsets + at + v * kLanes), x_sum(r), value[r][v]);  // exact
            });
        }
        for_sums<R, Wide>([&](int r, int v) {
            const f32x16 scale = load_f32(block.scales + at + v * kLanes);
            scaled[r][v] = Half ? fma(value[r][v], scale, scaled[r][v]) : mul(value[r][v], scale);
        });
        if (block.offset == kMinimum) {
            for_sums<R, Wide>([&](int r, int v) {
                scaled[r][v] = fnma(load_f32(block.offsets + at + v * kLanes), x_sum(r), scaled[r][v]);
            });
        }
    }
};

// Values of `Bits` bits; Halves: in groups of 16 columns, not 32 or more.
template <int Bits, bool Halves>
struct Integers : InBlocks {
    static constexpr int kColumns = IntegerLayout::kColumns, kSteps = 16, kSlice = 2, kLongSlice = kSlice,
                         kTileTokens = 96, kRows = kMaxRows, kRowsAlone = Halves ? kMaxRows : kMaxRowsHalf;
    static constexpr int kHalves = Halves ? 2 : 1, kGroups = 2 * kHalves;  // of a group of 32, of a block
    static constexpr int kOpenedLines = 16 * kLine, kOpenedScales = 4 * kGroups * kPanel,
                         kOpenedBlock = kOpenedLines + 2 * kOpenedScales, kOpened = kSlice * kOpenedBlock;
    static constexpr int kOpenedCentre = 128;

    static int64_t block_bytes(const Weight& weight) { return IntegerLayout(weight).block; }
    static int64_t header_bytes(const Weight& weight) { return IntegerLayout(weight).header; }
    static int64_t offset_of(const Weight& weight, int64_t block) { return IntegerLayout(weight).offset_of(block); }
    static int64_t bytes_per_token(int64_t columns) {
        const int64_t width = round_up(columns, kColumns);
        return width + kSkewBytes + width / 32 * 4 * (1 + 2 * kHalves);
    }

    IntegerLayout layout;
    Int8Rows rows;

    Integers(const Weight& weight, uint8_t* scratch, int64_t tokens) : layout(weight) {
        const int64_t width = round_up(weight.columns, kColumns);
        rows.groups = width / 32, rows.stride = width + kSkewBytes;
        rows.x = reinterpret_cast<int8_t*>(scratch);
        rows.scales = reinterpret_cast<float*>(rows.x + tokens * rows.stride);
        rows.sums = rows.scales + tokens * rows.groups;
        rows.first = reinterpret_cast<int32_t*>(rows.sums + tokens * rows.groups * kHalves);
    }

    static void pack(const Weight& weight, const Source& source, int64_t at, uint8_t* block, int lane, uint8_t* words) {
        const IntegerLayout layout(weight);
        const auto copy = [lane](uint8_t* target, const uint8_t* from, int64_t first, int64_t count, int64_t bytes) {
            for (int64_t i = 0; from && i < count; i++)
                std::memcpy(target + (i * kPanel + lane) * bytes, from + (first + i) * bytes, static_cast<size_t>(bytes));
        };
        const int64_t count = std_min(layout.groups, (weight.columns - at * kColumns + weight.group - 1) / weight.group);
        copy(block, source.scales, at * layout.groups, count, layout.scale_bytes);
        copy(block + kPanel * layout.groups * layout.scale_bytes, source.offsets, at * layout.groups, count,
             layout.offset_bytes);
        if (layout.span && at % layout.span == 0) {
            uint8_t* head = layout.span_of(block, at);
            const int64_t bytes = stored_bytes(layout.super_type), place = at / layout.span;
            copy(head, source.super_scales, place, bytes ? 1 : 0, bytes);
            copy(head + kPanel * bytes, source.super_offsets, place, bytes ? 1 : 0, bytes);
            copy(head, source.scales, place, bytes ? 0 : 1, layout.scale_bytes);
            copy(head + kPanel * layout.scale_bytes, source.offsets, place, bytes ? 0 : 1, layout.offset_bytes);
        }
        uint8_t values[kColumns];
        source.copy<kColumns>(at * kColumns, values);
        Values<Bits>::pack(values, words);
    }

    // Without the row's scale.
    static void unpack(const Weight& weight, const uint8_t* block, int64_t at, int lane, float* values) {
        const IntegerLayout layout(weight);
        float scales[kGroups * kPanel], offsets[kGroups * kPanel];
        layout.read<kGroups>(block, at, scales, offsets);
        for (int i = 0; i < kColumns; i++) {
            const int place = i * kGroups / kColumns * kPanel + lane;
            const float value = static_cast<float>(Values<Bits>::value(block + layout.header, i, lane));
            const float zero = layout.offset == kCentre ? static_cast<float>(layout.centre) : offsets[place];
            values[i] = layout.offset == kMinimum ? value * scales[place] - offsets[place]
                                                  : (value - zero) * scales[place];
        }
    }

    void prepare(const Row& row, int64_t token) const {
        const int32_t centre = layout.offset == kCentre ? static_cast<int32_t>(layout.centre) : kOpenedCentre;
        const int32_t zero = layout.offset == kMinimum ? 0 : centre;
        for (int64_t g = 0; g < rows.groups; g++) {
            int32_t sums[2];
            const int64_t at = token * rows.groups + g;
            rows.scales[at] = to_int8_by_32(row, 32 * g, rows.x + token * rows.stride + 32 * g, sums);
            if (!Halves) sums[0] += sums[1];
            for (int h = 0; h < kHalves; h++) {
                rows.sums[at * kHalves + h] = static_cast<float>(sums[h]);
                rows.first[at * kHalves + h] = -zero * sums[h];
            }
        }
    }

    // The slice's blocks in `bytes`: 16 lines of bytes each, then scales and offsets.
    const uint8_t* open(const Slice& slice, uint8_t* bytes) const {
        for (int64_t b = 0; b < slice.count; b++) {
            uint8_t* lines = bytes + b * kOpenedBlock;
            float* scales = reinterpret_cast<float*>(lines + kOpenedLines);
            float* offsets = scales + kGroups * kPanel;
            layout.read<kGroups>(slice.data + b * layout.block, slice.first + b, scales, offsets);
            open_lines(slice.data + b * layout.block + layout.header, lines);
            if (takes_zeros()) take_zeros(lines, scales, offsets);
        }
        return bytes;
    }

    template <int R>
    __attribute__((noinline)) void accumulate(const Slice& slice, const uint8_t* opened, int64_t token,
                                              Fetch& prefetch, Sums* sums) const {
        for (int64_t b = 0; b < slice.count; b++) {
            if constexpr (R <= kRows) {
                if (opened != slice.data) {
                    const uint8_t* lines = opened + b * kOpenedBlock;
                    const float* scales = reinterpret_cast<const float*>(lines + kOpenedLines);
                    const OpenBlock block{lines, scales, scales + kGroups * kPanel,
                                          takes_zeros() ? kCentre : layout.offset};
                    rows.add_opened<kDotsBytes ? 8 : Bits, Halves, R>(block, slice.first + b, token, prefetch, sums);
                    continue;
                }
            }
            const uint8_t* data = slice.data + b * layout.block;
            if constexpr (R <= kFew) {
                add_few<R>(data, slice.first + b, token, prefetch, sums);
                continue;
            }
            alignas(64) float scales[kGroups * kPanel], offsets[kGroups * kPanel];
            layout.read<kGroups>(data, slice.first + b, scales, offsets);
            const OpenBlock block{data + layout.header, scales, offsets, layout.offset};
            constexpr int wide = R > kMaxRows || Halves ? kWide / 2 : kWide;
            rows.add_block<Bits, Bits, Halves, R, wide>(block, slice.first + b, token, prefetch, sums);
        }
    }

    static void begin(int64_t, Sums& sums) { sums.fill(zero_f32()); }
    static f32x16 total(const Sums& sums, int v, int64_t) { return load_f32(sums.lane[v]); }

  private:
    static constexpr int kFew = Halves || kWide < kVectors ? 0 : 2;  // rows whose sums over two groups fit registers

    // The products of a few rows with a block as it lies, both of its groups at once.
    template <int R>
    inline __attribute__((always_inline)) void add_few(const uint8_t* data, int64_t at, int64_t token, Fetch& fetched,
                                                       Sums* totals) const {
        const IntegerLayout of = layout;  // nothing that is written can be theirs
        const Int8Rows from = rows;
        const uint8_t *lines = data + of.header, *head = of.span_of(data, at);
        const uint8_t *stored = of.groups ? data : head, *super = of.super_type == kNone ? nullptr : head;
        const uint8_t* x = reinterpret_cast<const uint8_t*>(from.x + token * from.stride + at * kColumns);
        const bool zeros = of.offset == kZero || of.offset == kFraction;
        i32x16 sum[2][R][kVectors];
        unrolled<2>([&](auto group) __attribute__((always_inline)) {
            for_sums<R, kVectors>([&](int r, int v) {
                const int32_t first = from.first[(token + r) * from.groups + 2 * at + group];
                sum[group][r][v] = set_i32(zeros ? 0 : first);
            });
        });
        Fetch prefetch = fetched;  // in registers
        unrolled<8>([&](auto step) __attribute__((always_inline)) {
            prefetch.steps(2);
            i32x16 weight[2][kVectors];
            unrolled<kVectors>([&](auto v) __attribute__((always_inline)) {
                Values<Bits>::template pair<step>(lines + 64 * v, weight[0][v], weight[1][v]);
            });
            unrolled<2 * R>([&](auto part) __attribute__((always_inline)) {
                constexpr int r = part / 2, group = part % 2;
                int32_t bits;
                std::memcpy(&bits, x + r * from.stride + 32 * group + 4 * step, 4);
                unrolled<kVectors>([&](auto v) __attribute__((always_inline)) {
                    sum[group][r][v] = dot_u8_i8(sum[group][r][v], weight[group][v], set_i32(bits));
                });
            });
        });
        fetched = prefetch;
        unrolled<kVectors>([&](auto v) __attribute__((always_inline)) {
            f32x16 total[R];
            unrolled<R>([&](auto r) __attribute__((always_inline)) { total[r] = load_f32(totals[r].lane[v]); });
            unrolled<2>([&](auto group) __attribute__((always_inline)) {
                const f32x16 scale = of.scales_of(stored, super, group, v);
                const f32x16 taken = of.offset == kCentre ? zero_f32() : of.offsets_of(stored, super, group, v);
                unrolled<R>([&](auto r) __attribute__((always_inline)) {
                    const int64_t place = (token + r) * from.groups + 2 * at + group;
                    f32x16 value = to_f32(sum[group][r][v]);
                    if (zeros) value = fnma(taken, set_f32(from.sums[place]), value);
                    value = mul(value, scale);
                    if (of.offset == kMinimum) value = fnma(taken, set_f32(from.sums[place]), value);
                    total[r] = fma(value, set_f32(from.scales[place]), total[r]);
                });
            });
            unrolled<R>([&](auto r) __attribute__((always_inline)) { store_f32(totals[r].lane[v], total[r]); });
        });
    }

    // Whether opened bytes have their zeros taken off: where products of all bytes are summed without saturation.
    bool takes_zeros() const { return kDotsBytes && (layout.offset == kZero || layout.offset == kFraction); }

    static void open_lines(const uint8_t* packed, uint8_t* lines) {
        for (int group = 0; group < 2; group++) {
            const i32x16 shift = set_i32(4 * group);
            for (int v = 0; v < kVectors; v++) {
                unrolled<8>([&](auto step) __attribute__((always_inline)) {
                    store_i32(lines + (8 * group + step) * kLine + 64 * v,
                              Values<Bits>::template step<step>(packed + 64 * v, group, shift));
                });
            }
        }
    }

    // Make bytes (value - zero) * units + kOpenedCentre.
    void take_zeros(uint8_t* lines, float* scales, const float* offsets) const {
        constexpr int steps = kSteps / kGroups;
        const bool fraction = layout.offset == kFraction;
        const f32x16 units = set_f32(static_cast<float>(layout.units)), inverse = div(set_f32(1.0f), units);
        for (int g = 0; g < kGroups; g++) {
            for (int v = 0; v < kVectors; v++) {
                const int64_t at = g * kPanel + v * kLanes;
                const i32x16 zero = round_to_i32(mul(load_f32(offsets + at), units));
                const i32x16 taken = repeat_bytes(sub(set_i32(kOpenedCentre), zero));
                store_f32(scales + at, mul(load_f32(scales + at), inverse));
                uint8_t* line = lines + g * steps * kLine + 64 * v;
                for (int step = 0; step < steps; step++, line += kLine) {
                    const i32x16 value = load_i32(line);
                    store_i32(line, add(fraction ? shift_left<Bits == 8 ? 0 : 7 - Bits>(value) : value, taken));
                }
            }
        }
    }
    static i32x16 repeat_bytes(i32x16 low) {
        const i32x16 two = bit_or(low, shift_left<8>(low));
        return bit_or(two, shift_left<16>(two));
    }
};

}  // namespace
}  // namespace PENSTOCK_ISA
}  // namespace penstock
