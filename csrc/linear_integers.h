// Products with integer weights; `linear_integer_layout.h` describes their layout.
//
// Activations are quantized to int8 in groups of 32 or 128 columns. The products of 32 columns are summed as integers
// (of each half separately, if the weight's groups have 16 columns), multiplied by the weight scale, then by the
// activation scale, and added to the row's float32 sum, group by group. Where one of the two scales is that of 128
// columns, it multiplies the float32 sum of their products by the other. So the bits do not depend on the vector
// length, nor on whether weights are multiplied packed or unpacked to bytes.
#pragma once

#include "linear_int8_rows.h"
#if defined(PENSTOCK_TILES)
#include "linear_int8_tiles.h"
#endif

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

#if defined(PENSTOCK_SIGNS_BYTES)
// The magnitudes of a vector of signed bytes, as unsigned bytes, and what gives their products the signs.
struct SizeAndSign {
    i32x16 size, sign;
};
// Unpacked bytes: all bits of `sign` are set where a byte is negative. There x ^ sign is -x - 1, so a product is too small
// by the magnitude, which `add_blocks` adds to the sums (`lacking`).
struct OpenedBytes : SizeAndSign {
    static i32x16 apply(i32x16 x, i32x16 sign) { return bit_xor(x, sign); }
};
// Packed bytes, which are their own signs. Unlike the exclusive or, the instruction occupies a port that multiplies.
struct PackedBytes : SizeAndSign {
    static i32x16 apply(i32x16 x, i32x16 sign) { return sign_i8(x, sign); }
};
inline __attribute__((always_inline)) SizeAndSign signed_bytes(i32x16 bytes) {  // stored with kOpenedCentre added
    const i32x16 value = less_128_i8(bytes);
    return {abs_i8(value), value};
}

// Add the products of a step of R rows of x with Wide vectors of bytes. The sum of a pair fits an int16: magnitudes are at
// most 128, and as no element of x is -128, factors are from -128 to 127, those of negative bytes to 126.
template <int R, int Wide, class Bytes>
inline __attribute__((always_inline)) void multiply_signed(i32x16 (&sum)[R][Wide], const Bytes (&bytes)[Wide],
                                                           const uint8_t* x) {
    for_sums<R, Wide>([&](int r, int v) {
        int32_t bits;
        std::memcpy(&bits, x + 64 * r, 4);
        const i32x16 factor = Bytes::apply(set_i32(bits), bytes[v].sign);
        sum[r][v] = add_pairs_i16(sum[r][v], pairs_u8_i8(bytes[v].size, factor));
    });
}
#endif

// Add the products of R rows of x, a line apart, with Wide vectors of a group's values of at most `Most` bits, over
// Steps steps from First on. `bytes(step, v)` returns a vector's bytes of a step.
template <int Most, int First, int Steps, int R, int Wide, class Bytes>
inline __attribute__((always_inline)) void multiply_values(i32x16 (&sum)[R][Wide], const Bytes& bytes,
                                                           const uint8_t* x) {
    constexpr bool dots = kDotsBytes || kDotsSmallBytes || Most == 8;
    constexpr int fitting = dots ? 1 : 8 >> (Most - 4), together = Steps < fitting ? Steps : fitting;  // products per int16
    constexpr int held = together > 2 ? 1 : together;  // steps whose weights are in registers
    using Value = decltype(bytes(std::integral_constant<int, First>(), std::integral_constant<int, 0>()));
    i32x16 part[R][Wide];
    unrolled<Steps / held>([&](auto turn) __attribute__((always_inline)) {
        constexpr int index = turn * held;
        const uint8_t* of_step = x + 4 * (First + index);
        Value weight[held][Wide];
        unrolled<held * Wide>([&](auto i) __attribute__((always_inline)) {
            weight[i / Wide][i % Wide] = bytes(std::integral_constant<int, First + index + i / Wide>(),
                                               std::integral_constant<int, i % Wide>());
        });
#if defined(PENSTOCK_SIGNS_BYTES)
        if constexpr (Most == 8) return multiply_signed(sum, weight[0], of_step);
#endif
        if constexpr (Most < 8 || !kSignsBytes) {
            for_sums<R, Wide>([&](int r, int v) {
                const uint8_t* at = of_step + 64 * r;
                if constexpr (kDotsBytes || Most == 8) {
                    sum[r][v] = dot_u8_i8(sum[r][v], weight[0][v], at);
                } else if constexpr (kDotsSmallBytes) {
                    sum[r][v] = dot_u7_i8(sum[r][v], weight[0][v], at);
                } else {
#pragma GCC unroll 2
                    for (int i = 0; i < held; i++) {
                        int32_t bits;
                        std::memcpy(&bits, at + 4 * i, 4);
                        const i32x16 pairs = pairs_u8_i8(weight[i][v], set_i32(bits));
                        part[r][v] = (index + i) % together == 0 ? pairs : add_i16(part[r][v], pairs);
                    }
                    if ((index + held) % together == 0) sum[r][v] = add_pairs_i16(sum[r][v], part[r][v]);
                }
            });
        }
    });
    (void)part;
}

