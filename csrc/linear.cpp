// y = x Wᵀ + b with packed weights.
//
// A weight is cut into panels of 32 rows, and a panel into blocks along its columns; blocks of a panel follow one
// another, so that a thread reads its panels as one stream. One vector holds 16 rows:
//
//   float32   block = 1 column             [2 halves][16 rows] float32
//   block16   block = 64 columns           [32 rows] scales (bfloat16), then
//                                          [32 pairs of columns][2 halves][16 rows][2 columns] int16
//   int8      block = 64 columns           [16 quads of columns][2 halves][16 rows][4 columns] uint8, value + 128
//   int4      block = 128 columns          [32 rows] scales (float16), [32 rows] zeros (uint8), 32 bytes unused, then
//                                          [16][2 halves][16 rows][4] bytes: low nibbles are the columns 4 q to 4 q + 3,
//                                          high nibbles those 64 further on
//
// A gated weight has 16 rows of the gate in the first halves of its panels and their 16 rows of `up` in the second.
//
// block16 is how bfloat16 weights meet the integer units of machines without bfloat16 arithmetic, at twice the rate of
// float32: 64 neighbours share the exponent of their largest, whose magnitude takes 13 bits for weights and 12 bits
// for activations; 64 products of them fit an int32. A bfloat16 (8 bits) within 2⁻⁵ of its block's largest weight, or
// within 2⁻⁴ of the largest activation, is held exactly; what is smaller is rounded at 2⁻¹³ or 2⁻¹² of the largest.
//
// Every element of y is computed in an order that depends on the columns alone: integers are exact in any order, and
// float32 sums run from the first block to the last. So a row of y does not depend on the other rows of x, on how
// many there are, or on the number of threads.
#include "ops.h"
#include "rows.h"
#include "simd.h"
#include "threads.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

constexpr int kPanel = 32;
#if defined(__AVX512F__)
constexpr int kMaxRows = 12;  // of x that one pass over a panel serves: their sums fill the registers
#else
constexpr int kMaxRows = 2;
#endif
constexpr int64_t kChunkBytes = 512 << 10;  // of activations that stay in a core's cache while panels pass
constexpr int kPrefetchBytes = 2048;

struct Prefetch {
    const uint8_t* next;  // what to fetch while the first block is computed; later blocks fetch what follows
    int lines;            // of 64 bytes, a block
};

inline void fetch(const Prefetch& prefetch, int64_t offset) {
    for (int i = 0; i < prefetch.lines; i++)
        _mm_prefetch(reinterpret_cast<const char*>(prefetch.next + offset + 64 * i), _MM_HINT_T1);
}

inline i32x16 repeat_32_bits(const void* p) {
    int32_t bits;
    std::memcpy(&bits, p, 4);
    return set_i32(bits);
}

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

struct Sums {
    f32x16 half[2];
};

struct Float32 {
    static constexpr int kColumns = 1, kBytes = 128;
    const float* x;
    int64_t stride;

    static int64_t bytes_per_token(int64_t columns) { return 4 * columns; }
    Float32(uint8_t* scratch, int64_t, int64_t columns) : x(reinterpret_cast<float*>(scratch)), stride(columns) {}

    void prepare(const Row& row, int64_t token) const {
        float* target = const_cast<float*>(x) + token * stride;
        for (int64_t i = 0; i < stride; i += kLanes) row.store_f32_at(target, i, row.at(i));
    }

    template <int R>
    void panel(const uint8_t* blocks, int64_t count, int64_t token, const Prefetch& prefetch, Sums* sums) const {
        f32x16 sum[R][2];
        for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = zero_f32();
        const float* row = x + token * stride;
        for (int64_t k = 0; k < count; k++) {
            fetch(prefetch, k * kBytes);
            const float* w = reinterpret_cast<const float*>(blocks + k * kBytes);
            f32x16 first = load_f32(w), second = load_f32(w + 16);
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                f32x16 value = set_f32(row[r * stride + k]);
                sum[r][0] = fma(value, first, sum[r][0]);
                sum[r][1] = fma(value, second, sum[r][1]);
            }
        }
        for (int r = 0; r < R; r++) sums[r] = {{sum[r][0], sum[r][1]}};
    }
};

