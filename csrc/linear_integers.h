// Integer weights: values of 4, 5, 6 or 8 bits with scales of groups of columns, as the fields of a weight describe them.
//
//   w = scale * (value - zero)     or     w = scale * value - minimum          value is unsigned
//
// Scale and offset (zero or minimum) belong to 16, 32 or more columns of a row. A super scale multiplies the scales of so
// many columns, another the minima; of whole rows it is the weight's `row_scales`. A block has 64 columns, 16 steps:
//
//   [groups][64 rows] scales, [groups][64 rows] offsets, where groups are no wider than a block; then lines of values
//     4 bits   8 lines: low nibbles are the steps 0 to 7, high nibbles the steps 8 to 15
//     5 bits   these of the lower 4 bits, then 2 lines: bit i of line h is the upper bit of step 8 h + i
//     6 bits   these of the lower 4 bits, then 4 lines: bits 2 k and 2 k + 1 of line h are the upper two of step h + 4 k
//     8 bits   16 lines
//
// Before the first of the blocks that share a super scale, or a wider group's scale, lie [64 rows] of these and [64 rows]
// of their offsets.
//
// Activations are rounded to int8 by 32 columns. The products of a group of 32 are summed as integers, scaled by the
// weights' scale, then by the activations', and added to the row's float32 sum, group after group: so the bits are the
// same for vectors of any length, and whether weights are multiplied as they lie or have been opened to bytes.
#pragma once

#include <utility>

#include "linear_kind.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

inline int64_t stored_bytes(int32_t type) {
    return type == kNone ? 0 : type == kFloat32 ? 4 : type == kInt8 || type == kUInt8 ? 1 : 2;
}

inline float stored_value(const uint8_t* values, int32_t type, int64_t at) {
    if (type == kInt8) return static_cast<int8_t>(values[at]);
    if (type == kUInt8) return values[at];
    return value_of(values, type, at);
}

// body(load) whose load(i) are 16 stored values from values[i] on.
template <class Body>
inline void with_stored(const uint8_t* values, int32_t type, const Body& body) {
    switch (type) {
        case kInt8: return body([=](int64_t i) { return to_f32(widen_i8(values + i)); });
        case kUInt8: return body([=](int64_t i) { return to_f32(widen_u8(values + i)); });
        case kBFloat16: return body([=](int64_t i) { return load_bf16(values + 2 * i); });
        case kFloat16: return body([=](int64_t i) { return load_f16(values + 2 * i); });
        default: return body([=](int64_t i) { return load_f32(reinterpret_cast<const float*>(values) + i); });
    }
}

// Where the parts of an integer weight lie.
struct IntegerLayout {
    static constexpr int kColumns = 64;
    int32_t offset, scale_type, offset_type, super_type;  // super_type: kNone where the super scale is a row's
    int64_t units;                                        // of a stored zero, in a step
    int64_t centre;
    int64_t groups;       // of a block; 0: they are wider
    int64_t scale_bytes, offset_bytes, header, block;
    int64_t span, span_header;  // blocks that share what lies before the first of them

    explicit IntegerLayout(const Weight& weight)
        : offset(weight.offset), scale_type(weight.scale_type), offset_type(weight.offset_type),
          super_type(weight.super_columns ? weight.super_type : kNone),
          units(weight.offset == kFraction ? 128 >> weight.bits : 1), centre(1 << weight.bits >> 1),
          groups(weight.group > kColumns ? 0 : kColumns / weight.group), scale_bytes(stored_bytes(weight.scale_type)),
          offset_bytes(stored_bytes(weight.offset_type)), header(kPanel * groups * (scale_bytes + offset_bytes)),
          block(header + weight.bits * 2 * kPanel * 4), span(0), span_header(0) {
        if (super_type != kNone) {
            span = weight.super_columns / kColumns;
            span_header = kPanel * stored_bytes(super_type) * (offset == kMinimum ? 2 : 1);
        } else if (!groups) {
            span = weight.group / kColumns;
            span_header = kPanel * (scale_bytes + offset_bytes);
        }
    }

    int64_t offset_of(int64_t at) const { return at * block + (span ? (at / span + 1) * span_header : 0); }
    // What lies before the span of the block `at`, which is `data`.
    const uint8_t* span_of(const uint8_t* data, int64_t at) const {
        return data - (span ? at % span * block + span_header : 0);
    }
    uint8_t* span_of(uint8_t* data, int64_t at) const { return data - (span ? at % span * block + span_header : 0); }

    // Scales and offsets of the block `at`, as float32 [Groups][64 rows]; zeros in steps.
    template <int Groups>
    void read(const uint8_t* data, int64_t at, float* scales, float* offsets) const {
        const uint8_t* head = span_of(data, at);
        const uint8_t* stored = groups ? data : head;
        const int64_t count = std_max(groups, 1);
        const uint8_t* super = super_type == kNone ? nullptr : head;
        expand<Groups>(stored, scale_type, super, 1.0f, scales);
        if (offset_type == kNone) return;
        const uint8_t* super_offset = super && offset == kMinimum ? head + kPanel * stored_bytes(super_type) : nullptr;
        expand<Groups>(stored + kPanel * count * scale_bytes, offset_type, super_offset,
                       1.0f / static_cast<float>(units), offsets);
    }