// Consecutive blocks of a slice to multiply R rows with: their lines, scales and offsets (as returned by
// `IntegerLayout::read`). Fields `..._step` are the distances from one block to the next, in bytes or floats.
struct Blocks {
    const uint8_t* lines;
    const float *scales, *offsets;  // [groups][vectors][16] of a block
    int64_t first, count, lines_step, scales_step;
    int32_t offset;
    Coarse coarse;
};

// The kinds of scales and offsets, which differ between weights: those that the blocks name, or those that a loop is
// compiled for. Without branches on them it takes up to a tenth less time, on AVX2.
struct AnyScales {
    static Coarse coarse(const Blocks& blocks) { return blocks.coarse; }
    static int32_t offset(const Blocks& blocks) { return blocks.offset; }
};
template <Coarse Scales, int32_t Offset>
struct KnownScales {
    static bool are(Coarse coarse, int32_t offset) { return coarse == Scales && offset == Offset; }
    static Coarse coarse(const Blocks&) { return Scales; }
    static int32_t offset(const Blocks&) { return Offset; }
};

// In place of Fetch, for products whose caller prefetches.
struct NoFetch {
    void steps(int64_t) {}
};

// Products of rows with blocks of weights.
struct Int8Rows : QuantizedRows {
    // Add the products of R rows and Wide vectors of the blocks to `totals`, which stay in registers, like the integer
    // sums of the current group. A block's scales have `Vectors` vectors. Halves: groups have 16 columns.
    // `bytes(lines, offsets, group, step, v)` returns a vector's bytes of a step; `offsets` are the group's. `lacking(lines,
    // part)` returns what must be added to the products of a group, or half of one. Known: AnyScales or KnownScales.
    template <int Most, bool Halves, int R, int Wide, int Vectors, class Known, class Bytes, class Lacking, class Fetched>
    inline __attribute__((always_inline)) void add_blocks(const Blocks& blocks, const Bytes& bytes,
                                                          const Lacking& lacking, int64_t token, Fetched& fetched,
                                                          Sums* totals, int first_vector) const {
        constexpr int halves = Halves ? 2 : 1, steps = 8 / halves;
        const Int8Rows of = *this;  // a copy, which stores cannot alias
        const Blocks from = blocks;
        const Coarse shared = Known::coarse(blocks);
        const bool coarse = shared != kFine;
        const int32_t offset = Known::offset(blocks);
        const bool takes = offset == kZero || offset == kFraction;
        const uint8_t* lines = from.lines;
        const float *scales = from.scales, *offsets = from.offsets;
        Fetched prefetch = fetched;  // in registers
        f32x16 total[R][Wide];
        for (int64_t b = 0; b < from.count; b++) {
            if (coarse ? b % kCoarseBlocks == 0 : b == 0) {
                for_sums<R, Wide>([&](int r, int v) {
                    total[r][v] = coarse ? zero_f32() : load_f32(totals[r].lane[first_vector + v]);
                });
            }
            for (int group = 0; group < 2; group++) {
                prefetch.steps(8 * Wide / kWide);
                const uint8_t* row = reinterpret_cast<const uint8_t*>(of.block(token, from.first + b)) + 32 * group;
                const int64_t index = 2 * (from.first + b) + group;
                const float* x_scales = of.scales + index * of.count + token;
                unrolled<halves>([&](auto half) __attribute__((always_inline)) {
                    const int64_t place = (index * halves + half) * of.count + token;
                    i32x16 sum[R][Wide];
                    for_sums<R, Wide>([&](int r, int v) {
                        sum[r][v] = add(set_i32(of.first[place + r]), lacking(lines, halves * group + half));
                    });
                    const int64_t at = (halves * group + half) * Vectors * kLanes;
                    multiply_values<Most, steps * half, steps>(
                        sum,
                        [&](auto step, auto v) __attribute__((always_inline)) {
                            return bytes(lines, offsets + at, group, step, v);
                        },
                        row);
                    const auto x_sum = [&](int r) { return set_f32(of.sums[place + r]); };
                    f32x16 value[R][Wide];
                    for_sums<R, Wide>([&](int r, int v) { value[r][v] = to_f32(sum[r][v]); });
                    if (takes) {
                        for_sums<R, Wide>([&](int r, int v) {
                            value[r][v] = fnma(load_f32(offsets + at + v * kLanes), x_sum(r), value[r][v]);  // exact
                        });
                    }
                    if (shared == kCoarseActivations) {
                        const bool minimum = offset == kMinimum;
                        for_sums<R, Wide>([&](int r, int v) {
                            f32x16 t = fma(value[r][v], load_f32(scales + at + v * kLanes), total[r][v]);
                            if (minimum) t = fnma(load_f32(offsets + at + v * kLanes), x_sum(r), t);
                            total[r][v] = t;
                        });
                        return;
                    }
                    if (!coarse) {
                        for_sums<R, Wide>([&](int r, int v) {
                            value[r][v] = mul(value[r][v], load_f32(scales + at + v * kLanes));
                        });
                    }
                    if (offset == kMinimum) {
                        for_sums<R, Wide>([&](int r, int v) {
                            value[r][v] = fnma(load_f32(offsets + at + v * kLanes), x_sum(r), value[r][v]);
                        });
                    }
                    for_sums<R, Wide>([&](int r, int v) {
                        total[r][v] = fma(value[r][v], set_f32(x_scales[r]), total[r][v]);
                    });
                });
            }
            if ((coarse && b % kCoarseBlocks == kCoarseBlocks - 1) || b + 1 == from.count) {
                const float* x_scales = of.scales + 2 * (from.first + b) * of.count + token;
                for_sums<R, Wide>([&](int r, int v) {
                    float* lanes = totals[r].lane[first_vector + v];
                    if (!coarse) return store_f32(lanes, total[r][v]);
                    const f32x16 scale =
                        shared == kCoarseWeights ? load_f32(scales + v * kLanes) : set_f32(x_scales[r]);
                    store_f32(lanes, fma(total[r][v], scale, load_f32(lanes)));
                });
            }
            lines += from.lines_step, scales += from.scales_step, offsets += from.scales_step;
        }
        fetched = prefetch;
    }
};