struct Block16 {
    static constexpr int kColumns = 64, kHeader = 64, kBytes = kHeader + 4096;
    static constexpr int kBits = 12;  // of an activation's magnitude
    const int16_t* x;                 // [tokens][blocks][64]
    const float* scales;              // [tokens][blocks]
    int64_t blocks;

    static int64_t bytes_per_token(int64_t columns) {
        return round_up(columns, kColumns) * 2 + round_up(columns, kColumns) / kColumns * 4;
    }
    Block16(uint8_t* scratch, int64_t tokens, int64_t columns)
        : x(reinterpret_cast<int16_t*>(scratch)), blocks(round_up(columns, kColumns) / kColumns) {
        scales = reinterpret_cast<const float*>(x + tokens * blocks * kColumns);
    }

    void prepare(const Row& row, int64_t token) const {
        int16_t* target = const_cast<int16_t*>(x) + token * blocks * kColumns;
        float* scale = const_cast<float*>(scales) + token * blocks;
        float poison = row.zero_or_nan();
        for (int64_t b = 0; b < blocks; b++, target += kColumns)
            scale[b] = share_exponent(row, b * kColumns, kBits, 4095, target) + poison;
    }

    template <int R>
    void panel(const uint8_t* block, int64_t count, int64_t token, const Prefetch& prefetch, Sums* sums) const {
        for (int r = 0; r < R; r++) sums[r] = {{zero_f32(), zero_f32()}};
        const int16_t* row = x + token * count * kColumns;
        const float* row_scale = scales + token * count;
        const int64_t stride = count * kColumns;
        for (int64_t b = 0; b < count; b++, block += kBytes, row += kColumns) {
            fetch(prefetch, b * kBytes);
            i32x16 sum[R][2];
            for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = zero_i32();
            const uint8_t* w = block + kHeader;
            for (int pair = 0; pair < kColumns / 2; pair++, w += 128) {
                i32x16 first = load_i32(w), second = load_i32(w + 64);
#pragma GCC unroll 12
                for (int r = 0; r < R; r++) {
                    i32x16 value = repeat_32_bits(row + r * stride + 2 * pair);
                    sum[r][0] = dot_i16(sum[r][0], value, first);
                    sum[r][1] = dot_i16(sum[r][1], value, second);
                }
            }
            f32x16 first = load_bf16(block), second = load_bf16(block + 32);
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                f32x16 scale = set_f32(row_scale[r * count + b]);
                sums[r].half[0] = fma(to_f32(sum[r][0]), mul(first, scale), sums[r].half[0]);
                sums[r].half[1] = fma(to_f32(sum[r][1]), mul(second, scale), sums[r].half[1]);
            }
        }
    }
};

struct Int8 {
    static constexpr int kColumns = 64, kBytes = 2048;
    const int8_t* x;        // [tokens][blocks * 64]
    const float* scales;    // [tokens]
    const int32_t* offset;  // [tokens]: what the weights' offset of 128 adds to a sum, negated
    int64_t stride;

    static int64_t bytes_per_token(int64_t columns) { return round_up(columns, kColumns) + 8; }
    Int8(uint8_t* scratch, int64_t tokens, int64_t columns)
        : x(reinterpret_cast<int8_t*>(scratch)), stride(round_up(columns, kColumns)) {
        scales = reinterpret_cast<const float*>(x + tokens * stride);
        offset = reinterpret_cast<const int32_t*>(scales + tokens);
    }

    void prepare(const Row& row, int64_t token) const {
        int32_t sum;
        float scale = to_int8(row, 0, stride, const_cast<int8_t*>(x) + token * stride, &sum);
        const_cast<float*>(scales)[token] = scale + row.zero_or_nan();
        const_cast<int32_t*>(offset)[token] = -128 * sum;
    }

