// AMX: eight tile registers of up to 16 lines of 64 bytes, and products of tiles.
//
//   sum [rows][16] += A [rows][K] × B      one line of B holds 2 of K, or 4 bytes, for each of 16 columns
//
// Sums of up to 32 rows by 32 columns are in four registers: 0 and 1 for the first 16 rows, 2 and 3 for the others.
// There are two versions: inline assembly, for any assembler that knows the instructions; and an emulation with
// vectors, for tests on machines without AMX (instruction set `amx_emulated`). The emulation follows Intel's Software
// Developer's Manual: TDPBF16PS runs two chains of fused products, over the even and the odd elements of K, treats
// subnormal numbers as zeros, and adds the chains' sum to the old one.
#pragma once

#include <type_traits>

#include "simd.h"
#include "unrolled.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

inline i32x16 sub_i8(i32x16 a, i32x16 b) { return {_mm512_sub_epi8(a.v, b.v)}; }

constexpr int kTile = 16;       // rows, and lines
constexpr int kTileBytes = 64;  // of a line
enum Register { kSums = 0, kLeft = 4, kRight = 6 };

#if defined(PENSTOCK_TILES_EMULATED)

struct EmulatedTile {
    int rows;
    size_t bytes;  // of a row
    alignas(64) uint8_t line[kTile][kTileBytes];
};
thread_local EmulatedTile emulated[8];

inline void configure(const uint8_t* rows, const uint8_t* bytes) {
    for (int t = 0; t < 8; t++) emulated[t].rows = rows[t], emulated[t].bytes = bytes[t];
}
inline void release() {}

template <int T>
void zero_tile() {
    std::memset(emulated[T].line, 0, sizeof(emulated[T].line));
}
template <int T>
void load_tile(const void* data, int64_t stride) {
    zero_tile<T>();
    for (int i = 0; i < emulated[T].rows; i++)
        std::memcpy(emulated[T].line[i], static_cast<const uint8_t*>(data) + i * stride, emulated[T].bytes);
}
template <int T>
void store_tile(void* data, int64_t stride) {
    for (int i = 0; i < emulated[T].rows; i++)
        std::memcpy(static_cast<uint8_t*>(data) + i * stride, emulated[T].line[i], emulated[T].bytes);
}

// x, or zero of the same sign if x is subnormal.
inline f32x16 flush(f32x16 x) {
    const i32x16 sign = bit_and(bits_as_i32(x), set_i32(INT32_MIN));
    return select_less(abs(x), set_f32(1.17549435e-38f), bits_as_f32(sign), x);
}

template <int Sum, int A, int B>
void dot_bf16() {
    for (int i = 0; i < emulated[Sum].rows; i++) {
        f32x16 even = zero_f32(), odd = zero_f32();
        for (int k = 0; k < kTile; k++) {
            int32_t pair;
            std::memcpy(&pair, emulated[A].line[i] + 4 * k, 4);
            const i32x16 left = set_i32(pair), right = load_i32(emulated[B].line[k]);
            even = flush(fma(flush(even_bf16(left)), flush(even_bf16(right)), even));
            odd = flush(fma(flush(odd_bf16(left)), flush(odd_bf16(right)), odd));
        }
        float* sum = reinterpret_cast<float*>(emulated[Sum].line[i]);
        store_f32(sum, flush(add(flush(load_f32(sum)), flush(add(even, odd)))));
    }
}

// Signed: elements of B are signed, as those of A are.
template <int Sum, int A, int B, bool Signed>
void dot_bytes() {
    for (int i = 0; i < emulated[Sum].rows; i++) {
        i32x16 sum = load_i32(emulated[Sum].line[i]);
        for (int k = 0; k < emulated[B].rows; k++) {
            int32_t four;
            std::memcpy(&four, emulated[A].line[i] + 4 * k, 4);
            const i32x16 x = set_i32(four), line = load_i32(emulated[B].line[k]);
            const i32x16 most = set_i32(static_cast<int32_t>(0x80808080));  // 128 in each byte
            sum = Signed ? sub(dot_u8_i8(sum, sub_i8(line, most), x), dot_u8_i8(zero_i32(), most, x))
                         : dot_u8_i8(sum, line, x);
        }
        store_i32(emulated[Sum].line[i], sum);
    }
}
template <int Sum, int A, int B>
void dot_i8_i8() {
    dot_bytes<Sum, A, B, true>();
}
template <int Sum, int A, int B>
void dot_i8_u8() {
    dot_bytes<Sum, A, B, false>();
}

#else

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t line_bytes[16] = {};
    uint8_t rows[16] = {};
};

inline void configure(const uint8_t* rows, const uint8_t* bytes) {
    TileConfig config;
    for (int t = 0; t < 8; t++) config.rows[t] = rows[t], config.line_bytes[t] = rows[t] ? bytes[t] : 0;
    asm volatile("ldtilecfg %0" ::"m"(config));
}
inline void release() { asm volatile("tilerelease"); }