// Values of `Bits` bits; Halves: in groups of 16 columns instead of 32 or more.
template <int Bits, bool Halves>
struct Integers : InBlocks {
    static constexpr bool kOpensLong = true, kSigned = Bits == 8 && kSignsBytes;
    static constexpr bool kFromL2 = kWide == kVectors;  // products of 12 rows take longer than to load a slice from L2
    static constexpr bool kTakesFractions = kDotsBytes && (Bits == 4 || Bits == 5);  // whether values can be fractions
    static constexpr bool kFetchesOften = kFromL2;  // with each group of columns, not once with a vector's slice
    static constexpr int kColumns = IntegerLayout::kColumns, kSteps = 16, kSlice = kTakesFractions ? 8 : 4,
                         kLongSlice = kFromL2 ? 16 : 4, kTileTokens = 384, kRows = kMaxRowsHalf, kRowsAlone = kRows,
                         kNearGroups = 8 * kMaxRows / kRows;
    static_assert(kSlice % kCoarseBlocks == 0 && kLongSlice % kCoarseBlocks == 0, "blocks with one scale are in one slice");
    static constexpr int kPackedGroups = Bits == 8 ? (kSigned ? 2 : 3) : Halves ? 1 : 2;
    // Rows of the smallest group that unpacked slices are multiplied with, as `Division` makes groups of equal sizes.
    static constexpr int least_opened(int per_token) {
        return (kPackedGroups * kRows / per_token + 1) / (kPackedGroups + 1) * per_token;
    }
    static constexpr int kHalves = Halves ? 2 : 1, kGroups = 2 * kHalves;  // per group of 32; per block
    // Unpacked blocks are [vectors][blocks] of [16 steps][64 bytes], then the scales and the offsets as floats,
    // [groups][16] each. Signed: the bytes' magnitudes, their signs in as many lines, and the sums of the magnitudes of
    // negative bytes, [groups][16].
    static constexpr int kOpenedBytes = kSteps * 64, kOpenedScales = kGroups * 64,
                         kOpenedLines = kSigned ? 2 * kOpenedBytes + kOpenedScales : kOpenedBytes,
                         kOpenedBlock = kOpenedLines + 2 * kOpenedScales,
                         kOpened = kLongSlice * kVectors * kOpenedBlock;

