// Integer weights: values of 4, 5, 6 or 8 bits with a scale per group of columns, as described by the weight's fields.
//
//   w = scale * (value - zero)     or     w = scale * value - minimum          value is unsigned
//
// Scale and offset (zero point or minimum) belong to 16, 32 or more columns of a row. A super scale multiplies the
// scales of a number of columns, another one the minima; for whole rows it is the weight's `row_scales`. A block has
// 64 columns, 16 steps:
//   [groups][64 rows] scales, [groups][64 rows] offsets, if groups are no wider than a block; then lines of values
//     4 bits   8 lines: low nibbles are steps 0 to 7, high nibbles are steps 8 to 15
//     5 bits   2 lines: bit i of line h is the upper bit of step 8 h + i; then the lines of the lower 4 bits
//     6 bits   4 lines: bits 2 k and 2 k + 1 of line h are the upper two of step h + 4 k; then the lower 4 bits
//     8 bits   16 lines: steps 0, 8, 1, 9, and so on
//
// One token's products read a panel in exactly this order, so that hardware prefetching runs ahead from line to line.
//
// Blocks that share a super scale, or a wider group's scale, form a span; before its first block are [64 rows] of these
// scales and [64 rows] of their offsets.
#pragma once

#include "linear_kind.h"
#include "unrolled.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

inline int64_t stored_bytes(int32_t type) {
    return type == kNone ? 0 : type == kFloat32 ? 4 : type == kInt8 || type == kUInt8 ? 1 : 2;
}

// Calls body(load), where load(i) reads 16 stored values from values[i] on.
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

// 16 values of a type known at compile time.
template <int Type>
inline __attribute__((always_inline)) f32x16 load_stored(const uint8_t* values, int64_t at) {
    if constexpr (Type == kUInt8) return to_f32(widen_u8(values + at));
    if constexpr (Type == kInt8) return to_f32(widen_i8(values + at));
    if constexpr (Type == kFloat16) return load_f16(values + 2 * at);
    return load_bf16(values + 2 * at);
}

// Compile-time types of a weight's scales and offsets; Super: they are multiples of a float16.
template <int Scale, int Offset, int OffsetType, bool Super>
struct Form {
    static constexpr int kScale = Scale, kOffset = Offset, kOffsetType = OffsetType;
    static constexpr bool kSuper = Super;
};

// Which scales two adjacent blocks share, and so apply to the sum of their products: none, the weight's, or those of
// the activations. The others are of each group.
enum Coarse : int32_t { kFine, kCoarseWeights, kCoarseActivations };
constexpr int64_t kCoarseBlocks = 2;

constexpr int kOpenedCentre = 128;  // what unpacked bytes have in place of a zero point

// The layout of an integer weight.
struct IntegerLayout {
    static constexpr int kColumns = 64;
    int32_t offset, scale_type, offset_type, super_type;  // super_type: kNone if the super scale is per row
    int64_t units;                                        // of a stored zero point, per step
    int64_t centre;
    int64_t groups;       // per block; 0: groups are wider than a block
    int64_t scale_bytes, offset_bytes, header, block;
    int64_t span, span_header;  // blocks per span; bytes before the first of them
    Coarse coarse;

    explicit IntegerLayout(const Weight& weight)
        : offset(weight.offset), scale_type(weight.scale_type), offset_type(weight.offset_type),
          super_type(weight.super_columns ? weight.super_type : kNone),
          units(weight.offset == kFraction ? 128 >> weight.bits : 1), centre(1 << weight.bits >> 1),
          groups(weight.group > kColumns ? 0 : kColumns / weight.group), scale_bytes(stored_bytes(weight.scale_type)),
          offset_bytes(stored_bytes(weight.offset_type)), header(kPanel * groups * (scale_bytes + offset_bytes)),
          block(header + weight.bits * 2 * kPanel * 4), span(0), span_header(0),
          coarse(weight.x_group > kColumns ? kCoarseActivations : weight.group % 128 ? kFine : kCoarseWeights) {
        if (super_type != kNone) {
            span = weight.super_columns / kColumns;
            span_header = kPanel * stored_bytes(super_type) * (offset == kMinimum ? 2 : 1);
        } else if (!groups) {
            span = weight.group / kColumns;
            span_header = kPanel * (scale_bytes + offset_bytes);
        }
    }

    // Number of evenly spaced blocks from block `at` on.
    int64_t left_of_span(int64_t at) const { return span ? span - at % span : INT64_MAX; }
    int64_t offset_of(int64_t at) const { return at * block + (span ? (at / span + 1) * span_header : 0); }
    // The header of the span of block `at`, whose data is `data`.
    const uint8_t* span_of(const uint8_t* data, int64_t at) const {
        return data - (span ? at % span * block + span_header : 0);
    }
    uint8_t* span_of(uint8_t* data, int64_t at) const { return data - (span ? at % span * block + span_header : 0); }

