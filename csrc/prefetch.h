// Software prefetching.
#pragma once

#include "simd.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

// Zen 4 and Zen 5, whose hardware prefetcher follows one uninterrupted stream in memory order far ahead.
#if defined(__AVX512BF16__) && !defined(PENSTOCK_TILES)
constexpr bool kRunsAhead = true;
#else
constexpr bool kRunsAhead = false;
#endif

// The near cache, as a locality of __builtin_prefetch (3: L1, 2: L2). L1 has few misses in flight: a core of Zen 4
// prefetches 10 GB/s into it, and 22 GB/s into L2. L1 is for Intel's servers, whose first level takes more.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kNear = 2, kFar = 2;
#else
constexpr int kNear = kRunsAhead ? 2 : 3, kFar = 2;
#endif

// Prefetches a window of the next data during a computation, a few lines with each step, since many lines at once would
// stall. It proceeds through `Streams` parts of the window in parallel.
template <int Streams>
class PrefetchThrough {
  public:
    PrefetchThrough() = default;
    // Prefetch `bytes` from `window` on over this many steps; `near`: into the near cache.
    PrefetchThrough(const uint8_t* window, int64_t bytes, int64_t steps, bool near)
        : next_(window), lines_((bytes + Streams * 64 - 1) / (Streams * 64)), steps_(steps), near_(near) {}

    void steps(int64_t count) {
        for (due_ -= count * lines_; due_ < 0; due_ += steps_, next_ += 64) {
#pragma GCC unroll 4
            for (int i = 0; i < Streams; i++) {
                const uint8_t* line = next_ + i * lines_ * 64;
                near_ ? __builtin_prefetch(line, 0, kNear) : __builtin_prefetch(line, 0, kFar);
            }
        }
    }

  private:
    const uint8_t* next_ = nullptr;
    int64_t lines_ = 0, steps_ = 1;  // per stream
    int64_t due_ = 0;                // below 0: the next lines are due
    bool near_ = true;
};

// Load the lines from `begin` to `end` now, in memory order. With few instructions between blocks, a processor whose
// hardware prefetcher runs ahead of loads reads a fifth faster this way; it does not run ahead of software prefetches.
inline __attribute__((always_inline)) void touch(const uint8_t* begin, const uint8_t* end) {
    for (; begin < end; begin += 64) static_cast<void>(*static_cast<const volatile uint8_t*>(begin));
}

// With several pages at a time the hardware prefetcher helps: on Ice Lake a fifth faster than with one.
using Prefetch = PrefetchThrough<4>;

}  // namespace
}  // namespace PENSTOCK_ISA
}  // namespace penstock