    static int64_t block_bytes(const Weight& weight) { return IntegerLayout(weight).block; }
    static int64_t header_bytes(const Weight& weight) { return IntegerLayout(weight).header; }
    static int64_t offset_of(const Weight& weight, int64_t block) { return IntegerLayout(weight).offset_of(block); }
    static int64_t bytes_per_token(int64_t columns) {
        const int64_t width = round_up(columns, kColumns);
        return (width + width / 32 * 4 * (1 + 2 * kHalves)) * (Int8Rows::kPaddedRows + 1) / Int8Rows::kPaddedRows + 1;
    }

    IntegerLayout layout;
    int64_t passes;  // int8 rows per token
    Int8Rows rows;

    Integers(const Weight& weight, uint8_t* scratch, int64_t tokens) : layout(weight), passes(weight.x_bytes) {
        const int64_t width = round_up(weight.columns, kColumns), groups = width / 32;
        rows.count = Int8Rows::padded(tokens * passes);
        rows.x = reinterpret_cast<int8_t*>(scratch);
        rows.scales = reinterpret_cast<float*>(rows.x + rows.count * width);
        rows.sums = rows.scales + rows.count * groups;
        rows.first = reinterpret_cast<int32_t*>(rows.sums + rows.count * groups * kHalves);
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
        const int32_t zero = (layout.offset == kMinimum ? 0 : centre) - (Bits == 8 && kSignsBytes ? kOpenedCentre : 0);
        rows.quantize(row, token, {passes, kHalves, zero, layout.coarse == kCoarseActivations});
    }

    // Unpack the slice's blocks to `bytes`.
    const uint8_t* open(const Slice& slice, uint8_t* bytes) const {
        for (int64_t b = 0; b < slice.count; b++) {
            const uint8_t* data = slice.data + layout.offset_of(slice.first + b) - layout.offset_of(slice.first);
            float scales[kGroups * kPanel], offsets[kGroups * kPanel];
            read(data, slice.first + b, takes_zeros(), scales, offsets);
            for (int v = 0; v < kVectors; v++) {
                uint8_t* lines = bytes + (v * slice.count + b) * kOpenedBlock;
                uint8_t* opened_scales = lines + kOpenedLines;
                for (int g = 0; g < kGroups; g++) {
                    std::memcpy(opened_scales + g * 64, scales + g * kPanel + v * kLanes, 64);
                    std::memcpy(opened_scales + kOpenedScales + g * 64, offsets + g * kPanel + v * kLanes, 64);
                }
                open_lines(data + layout.header + 64 * v, offsets + v * kLanes, lines);
            }
        }
        return bytes;
    }

#if defined(PENSTOCK_TILES)
    // Groups of 16 columns fill a quarter of a tile, and vectors are faster.
    static constexpr int kTiledRows = Halves ? 0 : kMostTiledRows;
    using Registers = TilesInUse;
    static_assert(Halves || kOpenedBlock == TiledBlocks::kBytes);
    void accumulate_tiled(int count, const Slice& slice, const uint8_t* opened, int64_t token, Fetch& prefetch,
                          Sums* sums) const {
        const TiledBlocks blocks{opened, slice.first, slice.count, layout.offset == kMinimum, layout.coarse};
        const TiledFetch fetch{[](void* of, int64_t steps) { static_cast<Fetch*>(of)->steps(steps); }, &prefetch};
        add_tiled(rows, blocks, token, count, fetch, sums);
    }
#endif

    template <int R>
    __attribute__((noinline)) void accumulate(const Slice& slice, const uint8_t* opened, int64_t token,
                                              Fetch& prefetch, Sums* sums) const {
        if constexpr ((R >= least_opened(1) || R >= least_opened(2)) && R <= kRows && !kTiledRows) {
            if (opened != slice.data) {
                const auto add = [&](auto of) { add_opened<decltype(of), R>(slice, opened, token, prefetch, sums); };
                if constexpr (R == kRows)
                    if (with_scales(add)) return;
                return add(AnyScales());
            }
        }
        if constexpr (R <= kFew && (R > 1 || Bits < 8))  // one row of bytes is 3 to 14 % faster without, on Zen 4
            if (layout.with_form<Bits, Halves>([&](auto form) { add_few<decltype(form), R>(slice, token, prefetch, sums); }))
                return;
        add_packed<R>(slice, token, prefetch, sums);
    }

