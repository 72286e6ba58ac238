// y = x Wᵀ + b with packed weights; `linear_kinds.h` draws their layouts.
//
// Every element of y is computed in an order that depends on the columns alone: integers are exact in any order, and
// float32 sums run from the first block to the last. So a row of y does not depend on the other rows of x, on how
// many there are, or on the number of threads.
#include "linear_kinds.h"
#if defined(PENSTOCK_TILES)
#include "linear_tiles.h"
#endif
#include "ops.h"
#include "rows.h"
#include "simd.h"
#include "threads.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

inline f32x16 silu(f32x16 x) { return div(x, add(set_f32(1.0f), exp(sub(zero_f32(), x)))); }

// The sums of one token and panel -> y.
inline void finish(const LinearArgs& args, int64_t token, int64_t panel, f32x16 left, f32x16 right) {
    const Weight& weight = *args.weight;
    if (weight.row_scales) {
        left = mul(left, load_f32(weight.row_scales + panel * kPanel));
        right = mul(right, load_f32(weight.row_scales + panel * kPanel + kLanes));
    }
    if (weight.gated) {
        const int64_t width = weight.rows / 2, first = panel * kLanes;
        if (args.bias) {
            left = add(left, load_some(args.bias + first, width - first));
            right = add(right, load_some(args.bias + width + first, width - first));
        }
        return write_row(args.y, args.y_dtype, token * args.y_stride + first, width - first, mul(silu(left), right));
    }
    const int64_t first = panel * kPanel, count = weight.rows - first;
    if (args.bias) {
        left = add(left, load_some(args.bias + first, count));
        right = add(right, load_some(args.bias + first + kLanes, count - kLanes));
    }
    write_row(args.y, args.y_dtype, token * args.y_stride + first, count, left);
    write_row(args.y, args.y_dtype, token * args.y_stride + first + kLanes, count - kLanes, right);
}

template <class Kind, int R>
void panel_of(const Kind& kind, int rows, const uint8_t* blocks, int64_t count, int64_t token, const Prefetch& prefetch,
              Sums* sums) {
    if constexpr (R > kMaxRows) {  // tiles take any number
        kind.panel(rows, blocks, count, token, prefetch, sums);
    } else if constexpr (R == 0) {
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
    const int groups = static_cast<int>((end - begin + Kind::kRows - 1) / Kind::kRows);
    constexpr int lines = Kind::kBytes / 64;
    for (int64_t panel = first; panel < last; panel++) {
        const uint8_t* data = args.weight->data + panel * panel_bytes;
        for (int group = 0; group < groups; group++) {
            const int64_t token = begin + (end - begin) * group / groups;
            const int rows = static_cast<int>(begin + (end - begin) * (group + 1) / groups - token);
            // Alone, a group fetches just ahead of itself; many together fetch the next panel, a share each.
            const int skip = lines * group / groups;
            const int share = lines * (group + 1) / groups - skip;
            const Prefetch prefetch = groups == 1 ? Prefetch{data + kPrefetchBytes, lines, true}
                                                  : Prefetch{data + panel_bytes + 64 * skip, share, false};
            Sums sums[Kind::kRows];
            panel_of<Kind, Kind::kRows>(kind, rows, data, blocks, token, prefetch, sums);
            for (int r = 0; r < rows; r++) finish(args, token + r, panel, sums[r].half[0], sums[r].half[1]);
        }
    }
}

}  // namespace

int64_t weight_bytes(const Weight& weight) {
    const auto blocks = [&](int64_t columns) { return (weight.columns + columns - 1) / columns; };
    switch (weight.kind) {
        case kWeightFloat32: return num_panels(weight) * weight.columns * Float32::kBytes;
        case kWeightBlock16: return num_panels(weight) * blocks(Block16::kColumns) * Block16::kBytes;
        case kWeightBFloat16: return num_panels(weight) * blocks(BFloat16::kColumns) * BFloat16::kBytes;
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
    const int64_t chunk = std_max(Kind::kRows, kChunkBytes / Kind::bytes_per_token(weight.columns) / Kind::kRows * Kind::kRows);
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
    } else if (weight.kind == kWeightBFloat16) {
        uint8_t* panel = weight.data + place.panel * ((columns + 31) / 32) * BFloat16::kBytes;
        for (int64_t k = 0; k < columns; k += kLanes) {
            uint16_t values[kLanes];
            store_bf16(values, row.at(k));
            for (int i = 0; i < kLanes; i += 2) std::memcpy(element(panel, (k + i) / 2, place.lane), values + i, 4);
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

// Of float32, columns that are unpacked at a time.
int64_t columns_of_block(const Weight& weight) {
    switch (weight.kind) {
        case kWeightFloat32: return kLanes;
        case kWeightBFloat16: return BFloat16::kColumns;
        case kWeightInt4: return Int4::kColumns;
        default: return 64;
    }
}

void unpack_row(const Weight& weight, int64_t row, void* y, int32_t dtype, int64_t offset) {
    const Place place = place_of(weight, row);
    const int64_t columns = weight.columns;
    const int64_t width = columns_of_block(weight), blocks = (columns + width - 1) / width;
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
        } else if (weight.kind == kWeightBFloat16) {
            uint8_t* block = weight.data + (place.panel * blocks + b) * BFloat16::kBytes;
            for (int k = 0; k < width; k++) values[k] = value_of(element(block, k / 2, place.lane), kBFloat16, k % 2);
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
        case kWeightBFloat16: return tokens * BFloat16::bytes_per_token(weight.columns);
        case kWeightInt8: return tokens * Int8::bytes_per_token(weight.columns);
        default: return tokens * Int4::bytes_per_token(weight.columns);
    }
}

void linear(const LinearArgs& args) {
    switch (args.weight->kind) {
        case kWeightFloat32: return run<Float32>(args);
        case kWeightBlock16: return run<Block16>(args);
#if defined(PENSTOCK_TILES)
        case kWeightBFloat16: return run<TiledBFloat16>(args);
        case kWeightInt8: return run<TiledInt8>(args);
        default: return run<TiledInt4>(args);
#else
        case kWeightInt8: return run<Int8>(args);
        default: return run<Int4>(args);
#endif
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