    template <int R>
    void panel(const uint8_t* block, int64_t count, int64_t token, const Prefetch& prefetch, Sums* sums) const {
        i32x16 sum[R][2];
        for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = set_i32(offset[token + r]);
        const int8_t* row = x + token * stride;
        for (int64_t b = 0; b < count; b++, block += kBytes, row += kColumns) {
            fetch(prefetch, b * kBytes);
            const uint8_t* w = block;
            for (int quad = 0; quad < kColumns / 4; quad++, w += 128) {
                i32x16 first = load_i32(w), second = load_i32(w + 64);
#pragma GCC unroll 12
                for (int r = 0; r < R; r++) {
                    i32x16 value = repeat_32_bits(row + r * stride + 4 * quad);
                    sum[r][0] = dot_u8_i8(sum[r][0], first, value);
                    sum[r][1] = dot_u8_i8(sum[r][1], second, value);
                }
            }
        }
        for (int r = 0; r < R; r++) {
            f32x16 scale = set_f32(scales[token + r]);
            sums[r] = {{mul(to_f32(sum[r][0]), scale), mul(to_f32(sum[r][1]), scale)}};
        }
    }
};

struct Int4 {
    static constexpr int kColumns = 128, kHeader = 128, kZeros = 64, kBytes = kHeader + 2048;
    const int8_t* x;      // [tokens][blocks][128]
    const float* scales;  // [tokens][blocks]
    const float* totals;  // [tokens][blocks]: the sum of a block's integers
    int64_t blocks;

    static int64_t bytes_per_token(int64_t columns) {
        return round_up(columns, kColumns) + round_up(columns, kColumns) / kColumns * 8;
    }
    Int4(uint8_t* scratch, int64_t tokens, int64_t columns)
        : x(reinterpret_cast<int8_t*>(scratch)), blocks(round_up(columns, kColumns) / kColumns) {
        scales = reinterpret_cast<const float*>(x + tokens * blocks * kColumns);
        totals = scales + tokens * blocks;
    }

    void prepare(const Row& row, int64_t token) const {
        int8_t* target = const_cast<int8_t*>(x) + token * blocks * kColumns;
        float poison = row.zero_or_nan();
        for (int64_t b = 0; b < blocks; b++, target += kColumns) {
            int32_t sum;
            float scale = to_int8(row, b * kColumns, kColumns, target, &sum);
            const_cast<float*>(scales)[token * blocks + b] = scale + poison;
            const_cast<float*>(totals)[token * blocks + b] = static_cast<float>(sum);
        }
    }

    template <int R>
    void panel(const uint8_t* block, int64_t count, int64_t token, const Prefetch& prefetch, Sums* sums) const {
        for (int r = 0; r < R; r++) sums[r] = {{zero_f32(), zero_f32()}};
        const int8_t* row = x + token * count * kColumns;
        const int64_t stride = count * kColumns;
        const i32x16 low = set_i32(0x0f0f0f0f);
        for (int64_t b = 0; b < count; b++, block += kBytes, row += kColumns) {
            fetch(prefetch, b * kBytes);
            i32x16 sum[R][2];
            for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = zero_i32();
            const uint8_t* w = block + kHeader;
            for (int quad = 0; quad < kColumns / 8; quad++, w += 128) {
                i32x16 first = load_i32(w), second = load_i32(w + 64);
                i32x16 first_low = bit_and(first, low), second_low = bit_and(second, low);
                i32x16 first_high = bit_and(shift_right<4>(first), low);
                i32x16 second_high = bit_and(shift_right<4>(second), low);
#pragma GCC unroll 12
                for (int r = 0; r < R; r++) {
                    i32x16 near = repeat_32_bits(row + r * stride + 4 * quad);
                    i32x16 far = repeat_32_bits(row + r * stride + 4 * quad + 64);
                    sum[r][0] = dot_u8_i8(dot_u8_i8(sum[r][0], first_low, near), first_high, far);
                    sum[r][1] = dot_u8_i8(dot_u8_i8(sum[r][1], second_low, near), second_high, far);
                }
            }
            f32x16 first = load_f16(block), second = load_f16(block + 32);
            f32x16 first_zero = to_f32(widen_u8(block + kZeros)), second_zero = to_f32(widen_u8(block + kZeros + 16));
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                int64_t at = (token + r) * count + b;
                f32x16 scale = set_f32(scales[at]), total = set_f32(totals[at]);
                // Below 2^24, so exact in float32: the sum less what the zeros add to it.
                f32x16 left = fnma(first_zero, total, to_f32(sum[r][0]));
                f32x16 right = fnma(second_zero, total, to_f32(sum[r][1]));
                sums[r].half[0] = fma(left, mul(first, scale), sums[r].half[0]);
                sums[r].half[1] = fma(right, mul(second, scale), sums[r].half[1]);
            }
        }
    }
};