    static void begin(int64_t, Sums& sums) { sums.fill(zero_f32()); }

  private:
    // Maximum rows whose sums over two groups fit the registers.
    static constexpr int kFew = kWide < kVectors ? 0 : 2;
    // Whether small batches load the next data directly instead of prefetching it: a block then takes few enough
    // instructions for the hardware to run ahead to the next one.
    static constexpr bool kTouches = kRunsAhead && !Halves;

    // A block's scales and offsets, as `read` returns them.
    struct alignas(64) Scales {
        float scales[kGroups * kPanel], offsets[kGroups * kPanel];
    };

    const uint8_t* data_of(const Slice& slice, int64_t block) const {
        return slice.data + layout.offset_of(slice.first + block) - layout.offset_of(slice.first);
    }

    // A vector of bytes as `multiply_values` takes them.
#if defined(PENSTOCK_SIGNS_BYTES)
    static inline __attribute__((always_inline)) auto opened_bytes(const uint8_t* line) {
        if constexpr (kSigned) return OpenedBytes{{load_i32(line), load_i32(line + kOpenedBytes)}};
        else return load_i32(line);
    }
    static inline __attribute__((always_inline)) auto packed_bytes(i32x16 bytes) {
        if constexpr (kSigned) return PackedBytes{signed_bytes(bytes)};
        else return bytes;
    }
#else
    static i32x16 opened_bytes(const uint8_t* line) { return load_i32(line); }
    static i32x16 packed_bytes(i32x16 bytes) { return bytes; }
#endif

    // The offsets of unpacked bytes.
    int32_t opened_offset() const { return takes_zeros() ? kCentre : layout.offset; }

    // Calls body(KnownScales) for the unpacked bytes' scales and offsets; returns false if no loop is compiled for them.
    template <class Body>
    bool with_scales(const Body& body) const {
        const auto is = [&](auto scales) {
            const bool known = scales.are(layout.coarse, opened_offset());
            if (known) body(scales);
            return known;
        };
        using Super = KnownScales<kCoarseActivations, Bits < 6 ? kMinimum : kCentre>;  // of k-quants
        using Own = KnownScales<Bits == 8 ? kCoarseWeights : kCoarseActivations, kCentre>;
        constexpr bool own = Bits == 8 || (Bits < 6 && kDotsBytes);  // int8, int5 and int4
        return is(KnownScales<kFine, kCentre>()) || is(Super()) || (own && is(Own()));
    }

    template <class Known, int R>
    __attribute__((noinline)) void add_opened(const Slice& slice, const uint8_t* opened, int64_t token,
                                              Fetch& prefetch, Sums* sums) const {
        for (int vector = 0; vector < kVectors; vector++, opened += slice.count * kOpenedBlock) {
            const float* scales = reinterpret_cast<const float*>(opened + kOpenedLines);
            const Blocks blocks{opened, scales, scales + kGroups * kLanes, slice.first, slice.count, kOpenedBlock,
                                kOpenedBlock / 4, opened_offset(), layout.coarse};
            const auto add = [&](auto& fetch) __attribute__((always_inline)) {
                rows.add_blocks<kDotsBytes ? 8 : Bits, Halves, R, 1, 1, Known>(
                    blocks,
                    [](const uint8_t* lines, const float*, int group, auto step, auto) __attribute__((always_inline)) {
                        return opened_bytes(lines + (8 * group + step) * 64);
                    },
                    [](const uint8_t* lines, int part) __attribute__((always_inline)) {
                        if constexpr (kSigned) return load_i32(lines + 2 * kOpenedBytes + 64 * part);
                        else return zero_i32();
                    },
                    token, fetch, sums, vector);
            };
            if constexpr (kFetchesOften) {
                add(prefetch);
            } else {
                NoFetch none;
                prefetch.steps(2 * 8 * slice.count / kWide);
                add(none);
            }
        }
    }

    // Add the products of R rows with packed blocks.
    template <int R>
    void add_packed(const Slice& slice, int64_t token, Fetch& prefetch, Sums* sums) const {
        const bool taken = takes_fractions();
        Scales scales[kSlice];
        for (int64_t first = 0; first < slice.count; first += kSlice) {
            const Slice part{data_of(slice, first), slice.first + first, std_min(slice.count - first, kSlice)};
            for (int64_t b = 0; b < part.count; b++)
                read(data_of(part, b), part.first + b, taken, scales[b].scales, scales[b].offsets);
            if constexpr (kTakesFractions) {
                if (taken) {
                    add_packed<R, true>(part, scales, token, prefetch, sums);
                    continue;
                }
            }
            add_packed<R, false>(part, scales, token, prefetch, sums);
        }
    }