    // Scales and offsets of block `at`, as float32 [Groups][64 rows]; zero points in steps.
    template <int Groups>
    void read(const uint8_t* data, int64_t at, float* scales, float* offsets) const {
        const uint8_t* head = span_of(data, at);
        const uint8_t* super = super_type == kNone ? nullptr : head;
        expand<Groups>(stored(data, head), scale_type, super, 1.0f, scales);
        if (offset_type == kNone) return;
        const uint8_t* super_offset = super && offset == kMinimum ? head + kPanel * stored_bytes(super_type) : nullptr;
        expand<Groups>(stored_offsets(data, head), offset_type, super_offset, 1.0f / static_cast<float>(units), offsets);
    }

    // The same for values that are multiplied in the units of zero points, with their zero points subtracted: scales of
    // a unit, and what is added to each value, kOpenedCentre less the zero point, in 4 bytes of [Groups][64 rows].
    template <int Groups>
    void read_units(const uint8_t* data, int64_t at, float* scales, float* added) const {
        const uint8_t* head = span_of(data, at);
        expand<Groups>(stored(data, head), scale_type, nullptr, 1.0f / static_cast<float>(units), scales);
        for (int g = 0; g < Groups; g++) {
            const uint8_t* zeros = stored_offsets(data, head) + g * groups / Groups * kPanel;
            for (int i = 0; i < kPanel; i += kLanes)
                store_i32(added + g * kPanel + i, repeat_bytes(sub(set_i32(kOpenedCentre), widen_u8(zeros + i))));
        }
    }

    // Calls body(Form) for the weight's form; returns false if it is not compiled, as with super scales of float32.
    template <int Bits, bool Halves, class Body>
    bool with_form(const Body& body) const {
        if constexpr (Halves) {
            if constexpr (Bits == 4) return is<Form<kInt8, kMinimum, kInt8, true>>(body);
            if constexpr (Bits == 6) return is<Form<kInt8, kCentre, kNone, true>>(body);
            return false;
        } else if constexpr (Bits == 8 || Bits == 6) {
            return is<Form<kUInt8, kCentre, kNone, false>>(body) || is<Form<kFloat16, kCentre, kNone, false>>(body) ||
                   (Bits == 8 && is<Form<kInt8, kCentre, kNone, true>>(body));
        } else {
            return is<Form<kUInt8, kMinimum, kUInt8, true>>(body) || is<Form<kUInt8, kFraction, kUInt8, false>>(body) ||
                   is<Form<kFloat16, kCentre, kNone, false>>(body) || is<Form<kFloat16, kMinimum, kFloat16, false>>(body) ||
                   (Bits == 4 ? is<Form<kFloat16, kZero, kUInt8, false>>(body)
                              : is<Form<kBFloat16, kCentre, kNone, false>>(body));
        }
    }

    // Super scales of a block's span, and of its minima, for a form that has them.
    template <class Of>
    void read_supers(const uint8_t* head, float (&supers)[2][kPanel]) const {
        for (int part = 0; part < (Of::kOffset == kMinimum ? 2 : 1); part++)
            for (int v = 0; v < kVectors; v++)
                store_f32(supers[part] + v * kLanes, load_f16(head + 2 * (part * kPanel + v * kLanes)));
    }

    // A vector of a block's group scales and offsets, as returned by `read`; `stored` begins with them.
    template <class Of>
    static inline __attribute__((always_inline)) f32x16 scales_of(const uint8_t* stored, const float (&supers)[2][kPanel],
                                                                  int v) {
        const f32x16 scale = load_stored<Of::kScale>(stored, v * kLanes);
        return Of::kSuper ? mul(scale, load_f32(supers[0] + v * kLanes)) : scale;
    }
    template <class Of>
    inline __attribute__((always_inline)) f32x16 offsets_of(const uint8_t* stored, const float (&supers)[2][kPanel],
                                                            int v) const {
        if constexpr (Of::kOffset == kCentre) return zero_f32();
        const f32x16 taken = load_stored<Of::kOffsetType>(stored, v * kLanes);
        if constexpr (Of::kOffset == kFraction) return mul(taken, set_f32(1.0f / static_cast<float>(units)));
        return Of::kSuper ? mul(taken, load_f32(supers[1] + v * kLanes)) : taken;
    }

  private:
    // A block's group scales, and their offsets: in its own header, or in that of its span.
    const uint8_t* stored(const uint8_t* data, const uint8_t* head) const { return groups ? data : head; }
    const uint8_t* stored_offsets(const uint8_t* data, const uint8_t* head) const {
        return stored(data, head) + kPanel * std_max(groups, 1) * scale_bytes;
    }

    static i32x16 repeat_bytes(i32x16 low) {
        const i32x16 two = bit_or(low, shift_left<8>(low));
        return bit_or(two, shift_left<16>(two));
    }

    template <class Of, class Body>
    bool is(const Body& body) const {
        const bool same = scale_type == Of::kScale && offset == Of::kOffset && offset_type == Of::kOffsetType &&
                          super_type == (Of::kSuper ? int32_t{kFloat16} : int32_t{kNone});
        if (same) body(Of());
        return same;
    }

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

// How the values of a row's block are packed into its lines.
template <int Bits>
struct Values {
    static constexpr int kUpper = Bits == 8 ? 0 : 2 * Bits - 8;  // lines of upper bits, which come first