inline f32x16 silu(f32x16 x) { return div(x, add(set_f32(1.0f), exp(sub(zero_f32(), x)))); }

// The sums of one token and panel -> y.
void finish(const LinearArgs& args, int64_t token, int64_t panel, Sums sums) {
    const Weight& weight = *args.weight;
    if (weight.row_scales)
        for (int h = 0; h < 2; h++)
            sums.half[h] = mul(sums.half[h], load_f32(weight.row_scales + panel * kPanel + h * kLanes));
    if (weight.gated) {
        const int64_t width = weight.rows / 2, first = panel * kLanes;
        if (args.bias)
            for (int h = 0; h < 2; h++)
                sums.half[h] = add(sums.half[h], load_some(args.bias + h * width + first, width - first));
        write_row(args.y, args.y_dtype, token * args.y_stride + first, width - first, mul(silu(sums.half[0]), sums.half[1]));
        return;
    }
    for (int h = 0; h < 2; h++) {
        const int64_t first = panel * kPanel + h * kLanes;
        if (first >= weight.rows) return;
        if (args.bias) sums.half[h] = add(sums.half[h], load_some(args.bias + first, weight.rows - first));
        write_row(args.y, args.y_dtype, token * args.y_stride + first, weight.rows - first, sums.half[h]);
    }
}

template <class Kind, int R>
void panel_of(const Kind& kind, int rows, const uint8_t* blocks, int64_t count, int64_t token, const Prefetch& prefetch,
              Sums* sums) {
    if constexpr (R == 0) {
        (void)rows;
    } else if (rows == R) {
        kind.template panel<R>(blocks, count, token, prefetch, sums);
    } else {
        panel_of<Kind, R - 1>(kind, rows, blocks, count, token, prefetch, sums);
    }
}

int64_t num_panels(const Weight& weight) {
    return weight.gated ? (weight.rows / 2 + kLanes - 1) / kLanes : (weight.rows + kPanel - 1) / kPanel;
}

// Tokens `begin` to `end` against panels `first` to `last`.
template <class Kind>
void multiply(const LinearArgs& args, const Kind& kind, int64_t begin, int64_t end, int64_t first, int64_t last) {
    const int64_t blocks = (args.weight->columns + Kind::kColumns - 1) / Kind::kColumns;
    const int64_t panel_bytes = blocks * Kind::kBytes;
    const int groups = static_cast<int>((end - begin + kMaxRows - 1) / kMaxRows);
    constexpr int lines = Kind::kBytes / 64;
    for (int64_t panel = first; panel < last; panel++) {
        const uint8_t* data = args.weight->data + panel * panel_bytes;
        for (int group = 0; group < groups; group++) {
            const int64_t token = begin + (end - begin) * group / groups;
            const int rows = static_cast<int>(begin + (end - begin) * (group + 1) / groups - token);
            // Alone, a group fetches just ahead of itself; many together fetch the next panel, a share each.
            const int skip = lines * group / groups;
            Prefetch prefetch = groups == 1 ? Prefetch{data + kPrefetchBytes, lines}
                                            : Prefetch{data + panel_bytes + 64 * skip, lines * (group + 1) / groups - skip};
            Sums sums[kMaxRows];
            panel_of<Kind, kMaxRows>(kind, rows, data, blocks, token, prefetch, sums);
            for (int r = 0; r < rows; r++) finish(args, token + r, panel, sums[r]);
        }
    }
}

}  // namespace

int64_t weight_bytes(const Weight& weight) {
    const auto blocks = [&](int64_t columns) { return (weight.columns + columns - 1) / columns; };
    switch (weight.kind) {
        case kWeightFloat32: return num_panels(weight) * weight.columns * Float32::kBytes;
        case kWeightBlock16: return num_panels(weight) * blocks(Block16::kColumns) * Block16::kBytes;
        case kWeightInt8: return num_panels(weight) * blocks(Int8::kColumns) * Int8::kBytes;
        default: return num_panels(weight) * blocks(Int4::kColumns) * Int4::kBytes;
    }
}

