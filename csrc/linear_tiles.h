// The sums of products over a panel of weights, by tiles: bfloat16, and the integers of `linear_kinds.h`.
//
// Integers are exact in any order, and what follows them is computed as in `linear_kinds.h`: int8 and int4 give the bits
// that vectors give. The sums of bfloat16 run over 32 columns after another, in float32, whatever rows share the tiles.
#pragma once

#include "linear_kinds.h"
#include "tiles.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

constexpr int kTileRows = 2 * kTile;     // of x, and of the weight, whose sums are in tiles at a time
constexpr int kWholePanel = 1 << 30;     // blocks of a slice: sums are in tiles from the first to the last

struct TiledBFloat16 : BFloat16 {
    using BFloat16::BFloat16;
    static constexpr int kRows = kTileRows, kRowsAlone = kRows, kSlice = kWholePanel, kLongSlice = kSlice;

    void accumulate(int rows, const Slice& slice, int64_t token, Fetch& prefetch, Sums* sums) const {
        const Tiles tiles(rows);
        for (int first = 0; first < kPanel; first += kTileRows) {
            tiles.zero();
            for (int64_t b = 0; b < slice.count; b++) {
                if (first == 0) prefetch.steps(kSteps);
                tiles.add_bf16(row_at(token, b), 2 * stride, slice.data + b * kBytes + 4 * first, kLine);
            }
            tiles.store(sums->lane[first / kLanes], sizeof(Sums));
        }
    }

    static void begin(int64_t, Sums&) {}
};

struct TiledBFloat12 : BFloat12 {
    using BFloat12::BFloat12;
    static constexpr int kRows = kTileRows, kRowsAlone = kRows, kLongSlice = kSlice, kOpened = kSteps * kLine;

    void accumulate(int rows, const Slice& slice, int64_t token, Fetch& prefetch, Sums* sums) const {
        alignas(64) uint8_t bytes[kOpened];
        const uint8_t* opened = BFloat12::open(slice, bytes);
        const Tiles tiles(rows);
        for (int first = 0; first < kPanel; first += kTileRows) {
            tiles.load(sums->lane[first / kLanes], sizeof(Sums));
            for (int step = 0; step < kSteps; step += kTile) {
                if (first == 0) prefetch.steps(kTile);
                tiles.add_bf16(row_at(token, slice.first) + 4 * step, 2 * stride,
                               opened + step * kLine + 4 * first, kLine);
            }
            tiles.store(sums->lane[first / kLanes], sizeof(Sums));
        }
    }
};

struct TiledInt8 : Int8 {
    using Int8::Int8;
    static constexpr int kRows = kTileRows, kRowsAlone = kRows, kSlice = kWholePanel, kLongSlice = kSlice;

    void accumulate(int rows, const Slice& slice, int64_t token, Fetch& prefetch, Sums* sums) const {
        const Tiles tiles(rows);
        for (int first = 0; first < kPanel; first += kTileRows) {
            tiles.zero();
            for (int64_t b = 0; b < slice.count; b++) {
                if (first == 0) prefetch.steps(kSteps);
                tiles.add_i8_u8(x + token * stride + b * kColumns, stride, slice.data + b * kBytes + 4 * first, kLine);
            }
            tiles.store(sums->lane[first / kLanes], sizeof(Sums));
        }
    }

    static void begin(int64_t, Sums&) {}
    f32x16 total(const Sums& sums, int v, int64_t token) const {
        return mul(to_f32(add(load_i32(sums.lane[v]), set_i32(offset[token]))), set_f32(scales[token]));
    }
};

// Int4 or Int6.
template <class Kind>
struct TiledGroups : Kind {
    using Kind::blocks, Kind::kBytes, Kind::kColumns, Kind::kSteps, Kind::offset, Kind::scales, Kind::stride, Kind::x;
    using Kind::Kind;
    static constexpr int kRows = kTileRows, kRowsAlone = kRows, kSlice = kWholePanel, kLongSlice = kSlice,
                         kOpened = 1;

    static const uint8_t* open(const Slice& slice, uint8_t*) { return slice.data; }

    void accumulate(int rows, const Slice& slice, int64_t token, Fetch& prefetch, Sums* sums) const {
        const Tiles tiles(rows);
        for (int64_t b = 0; b < slice.count; b++) {
            prefetch.steps(kSteps);
            const uint8_t* block = slice.data + b * kBytes;
            alignas(64) uint8_t bytes[Kind::kOpened];
            Kind::open({block, b, 1}, bytes);
            alignas(64) Sums products[kTileRows];
            for (int first = 0; first < kPanel; first += kTileRows) {
                tiles.zero();
                for (int half = 0; half < 2; half++)
                    tiles.add_i8_u8(x + token * stride + b * kColumns + half * kColumns / 2, stride,
                                    bytes + half * kTile * kLine + 4 * first, kLine);
                tiles.store(products->lane[first / kLanes], sizeof(Sums));
            }
            for (int r = 0; r < rows; r++) {
                const int64_t at = (token + r) * blocks + b;
                const auto value = [&](int v) {
                    return to_f32(add(load_i32(products[r].lane[v]), set_i32(offset[at])));
                };
                const auto weight_scale = [&](int v) { return Kind::weight_scales(block, v); };
                add_scaled<1>([&](int) { return value; }, weight_scale, scales + at, 0, 0, sums + r);
            }
        }
    }
};

}  // namespace
}  // namespace PENSTOCK_ISA
}  // namespace penstock
