// Weights to integers: round to nearest, at the scale that leaves the smallest squared error of those tried.
//
//   int8   a row is one group             w ≈ q scale            q from -127 to 127
//   int6   128 columns are one group      w ≈ q scale            q from -31 to 31; scale has float16's precision
//   int4   128 columns are one group      w ≈ (q - zero) scale   q and zero from 0 to 15; scale has float16's precision
//
// A group is tried at its full range and at shares of it, which clip its largest weights and hold all others more
// finely; then the scale is fitted by least squares to the best integers found. `kernels/quantize/reference.py` is the
// same in plain torch, in the same float32 operations, except that sums run in another order.
#include <atomic>
#include <vector>

#include "ops.h"
#include "rows.h"
#include "simd.h"
#include "threads.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

constexpr float kShares[] = {0.95f, 0.9f, 0.85f, 0.8f, 0.75f};
constexpr int64_t kGroup = 128;

struct Fit {
    float scale, zero;  // zero is a whole number
    float error;        // sum of squares
};

// One group: `count` weights, a multiple of 16 with zeros behind the last, and the integers that they may become.
struct Group {
    const float* x;
    int64_t count;
    float lowest, highest;
    bool half;     // its scale must be a float16
    bool shifted;  // it has a zero

    static float inverse(float scale) { return scale > 1e-37f ? 1.0f / scale : 0.0f; }

    f32x16 integers(int64_t i, const Fit& fit, float factor) const {
        const f32x16 place = add(mul(load_f32(x + i), set_f32(factor)), set_f32(fit.zero));
        return min(max(to_f32(round_to_i32(place)), set_f32(lowest)), set_f32(highest));
    }

    float rounded(float scale) const {
        if (!half) return scale;
        alignas(64) uint16_t halves[kLanes];
        alignas(64) float lanes[kLanes];
        store_f16(halves, set_f32(scale));
        store_f32(lanes, load_f16(halves));
        return lanes[0];
    }

    void measure(Fit& fit) const {
        const float factor = inverse(fit.scale);
        f32x16 sum = zero_f32();
        for (int64_t i = 0; i < count; i += kLanes) {
            const f32x16 value = mul(sub(integers(i, fit, factor), set_f32(fit.zero)), set_f32(fit.scale));
            const f32x16 error = sub(load_f32(x + i), value);
            sum = fma(error, error, sum);
        }
        fit.error = sum_lanes(sum);
    }

    // The scale that the integers of `fit` would like best.
    Fit refitted(const Fit& fit) const {
        const float factor = inverse(fit.scale);
        f32x16 products = zero_f32(), squares = zero_f32();
        for (int64_t i = 0; i < count; i += kLanes) {
            const f32x16 steps = sub(integers(i, fit, factor), set_f32(fit.zero));
            products = fma(steps, load_f32(x + i), products);
            squares = fma(steps, steps, squares);
        }
        const float square = sum_lanes(squares);
        Fit better{square > 0 ? rounded(sum_lanes(products) / square) : 0.0f, fit.zero, 0.0f};
        measure(better);
        return better;
    }

    // The fit that spans this share of the weights' bounds.
    Fit spanning(float low, float high, float share) const {
        Fit fit{rounded((high - low) * share / (highest - lowest)), 0.0f, 0.0f};
        if (shifted && fit.scale > 0) {
            const float zero = static_cast<float>(_mm_cvtss_si32(_mm_set_ss(-low * share / fit.scale)));
            fit.zero = zero < highest ? zero : highest;
        }
        measure(fit);
        return fit;
    }

    // `low` <= 0 <= `high` bound the weights.
    Fit search(float low, float high) const {
        Fit best = spanning(low, high, 1.0f);
        for (float share : kShares) {
            const Fit fit = spanning(low, high, share);
            if (fit.error < best.error) best = fit;
        }
        const Fit better = refitted(best);
        return better.error < best.error ? better : best;
    }

    template <class Store> void write(const Fit& fit, Store store) const {
        const float factor = inverse(fit.scale);
        for (int64_t i = 0; i < count; i += kLanes) store(i, round_to_i32(integers(i, fit, factor)));
    }
};

struct Bounds {
    float low, high;  // of the weights and 0
};

// Widen part of a row to float32, with zeros behind it; NaN bounds where a weight is none or infinite.
Bounds widen(const Row& row, int64_t first, int64_t count, float* target) {
    f32x16 low = zero_f32(), high = zero_f32(), poison = zero_f32();
    for (int64_t i = 0; i < count; i += kLanes) {
        const f32x16 x = row.at(first + i);
        store_f32(target + i, x);
        low = min(low, x);
        high = max(high, x);
        poison = fma(x, zero_f32(), poison);
    }
    const float bad = sum_lanes(poison);
    return {-max_lane(sub(zero_f32(), low)) + bad, max_lane(high) + bad};
}

float larger(const Bounds& bounds) { return bounds.high > -bounds.low ? bounds.high : -bounds.low; }

bool quantize_row(const QuantizeArgs& args, int64_t index) {
    const int64_t columns = args.columns, padded = (columns + kGroup - 1) / kGroup * kGroup;
    const Row row{args.source, args.source_dtype, index * columns, columns};
    static thread_local std::vector<float> memory;
    static thread_local std::vector<uint8_t> bytes;
    memory.resize(padded);
    bytes.resize(padded);
    if (args.kind == kWeightInt8) {
        const Bounds bounds = widen(row, 0, padded, memory.data());
        const float most = larger(bounds);
        if (!(bounds.high - bounds.low <= 3e38f)) return false;
        const Group group{memory.data(), padded, -127.0f, 127.0f, false, false};
        const Fit fit = group.search(-most, most);
        group.write(fit, [&](int64_t i, i32x16 q) { narrow_i8(bytes.data() + i, q); });
        args.scales[index] = fit.scale;
    } else {
        const bool shifted = args.kind == kWeightInt4;
        const float lowest = shifted ? 0.0f : -31.0f, highest = shifted ? 15.0f : 31.0f;
        const int64_t groups = padded / kGroup;
        for (int64_t g = 0; g < groups; g++) {
            Bounds bounds = widen(row, g * kGroup, kGroup, memory.data());
            if (!shifted) bounds.low = -(bounds.high = larger(bounds));
            if (!(bounds.high - bounds.low <= 65504.0f * (highest - lowest))) return false;
            const Group group{memory.data(), kGroup, lowest, highest, true, shifted};
            const Fit fit = group.search(bounds.low, bounds.high);
            group.write(fit, [&](int64_t i, i32x16 q) { narrow_i8(bytes.data() + g * kGroup + i, q); });
            args.scales[index * groups + g] = fit.scale;
            if (shifted) args.zeros[index * groups + g] = static_cast<uint8_t>(fit.zero);
        }
    }
    std::memcpy(args.q + index * columns, bytes.data(), columns);
    return true;
}

}  // namespace

int64_t quantize(const QuantizeArgs& args) {
    std::atomic<int64_t> refused{args.num_rows};
    parallel_for(args.num_rows, [&](int64_t index) {
        if (quantize_row(args, index)) return;
        int64_t lowest = refused;
        while (index < lowest && !refused.compare_exchange_weak(lowest, index)) {}
    });
    return refused;
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