    // The same for at most kSlice blocks. Taken: zero points are subtracted here. Not inlined: registers are then
    // allocated for one way to read values at a time.
    template <int R, bool Taken>
    __attribute__((noinline)) void add_packed(const Slice& slice, const Scales* scales, int64_t token, Fetch& prefetch,
                                              Sums* sums) const {
        constexpr int wide = R > kMaxRows && kWide > 2 ? kWide / 4 : kWide / 2;
        for (int vector = 0; vector < kVectors; vector += wide) {
            for (int64_t b = 0, run; b < slice.count; b += run) {  // blocks of one span, evenly spaced
                run = std_min(slice.count - b, layout.left_of_span(slice.first + b));
                const Blocks blocks{data_of(slice, b) + layout.header + 64 * vector,
                                    scales[b].scales + vector * kLanes, scales[b].offsets + vector * kLanes,
                                    slice.first + b, run, layout.block, 2 * kGroups * kPanel,
                                    Taken ? kCentre : layout.offset, layout.coarse};
                rows.add_blocks<Bits, Halves, R, wide, kVectors, AnyScales>(
                    blocks,
                    [](const uint8_t* lines, const float* offsets, int group, auto step, auto v)
                        __attribute__((always_inline)) {
                            lines += 64 * v;
                            if constexpr (Taken) {
                                const i32x16 added = load_i32(offsets + v * kLanes);
                                return Values<Bits>::template fractions<step>(lines, group, added);
                            } else {
                                const i32x16 shift = set_i32(4 * group);
                                return packed_bytes(Values<Bits>::template step<step>(lines, group, shift));
                            }
                        },
                    [](const uint8_t*, int) { return zero_i32(); }, token, prefetch, sums, vector);
            }
        }
    }

    // Add the products of a few rows with packed blocks, both groups of 32 of a block at once.
    template <class Of, int R>
    __attribute__((noinline)) void add_few(const Slice& slice, int64_t token, Fetch& prefetch, Sums* sums) const {
        alignas(64) float supers[2][kPanel];
        alignas(64) Sums parts[R];  // sums to multiply by a coarse scale
        const int64_t span = std_max(layout.span, 1);
        for (int64_t b = 0, place = slice.first % span; b < slice.count; b++, place = place + 1 < span ? place + 1 : 0) {
            const uint8_t* data = data_of(slice, b);
            const uint8_t* head = data - (layout.span ? place * layout.block + layout.span_header : 0);
            // Load the block's beginning now, in memory order, although parts of it are needed later.
            if (kTouches) touch(place ? data : head, data + layout.header + Values<Bits>::kUpper * kLine);
            if (Of::kSuper && (b == 0 || place == 0)) layout.read_supers<Of>(head, supers);
            const bool last =
                layout.coarse != kFine && (b % kCoarseBlocks == kCoarseBlocks - 1 || b + 1 == slice.count);
            add_few<Of, R>(data, layout.groups ? data : head, supers, slice.first + b, token, prefetch,
                           layout.coarse == kFine ? sums : parts, layout.coarse != kFine && b % kCoarseBlocks == 0,
                           last ? sums : nullptr);
        }
    }

