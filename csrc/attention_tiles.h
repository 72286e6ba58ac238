// The products of attention by AMX tiles: of queries with keys and of attention weights with values, for caches whose
// elements are exact in bfloat16. Up to 32 rows are multiplied at a time. Any number of rows, and any other rows, give a
// row the same bits: a score sums the elements of the head in order, 32 of bfloat16 or 64 bytes at a time, and weighted values
// are summed in groups of 32 tokens at fixed positions; a token that a group lacks adds zeros.
#pragma once

#include <cstring>

#include "kv_layout.h"
#include "latents.h"
#include "prefetch.h"
#include "tiles.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

struct InTiles {
    using Registers = TilesInUse;
    static constexpr bool kTiled = true, kRounded = false;       // the factors' type is what rounds
    static constexpr int kRows = 2 * kTile, kTokens = 2 * kTile;  // whose weighted values a tile sums
};

// Keys or values in bfloat16.
struct TiledPairs : InTiles {
    using Factor = uint16_t;
    static constexpr bool kIntegerSums = false;
};

// int8 keys, with queries rounded to int8. Sums are integers and include the products of the keys' bias.
struct TiledIntegers : InTiles {
    using Factor = int8_t;
    static constexpr bool kIntegerSums = true;
};

// Pairs of tiles with so many columns.
inline int64_t num_pairs_of_tiles(int64_t columns) { return (columns + 2 * kTile - 1) / (2 * kTile); }

// Calls body(first, tiles) for pairs of tiles, and at last one tile if it is enough; `tiles` is a compile-time constant.
template <class Body>
inline void for_columns(int64_t columns, const Body& body) {
    int64_t i = 0;
    for (; i + kTile < columns; i += 2 * kTile) body(i, std::integral_constant<int, 2>());
    if (i < columns) body(i, std::integral_constant<int, 1>());
}

// c = a b for `columns` keys: `a` has 64 bytes for each tile, zeros behind the head's end; `b` has `lines` lines of 4
// bytes for each key, `b_step` bytes apart. Strides are in bytes. Whole tiles of c are written.
template <class Keys>
void multiply_keys(const Tiles& tiles, const void* a, int64_t a_stride, const uint8_t* b, int64_t b_step, int64_t lines,
                   int64_t columns, Prefetch& prefetch, float* c, int64_t c_stride) {
    for_columns(columns, [&](int64_t first, auto num_tiles) {
        constexpr int count = num_tiles;
        const uint8_t *left = static_cast<const uint8_t*>(a), *right = b + 4 * first;
        const auto add = [&](const uint8_t* lines, int64_t step) {
            if constexpr (Keys::kIntegerSums) {
                tiles.add_i8_u8<count>(left, a_stride, lines, step);
            } else {
                tiles.add_bf16<count>(left, a_stride, lines, step);
            }
        };
        tiles.zero<count>();
        int64_t line = 0;
        for (; line + kTile <= lines; line += kTile, left += kTileBytes, right += kTile * b_step) {
            prefetch.steps(1);
            add(right, b_step);
        }
        if (line < lines) {  // a tile of the last lines, and zeros
            alignas(64) uint8_t rest[kTile][2 * kTileBytes] = {};
            for (int i = 0; i < lines - line; i++) std::memcpy(rest[i], right + i * b_step, count * kTileBytes);
            add(rest[0], sizeof rest[0]);
        }
        tiles.store<count>(c + first, c_stride);
    });
}

// Values of a sequence's head as tiles take them, in groups of 32 tokens: 16 lines of pairs for each.
template <class Kind>
class TiledValues {
  public:
    static constexpr int kTokens = InTiles::kTokens;  // of a group
    static constexpr int kTogether = 4;               // groups, as many as `memory` has room for

    static int64_t line_bytes(int64_t head_dim) { return num_pairs_of_tiles(head_dim) * 2 * kTile * 4; }
    static int64_t memory_floats(int64_t head_dim) { return kTogether * kTile * line_bytes(head_dim) / 4; }

