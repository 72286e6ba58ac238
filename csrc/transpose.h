// Squares of 32-bit words, a vector each row.
#pragma once

#include <cstring>

#include "simd.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

// Transposes a square of 32-bit words.
inline void transpose(i32x16 (&x)[kLanes]) {
    constexpr int half = kLanes / 2;
    for (int stage = 0; stage < 4; stage++) {
        i32x16 y[kLanes];
#pragma GCC unroll 8
        for (int i = 0; i < half; i++) zip(x[i], x[i + half], y[2 * i], y[2 * i + 1]);
        std::memcpy(x, y, sizeof x);
    }
}

}  // namespace
}  // namespace PENSTOCK_ISA
}  // namespace penstock