namespace {

template <class Kind>
void run(const LinearArgs& args) {
    const Weight& weight = *args.weight;
    const Kind kind(args.scratch, args.tokens, weight.columns);
    const int64_t panels = num_panels(weight);
    const int64_t chunk = std_max(kMaxRows, kChunkBytes / Kind::bytes_per_token(weight.columns) / kMaxRows * kMaxRows);
    parallel([&](int64_t thread, int64_t threads) {
        for (int64_t token = args.tokens * thread / threads; token < args.tokens * (thread + 1) / threads; token++)
            kind.prepare(Row{args.x, args.x_dtype, token * args.x_stride, weight.columns}, token);
        barrier();
        const int64_t first = panels * thread / threads, last = panels * (thread + 1) / threads;
        for (int64_t begin = 0; begin < args.tokens; begin += chunk)
            multiply(args, kind, begin, std_min(begin + chunk, args.tokens), first, last);
    }, weight_bytes(weight) * (1 + args.tokens / 8));
}

struct Place {
    int64_t panel;
    int lane;
};

// Where a row lies.
Place place_of(const Weight& weight, int64_t row) {
    if (!weight.gated) return {row / kPanel, static_cast<int>(row % kPanel)};
    const int64_t half = row >= weight.rows / 2, at = row - half * (weight.rows / 2);
    return {at / kLanes, static_cast<int>(half * kLanes + at % kLanes)};
}

// The first byte of the group of `width` columns (1, 2 or 4) that begins at a row's group number `group`.
inline uint8_t* element(uint8_t* groups, int64_t group, int lane) { return groups + group * 128 + lane * 4; }

void pack_row(const PackArgs& args, int64_t index) {
    const Weight& weight = *args.weight;
    const Place place = place_of(weight, args.first_row + index);
    const int64_t columns = weight.columns;
    const Row row{args.source, args.source_dtype, index * columns, columns};
    const uint8_t* bytes = static_cast<const uint8_t*>(args.source) + index * columns;
    if (weight.kind == kWeightFloat32) {
        uint8_t* panel = weight.data + place.panel * columns * Float32::kBytes;
        for (int64_t k = 0; k < columns; k += kLanes) {
            float values[kLanes];
            store_f32(values, row.at(k));
            for (int64_t i = 0; i < std_min(kLanes, columns - k); i++)
                std::memcpy(element(panel, k + i, place.lane), values + i, 4);
        }
    } else if (weight.kind == kWeightBlock16) {
        const int64_t blocks = (columns + 63) / 64;
        const float poison = row.zero_or_nan();
        for (int64_t b = 0; b < blocks; b++) {
            uint8_t* block = weight.data + (place.panel * blocks + b) * Block16::kBytes;
            int16_t values[64];
            const float scale = share_exponent(row, b * 64, 13, 8190, values) + poison;
            uint32_t bits;
            std::memcpy(&bits, &scale, 4);
            const uint16_t upper = static_cast<uint16_t>(bits >> 16);
            std::memcpy(block + 2 * place.lane, &upper, 2);
            for (int pair = 0; pair < 32; pair++)
                std::memcpy(element(block + Block16::kHeader, pair, place.lane), values + 2 * pair, 4);
        }
    } else if (weight.kind == kWeightInt8) {
        const int64_t blocks = (columns + 63) / 64;
        weight.row_scales[place.panel * kPanel + place.lane] = args.scales[index];
        uint8_t* panel = weight.data + place.panel * blocks * Int8::kBytes;
        for (int64_t quad = 0; quad < blocks * 16; quad++) {
            uint8_t values[4];
            for (int i = 0; i < 4; i++)
                values[i] = static_cast<uint8_t>((4 * quad + i < columns ? bytes[4 * quad + i] : 0) + 128);
            std::memcpy(element(panel, quad, place.lane), values, 4);
        }
    } else {
        const int64_t blocks = (columns + 127) / 128;
        for (int64_t b = 0; b < blocks; b++) {
            uint8_t* block = weight.data + (place.panel * blocks + b) * Int4::kBytes;
            const uint16_t scale = _cvtss_sh(args.scales[index * blocks + b], _MM_FROUND_TO_NEAREST_INT);
            std::memcpy(block + 2 * place.lane, &scale, 2);
            block[Int4::kZeros + place.lane] = args.zeros[index * blocks + b];
            auto nibble = [&](int64_t k) { return k < columns ? bytes[k] & 15 : 0; };
            for (int quad = 0; quad < 16; quad++) {
                uint8_t values[4];
                for (int i = 0; i < 4; i++) {
                    const int64_t k = b * 128 + 4 * quad + i;
                    values[i] = static_cast<uint8_t>(nibble(k) | nibble(k + 64) << 4);
                }
                std::memcpy(element(block + Int4::kHeader, quad, place.lane), values, 4);
            }
        }
    }
}

void unpack_row(const Weight& weight, int64_t row, void* y, int32_t dtype, int64_t offset) {
    const Place place = place_of(weight, row);
    const int64_t columns = weight.columns;
    const int64_t width = weight.kind == kWeightFloat32 ? 16 : weight.kind == kWeightInt4 ? 128 : 64;
    const int64_t blocks = (columns + width - 1) / width;
    for (int64_t b = 0; b < blocks; b++) {
        float values[128] = {};
        if (weight.kind == kWeightFloat32) {
            uint8_t* panel = weight.data + place.panel * columns * Float32::kBytes;
            for (int64_t k = 0; k < std_min(width, columns - b * width); k++)
                std::memcpy(values + k, element(panel, b * width + k, place.lane), 4);
        } else if (weight.kind == kWeightBlock16) {
            uint8_t* block = weight.data + (place.panel * blocks + b) * Block16::kBytes;
            const float scale = value_of(block, kBFloat16, place.lane);
            for (int pair = 0; pair < 32; pair++) {
                int16_t both[2];
                std::memcpy(both, element(block + Block16::kHeader, pair, place.lane), 4);
                for (int i = 0; i < 2; i++) values[2 * pair + i] = static_cast<float>(both[i]) * scale;
            }
        } else if (weight.kind == kWeightInt8) {
            uint8_t* block = weight.data + (place.panel * blocks + b) * Int8::kBytes;
            const float scale = weight.row_scales[place.panel * kPanel + place.lane];
            for (int k = 0; k < 64; k++)
                values[k] = static_cast<float>(element(block, k / 4, place.lane)[k % 4] - 128) * scale;
        } else {
            uint8_t* block = weight.data + (place.panel * blocks + b) * Int4::kBytes;
            const float scale = value_of(block, kFloat16, place.lane);
            const int zero = block[Int4::kZeros + place.lane];
            for (int k = 0; k < 128; k++) {
                const int byte = element(block + Int4::kHeader, k % 64 / 4, place.lane)[k % 4];
                values[k] = static_cast<float>((k < 64 ? byte & 15 : byte >> 4) - zero) * scale;
            }
        }
        for (int64_t k = 0; k < width && b * width + k < columns; k += kLanes)
            write_row(y, dtype, offset + b * width + k, columns - b * width - k, load_f32(values + k));
    }
}

}  // namespace

int64_t linear_scratch_bytes(const Weight& weight, int64_t tokens) {
    switch (weight.kind) {
        case kWeightFloat32: return tokens * Float32::bytes_per_token(weight.columns);
        case kWeightBlock16: return tokens * Block16::bytes_per_token(weight.columns);
        case kWeightInt8: return tokens * Int8::bytes_per_token(weight.columns);
        default: return tokens * Int4::bytes_per_token(weight.columns);
    }
}

void linear(const LinearArgs& args) {
    switch (args.weight->kind) {
        case kWeightFloat32: return run<Float32>(args);
        case kWeightBlock16: return run<Block16>(args);
        case kWeightInt8: return run<Int8>(args);
        default: return run<Int4>(args);
    }
}

void pack(const PackArgs& args) {
    parallel_for(args.num_rows, [&](int64_t index) { pack_row(args, index); });
}

void unpack(const UnpackArgs& args) {
    parallel_for(args.num_rows, [&](int64_t index) {
        unpack_row(*args.weight, args.row_ids[index], args.y, args.y_dtype, index * args.weight->columns);
    });
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