template <int T>
void zero_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
void load_tile(const void* data, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(data), "r"(stride), "i"(T) : "memory");
}
template <int T>
void store_tile(void* data, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(data), "r"(stride), "i"(T) : "memory");
}
template <int Sum, int A, int B>
void dot_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B));
}
template <int Sum, int A, int B>
void dot_i8_i8() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B));
}
template <int Sum, int A, int B>
void dot_i8_u8() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B));
}

#endif

}  // namespace

// What the calling thread's tile registers are configured for, a number for each configuration; 0: nothing.
inline thread_local int configured = 0;

namespace {

// Configuring takes some 300 cycles on Granite Rapids, as long as 16 products.
inline void configure_once(int number, const uint8_t* rows, const uint8_t* bytes) {
    if (configured != number) configure(rows, bytes);
    configured = number;
}

// Releases the calling thread's tile registers at the end of the scope.
struct TilesInUse {
    TilesInUse() = default;
    ~TilesInUse() {
        if (configured) release();
        configured = 0;
    }
    TilesInUse(const TilesInUse&) = delete;
    TilesInUse& operator=(const TilesInUse&) = delete;
};

// Until the end of the scope the calling thread's vectors treat subnormal numbers as zeros, as tiles do.
class FlushingSubnormals {
public:
    FlushingSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | kFlushResults | kFlushOperands); }
    ~FlushingSubnormals() { _mm_setcsr(before_); }
    FlushingSubnormals(const FlushingSubnormals&) = delete;
    FlushingSubnormals& operator=(const FlushingSubnormals&) = delete;

private:
    static constexpr unsigned kFlushResults = 0x8000, kFlushOperands = 0x40;
    const unsigned before_;
};

// Products of 1 to 32 rows with 16 or 32 columns, within the scope of a TilesInUse.
class Tiles {
public:
    explicit Tiles(int rows) : two_(rows > kTile) {
        const uint8_t first = static_cast<uint8_t>(two_ ? kTile : rows);
        const uint8_t second = static_cast<uint8_t>(two_ ? rows - kTile : 0);
        const uint8_t sizes[8] = {first, first, second, second, first, second, kTile, kTile};
        uint8_t widths[8];
        std::memset(widths, kTileBytes, sizeof widths);
        configure_once(rows, sizes, widths);
    }

    // Sums of `Columns` x 16 columns are set to 0.
    template <int Columns = 2>
    void zero() const {
        for_sums<Columns>([](auto sum, auto, auto) { zero_tile<sum>(); });
    }

    // `left` is A, with rows `stride` bytes apart; `right` is B: 16 lines of 64 bytes for each 16 columns, `step` bytes
    // apart.
    template <int Columns = 2>
    void add_bf16(const void* left, int64_t stride, const uint8_t* right, int64_t step) const {
        load_factors<Columns>(left, stride, right, step);
        for_sums<Columns>([](auto sum, auto half, auto column) { dot_bf16<sum, kLeft + half, kRight + column>(); });
    }
    template <int Columns = 2>
    void add_i8_u8(const void* left, int64_t stride, const uint8_t* right, int64_t step) const {
        load_factors<Columns>(left, stride, right, step);
        for_sums<Columns>([](auto sum, auto half, auto column) { dot_i8_u8<sum, kLeft + half, kRight + column>(); });
    }

    // Loads or stores the sums, in rows `stride` bytes apart.
    template <int Columns = 2>
    void load(const void* sums, int64_t stride) const {
        const uint8_t* data = static_cast<const uint8_t*>(sums);
        for_sums<Columns>([&](auto sum, auto half, auto column) {
            load_tile<sum>(data + half * kTile * stride + column * kTileBytes, stride);
        });
    }
    template <int Columns = 2>
    void store(void* sums, int64_t stride) const {
        uint8_t* data = static_cast<uint8_t*>(sums);
        for_sums<Columns>([&](auto sum, auto half, auto column) {
            store_tile<sum>(data + half * kTile * stride + column * kTileBytes, stride);
        });
    }

private:
    // body(register, half of the rows, column of tiles) for the sums in use.
    template <int Columns, class Body>
    void for_sums(const Body& body) const {
        unrolled<Columns>([&](auto column) {
            body(std::integral_constant<int, kSums + column>(), std::integral_constant<int, 0>(), column);
        });
        if (!two_) return;
        unrolled<Columns>([&](auto column) {
            body(std::integral_constant<int, kSums + 2 + column>(), std::integral_constant<int, 1>(), column);
        });
    }
    template <int Columns>
    void load_factors(const void* left, int64_t stride, const uint8_t* right, int64_t step) const {
        unrolled<Columns>([&](auto column) { load_tile<kRight + column>(right + column * kTileBytes, step); });
        load_tile<kLeft>(left, stride);
        if (two_) load_tile<kLeft + 1>(static_cast<const uint8_t*>(left) + kTile * stride, stride);
    }

    const bool two_;
};

}  // namespace
}  // namespace PENSTOCK_ISA
}  // namespace penstock