  private:
    template <int Groups>
    void expand(const uint8_t* stored, int32_t type, const uint8_t* super, float factor, float* values) const {
        f32x16 factors[kVectors];
        for (int v = 0; v < kVectors; v++) factors[v] = set_f32(factor);
        if (super) {
            with_stored(super, super_type, [&](const auto& load) {
                for (int v = 0; v < kVectors; v++) factors[v] = load(v * kLanes);
            });
        }
        with_stored(stored, type, [&](const auto& load) {
            for (int g = 0; g < Groups; g++)
                for (int v = 0; v < kVectors; v++)
                    store_f32(values + g * kPanel + v * kLanes,
                              mul(load(g * groups / Groups * kPanel + v * kLanes), factors[v]));
        });
    }
};

template <class Body, int... I>
inline __attribute__((always_inline)) void for_each_of(std::integer_sequence<int, I...>, const Body& body) {
    (body(std::integral_constant<int, I>()), ...);
}
// body(I) for I from 0 to N - 1, each a constant.
template <int N, class Body>
inline __attribute__((always_inline)) void unrolled(const Body& body) {
    for_each_of(std::make_integer_sequence<int, N>(), body);
}

// How the values of a block's row are packed into its lines.
template <int Bits>
struct Values {
    static constexpr int kLines = 2 * Bits;

    static void pack(const uint8_t* values, uint8_t* words) {
        if constexpr (Bits == 8) {
            std::memcpy(words, values, 64);
            return;
        }
        for (int i = 0; i < 32; i++) words[i] = static_cast<uint8_t>((values[i] & 15) | values[i + 32] << 4);
        if constexpr (Bits > 4) std::memset(words + 32, 0, 4 * (kLines - 8));
        for (int i = 0; i < 64 && Bits > 4; i++) {
            const int step = i / 4, line = Bits == 5 ? step / 8 : step % 4, at = Bits == 5 ? step % 8 : step / 4 * 2;
            words[32 + 4 * line + i % 4] |= static_cast<uint8_t>(values[i] >> 4 << at);
        }
    }

    // A column's value in a row.
    static int value(const uint8_t* lines, int column, int lane) {
        const int step = column / 4, byte = column % 4;
        if constexpr (Bits == 8) return element(lines, step, lane)[byte];
        const int low = element(lines, step % 8, lane)[byte] >> step / 8 * 4 & 15;
        if constexpr (Bits == 5) return low | (element(lines, 8 + step / 8, lane)[byte] >> step % 8 & 1) << 4;
        if constexpr (Bits == 6) return low | (element(lines, 8 + step % 4, lane)[byte] >> step / 4 * 2 & 3) << 4;
        return low;
    }

    // A vector's bytes of the step 8 group + Step, where `lines` begin at the vector and `shift` is 4 group.
    template <int Step>
    static inline __attribute__((always_inline)) i32x16 step(const uint8_t* lines, int group, i32x16 shift) {
        if constexpr (Bits == 8) return load_i32(lines + (8 * group + Step) * kLine);
        const i32x16 low = bit_and(shift_right(load_i32(lines + Step * kLine), shift), set_i32(0x0f0f0f0f));
        if constexpr (Bits == 5) {
            const i32x16 upper = load_i32(lines + (8 + group) * kLine);
            return bit_or(low, bit_and(to_fifth<Step>(upper), set_i32(0x10101010)));
        } else if constexpr (Bits == 6) {
            const i32x16 upper = shift_right(load_i32(lines + (8 + Step % 4) * kLine), shift);
            return bit_or(low, bit_and(to_fifth<Step / 4 * 2>(upper), set_i32(0x30303030)));
        } else {
            return low;
        }
    }

  private:
    // Bit `At` of each byte in the place of bit 4; others land anywhere.
    template <int At>
    static inline __attribute__((always_inline)) i32x16 to_fifth(i32x16 x) {
        if constexpr (At < 4) return shift_left<4 - At>(x);
        if constexpr (At > 4) return shift_right<At - 4>(x);
        return x;
    }
};

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
                         kTileTokens = 96, kRows = kMaxRows, kRowsAlone = Halves ? kRows : kMaxRowsHalf;
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
            alignas(64) float scales[kGroups * kPanel], offsets[kGroups * kPanel];
            const uint8_t* data = slice.data + b * layout.block;
            layout.read<kGroups>(data, slice.first + b, scales, offsets);
            const OpenBlock block{data + layout.header, scales, offsets, layout.offset};
            constexpr int wide = R > kRows || Halves ? kWide / 2 : kWide;
            rows.add_block<Bits, Bits, Halves, R, wide>(block, slice.first + b, token, prefetch, sums);
        }
    }

    static void begin(int64_t, Sums& sums) { sums.fill(zero_f32()); }
    static f32x16 total(const Sums& sums, int v, int64_t) { return load_f32(sums.lane[v]); }

  private:
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