    template <class Of, int R>
    inline __attribute__((always_inline)) void add_few(const uint8_t* data, const uint8_t* stored,
                                                       const float (&supers)[2][kPanel], int64_t at, int64_t token,
                                                       Fetch& fetched, Sums* totals, bool fresh, Sums* coarse) const {
        const IntegerLayout of = layout;  // a copy, which stores cannot alias
        const Int8Rows from = rows;
        const uint8_t* lines = data + of.header;
        const uint8_t* x = reinterpret_cast<const uint8_t*>(from.block(token, at));
        constexpr bool zeros = Of::kOffset == kZero || Of::kOffset == kFraction;
        Fetch prefetch = fetched;  // in registers
        f32x16 before[2][R][kVectors];  // products of the first half groups, with groups of 16
        unrolled<kHalves>([&](auto index_of_half) __attribute__((always_inline)) {
            constexpr int half = index_of_half;
            i32x16 sum[2][R][kVectors];
            unrolled<2>([&](auto group) __attribute__((always_inline)) {
                for_sums<R, kVectors>([&](int r, int v) {
                    const int32_t first = from.first[((2 * at + group) * kHalves + half) * from.count + token + r];
                    sum[group][r][v] = set_i32(zeros ? 0 : first);
                });
            });
            const auto add = [&](auto step, const uint8_t* of_step, const uint8_t* x_of_step)
                                 __attribute__((always_inline)) {
                if (!kTouches) prefetch.steps(2);
                i32x16 weight[2][kVectors];
                if constexpr (Bits < 8) {
#pragma GCC unroll 4
                    for (int v = 0; v < kVectors; v++)
                        Values<Bits>::template pair<step>(of_step + 64 * v, weight[0][v], weight[1][v]);
                }
                for_sums<2, R>([&](int group, int r) __attribute__((always_inline)) {
                    int32_t bits;
                    std::memcpy(&bits, x_of_step + kColumns * r + 32 * group + 4 * step, 4);
#pragma GCC unroll 4
                    for (int v = 0; v < kVectors; v++) {
                        if (Bits == 8 && r == 0)
                            weight[group][v] = Values<8>::template step<step>(of_step + 64 * v, group, zero_i32());
                        sum[group][r][v] = dot_u8_i8(sum[group][r][v], weight[group][v], set_i32(bits));
                    }
                });
            };
            if constexpr (Bits == 5) {
                unrolled<8 / kHalves>([&](auto index) __attribute__((always_inline)) {
                    add(std::integral_constant<int, 8 / kHalves * half + index>(), lines, x);
                });
            } else {
                constexpr int turns = Bits == 6 && !Halves ? 2 : 1, count = 8 / kHalves / turns;
                unrolled<turns>([&](auto turn) __attribute__((always_inline)) {
                    constexpr int step = 8 / kHalves * half + turn * count;
#pragma GCC unroll 1
                    for (int64_t i = 0; i < count; i++)
                        add(std::integral_constant<int, step>(), lines + (Bits == 8 ? 2 : 1) * i * kLine, x + 4 * i);
                });
            }
            if (half < kHalves - 1) {
                for_sums<2 * R, kVectors>([&](int i, int v) { before[i / R][i % R][v] = to_f32(sum[i / R][i % R][v]); });
                return;
            }
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; v++) {
                f32x16 total[R], scale;
#pragma GCC unroll 2
                for (int r = 0; r < R; r++) total[r] = fresh ? zero_f32() : load_f32(totals[r].lane[v]);
#pragma GCC unroll 4
                for (int part = 0; part < 2 * kHalves; part++) {
                    const int group = part / kHalves, of_half = part % kHalves;
                    const int64_t place = part * of.groups / kGroups * kPanel;
                    scale = of.scales_of<Of>(stored + place * of.scale_bytes, supers, v);
                    const f32x16 taken = of.offsets_of<Of>(
                        stored + kPanel * std_max(of.groups, 1) * of.scale_bytes + place * of.offset_bytes, supers, v);
#pragma GCC unroll 2
                    for (int r = 0; r < R; r++) {
                        const int64_t index = 2 * at + group, row = token + r;
                        const f32x16 x_sum = set_f32(from.sums[(index * kHalves + of_half) * from.count + row]);
                        const f32x16 x_scale = set_f32(from.scales[index * from.count + row]);
                        f32x16 value = of_half < half ? before[group][r][v] : to_f32(sum[group][r][v]);
                        if (zeros) value = fnma(taken, x_sum, value);  // exact
                        if (of.coarse == kCoarseActivations) {
                            total[r] = fma(value, scale, total[r]);
                            if (Of::kOffset == kMinimum) total[r] = fnma(taken, x_sum, total[r]);
                            continue;
                        }
                        if (of.coarse == kFine) value = mul(value, scale);
                        if (Of::kOffset == kMinimum) value = fnma(taken, x_sum, value);
                        total[r] = fma(value, x_scale, total[r]);
                    }
                }
#pragma GCC unroll 2
                for (int r = 0; r < R; r++) {
                    if (!coarse) {
                        store_f32(totals[r].lane[v], total[r]);
                        continue;
                    }
                    if (of.coarse == kCoarseActivations) scale = set_f32(from.scales[2 * at * from.count + token + r]);
                    store_f32(coarse[r].lane[v], fma(total[r], scale, load_f32(coarse[r].lane[v])));
                }
            }
        });
        fetched = prefetch;
    }

    // Whether unpacked bytes have the zero point subtracted: if sums of byte products cannot saturate.
    bool takes_zeros() const { return kDotsBytes && has_zeros(); }
    bool has_zeros() const { return layout.offset == kZero || layout.offset == kFraction; }

    // Whether packed values have it subtracted when they are multiplied.
    bool takes_fractions() const { return kDotsBytes && layout.offset == kFraction; }

    // A block's scales and offsets, [kGroups][64 rows]. Taken: offsets are what is added to bytes to subtract their zero
    // points; otherwise zero points are relative to kOpenedCentre, which `QuantizedRows::first` subtracts. Not inlined: copies
    // of this would be two thirds of the code of `accumulate`.
    __attribute__((noinline)) void read(const uint8_t* data, int64_t at, bool taken, float* scales,
                                        float* offsets) const {
        if (taken) return layout.read_units<kGroups>(data, at, scales, offsets);
        layout.read<kGroups>(data, at, scales, offsets);
        for (int i = 0; has_zeros() && i < kGroups * kPanel; i += kLanes)
            store_f32(offsets + i, sub(load_f32(offsets + i), set_f32(kOpenedCentre)));
    }

    // Unpack a vector's lines to bytes, with the offsets that `read` returned.
    void open_lines(const uint8_t* packed, const float* offsets, uint8_t* lines) const {
#if defined(PENSTOCK_SIGNS_BYTES)
        if constexpr (kSigned) return open_signed(packed, lines);
#endif
        const auto open = [&](const auto& bytes) __attribute__((always_inline)) {
            unrolled<16>([&](auto index) __attribute__((always_inline)) {
                constexpr int group = index / 8, of_offsets = index * kGroups / 16;
                const i32x16 added = load_i32(offsets + of_offsets * kPanel);
                store_i32(lines + index * 64, bytes(std::integral_constant<int, index % 8>(), group, added));
            });
        };
        const auto step = [&](auto step, int group) __attribute__((always_inline)) {
            return Values<Bits>::template step<step>(packed, group, set_i32(4 * group));
        };
#if defined(PENSTOCK_TILES)
        if constexpr (!Halves) {  // signed bytes, unless their scales have minima
            const auto zero = [](int64_t value) { return set_i32(static_cast<int32_t>(value * 0x01010101)); };
            if (takes_fractions())
                return open([&](auto step, int group, i32x16 added) __attribute__((always_inline)) {
                    return sub_i8(Values<Bits>::template fractions<step>(packed, group, added), zero(kOpenedCentre));
                });
            if (takes_zeros())
                return open([&](auto at, int group, i32x16 added) __attribute__((always_inline)) {
                    return sub_i8(add(step(at, group), added), zero(kOpenedCentre));
                });
            if (layout.offset == kCentre)
                return open([&](auto at, int group, i32x16) __attribute__((always_inline)) {
                    return sub_i8(step(at, group), zero(layout.centre));
                });
        }
#endif
        if (takes_fractions())
            return open([&](auto step, int group, i32x16 added) __attribute__((always_inline)) {
                return Values<Bits>::template fractions<step>(packed, group, added);
            });
        if (takes_zeros())
            return open([&](auto at, int group, i32x16 added) __attribute__((always_inline)) {
                return add(step(at, group), added);
            });
        open([&](auto at, int group, i32x16) __attribute__((always_inline)) { return step(at, group); });
    }

#if defined(PENSTOCK_SIGNS_BYTES)
    // Unpack a vector's bytes to magnitudes, signs, and the sums of the magnitudes of the negative ones.
    static void open_signed(const uint8_t* packed, uint8_t* lines) {
        constexpr int steps = kSteps / kGroups;
        unrolled<kGroups>([&](auto part) __attribute__((always_inline)) {
            i32x16 negative = zero_i32();  // minus the magnitudes, in int16: at most 2 * 128 a step
            unrolled<steps>([&](auto index) __attribute__((always_inline)) {
                constexpr int at = part * steps + index;
                const auto [size, sign] = signed_bytes(Values<8>::template step<at % 8>(packed, at / 8, zero_i32()));
                const i32x16 bits = negative_i8(sign);
                store_i32(lines + 64 * at, size), store_i32(lines + kOpenedBytes + 64 * at, bits);
                negative = add_i16(negative, pairs_u8_i8(size, bits));
            });
            store_i32(lines + 2 * kOpenedBytes + 64 * part, sub(zero_i32(), add_pairs_i16(zero_i32(), negative)));
        });
    }
#endif
};

}  // namespace
}  // namespace PENSTOCK_ISA
}  // namespace penstock