    struct Group {
        const uint8_t* lines;
        int64_t step;       // bytes from line to line
        Prefetch prefetch;  // of later values
    };

    TiledValues(const Blocks<Kind>& blocks, const int32_t* table, int64_t head, uint8_t* latents, uint8_t* memory)
        : blocks_(blocks), table_(table), head_(head), line_(line_bytes(blocks.head_dim)), latents_(latents),
          memory_(memory) {}

    // The tokens of a group from `begin` on, up to `end`; other tokens of the group are zeros. `index` is the group's
    // among those used together. While it is multiplied, `bytes` from `next` on are prefetched.
    Group group(int64_t begin, int64_t end, int index, const uint8_t* next, int64_t bytes) const {
        const Prefetch prefetch(next, bytes, num_pairs_of_tiles(blocks_.head_dim), true);
        const int64_t size = blocks_.block_size, first = begin / kTokens * kTokens;
        const bool whole = end - begin == kTokens;
        if (whole && Kind::kValueGroup == 2 && !blocks_.latent() && begin / size == (end - 1) / size)
            return {values(begin), blocks_.head_dim * 4, prefetch};
        uint8_t* to = memory_ + index * kTile * line_;
        if (!whole) std::memset(to, 0, static_cast<size_t>(kTile * line_));
        for (int64_t token = begin, count; token < end; token += count) {
            count = std_min(size - token % size, end - token);
            lay_out(token, count, to + (token - first) / 2 * line_);
        }
        return {to, line_, prefetch};
    }

  private:
    const uint8_t* values(int64_t token) const {
        return blocks_.values(table_[token / blocks_.block_size], head_) +
               token % blocks_.block_size * blocks_.head_dim * Kind::kSize;
    }

    // Lays out `count` tokens of a block from an even one on.
    void lay_out(int64_t token, int64_t count, uint8_t* to) const {
        const int64_t size = blocks_.block_size;
        const auto from_latents = [&](uint8_t* memory) {
            const LatentValues<Kind> latents(blocks_, memory);
            latents.lay_out(table_[token / size], head_, token % size, count);
            return latents.step();
        };
        if constexpr (Kind::kValueGroup == 2) {
            if (blocks_.latent()) return static_cast<void>(from_latents(to));  // in lines as long
            const uint8_t* from = values(token);
            for (int64_t i = 0; i < count; i += 2, from += blocks_.head_dim * 4, to += line_)
                std::memcpy(to, from, static_cast<size_t>(blocks_.head_dim * 4));
        } else {
            const int64_t row = blocks_.latent() ? from_latents(latents_) : blocks_.head_dim * Kind::kSize;
            const uint8_t* from = blocks_.latent() ? latents_ : values(token);
            for (int64_t i = 0; i < count; i += 2, from += 2 * row, to += line_)
                for (int64_t at = 0; at < blocks_.head_dim; at += kLanes)
                    store_i32(to + 4 * at, Kind::load_pairs(from + at * Kind::kSize, row));
        }
    }

    const Blocks<Kind>& blocks_;
    const int32_t* table_;
    const int64_t head_, line_;
    uint8_t *latents_, *memory_;
};

// c = a b, or c += a b: `a` [tokens] of bfloat16 for each row, zeros for tokens that the groups lack. Strides are in bytes.
template <class Group>
void multiply_values(const Tiles& tiles, const uint16_t* a, int64_t a_stride, Group* groups, int count,
                     int64_t columns, bool fresh, float* c, int64_t c_stride) {
    for_columns(columns, [&](int64_t first, auto num_tiles) {
        if (fresh) {
            tiles.zero<num_tiles>();
        } else {
            tiles.load<num_tiles>(c + first, c_stride);
        }
        for (int i = 0; i < count; i++) {
            groups[i].prefetch.steps(1);
            tiles.add_bf16<num_tiles>(a + i * 2 * kTile, a_stride, groups[i].lines + 4 * first, groups[i].step);
        }
        tiles.store<num_tiles>(c + first, c_stride);
    });
}

}  // namespace
}  // namespace PENSTOCK_ISA
}  // namespace penstock