    // For byte values: the line of a step.
    static constexpr int line_of(int step) { return step % 8 * 2 + step / 8; }

    static void pack(const uint8_t* values, uint8_t* words) {
        if constexpr (Bits == 8) {
            for (int step = 0; step < 16; step++) std::memcpy(words + 4 * line_of(step), values + 4 * step, 4);
            return;
        }
        uint8_t* low = words + 4 * kUpper;
        for (int i = 0; i < 32; i++) low[i] = static_cast<uint8_t>((values[i] & 15) | values[i + 32] << 4);
        if constexpr (kUpper > 0) {
            uint32_t upper[kUpper] = {};
            for (int step = 0; step < 16; step++) {
                uint32_t word;
                std::memcpy(&word, values + 4 * step, 4);
                const int line = Bits == 5 ? step / 8 : step % 4, at = Bits == 5 ? step % 8 : step / 4 * 2;
                upper[line] |= (word >> 4 & (Bits == 5 ? 0x01010101u : 0x03030303u)) << at;
            }
            std::memcpy(words, upper, sizeof upper);
        }
    }

    // A row's value in a column.
    static int value(const uint8_t* lines, int column, int lane) {
        const int step = column / 4, byte = column % 4;
        if constexpr (Bits == 8) return element(lines, line_of(step), lane)[byte];
        const int low = element(lines, kUpper + step % 8, lane)[byte] >> step / 8 * 4 & 15;
        if constexpr (Bits == 5) return low | (element(lines, step / 8, lane)[byte] >> step % 8 & 1) << 4;
        if constexpr (Bits == 6) return low | (element(lines, step % 4, lane)[byte] >> step / 4 * 2 & 3) << 4;
        return low;
    }

    // A vector's bytes of step 8 group + Step; `lines` begin at the vector, and `shift` is 4 group.
    template <int Step>
    static inline __attribute__((always_inline)) i32x16 step(const uint8_t* lines, int group, i32x16 shift) {
        if constexpr (Bits == 8) return load_i32(lines + (2 * Step + group) * kLine);
        const i32x16 low = bit_and(shift_right(load_i32(lines + (kUpper + Step) * kLine), shift), set_i32(0x0f0f0f0f));
        if constexpr (Bits == 5) {
            const i32x16 upper = load_i32(lines + group * kLine);
            return bit_or(low, bit_and(to_fifth<Step>(upper), set_i32(0x10101010)));
        } else if constexpr (Bits == 6) {
            const i32x16 upper = shift_right(load_i32(lines + Step % 4 * kLine), shift);
            return bit_or(low, bit_and(to_fifth<Step / 4 * 2>(upper), set_i32(0x30303030)));
        } else {
            return low;
        }
    }

    // The same in fractions of a step, the units of zero points, plus `added`.
    template <int Step>
    static inline __attribute__((always_inline)) i32x16 fractions(const uint8_t* lines, int group, i32x16 added) {
        if constexpr (Bits == 4) {  // a nibble's place in its byte is three bits further left, or one further right
            const i32x16 both = rotate_left(load_i32(lines + Step * kLine), set_i32(group ? 31 : 3));
            return add(bit_and(both, set_i32(0x78787878)), added);
        } else {
            return add(shift_left<Bits == 8 ? 0 : 7 - Bits>(step<Step>(lines, group, set_i32(4 * group))), added);
        }
    }

    // A vector's bytes of steps Step and 8 + Step, for values stored in less than a byte.
    template <int Step>
    static inline __attribute__((always_inline)) void pair(const uint8_t* lines, i32x16& first, i32x16& second) {
        const i32x16 both = load_i32(lines + (kUpper + Step) * kLine), mask = set_i32(0x0f0f0f0f);
        first = bit_and(both, mask), second = bit_and(shift_right<4>(both), mask);
        if constexpr (Bits == 5) {
            const i32x16 bit = set_i32(0x10101010);
            first = bit_or(first, bit_and(to_fifth<Step>(load_i32(lines)), bit));
            second = bit_or(second, bit_and(to_fifth<Step>(load_i32(lines + kLine)), bit));
        } else if constexpr (Bits == 6) {
            const i32x16 upper = load_i32(lines + Step % 4 * kLine), bits = set_i32(0x30303030);
            first = bit_or(first, bit_and(to_fifth<Step / 4 * 2>(upper), bits));
            second = bit_or(second, bit_and(to_fifth<4 + Step / 4 * 2>(upper), bits));
        }
    }

  private:
    // Move bit `At` of each byte to bit 4; other bits are undefined.
    template <int At>
    static inline __attribute__((always_inline)) i32x16 to_fifth(i32x16 x) {
        if constexpr (At < 4) return shift_left<4 - At>(x);
        if constexpr (At > 4) return shift_right<At - 4>(x);
        return x;
    }
};

}  // namespace
}  // namespace PENSTOCK_ISA
}  // namespace penstock
