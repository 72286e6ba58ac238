// Quantizes weights to integers by rounding to nearest, when weights are loaded.
//
//   centred   w ≈ scale (q - 2^(bits - 1))
//   shifted   w ≈ scale (q - zero / units)    zero from 0 to 127
//
// q has `bits` bits and no sign; a group of columns has a scale, an 8-bit multiple of its row's step.
//
// Each group is tried at its full range and at a smaller one, which clips the largest weights for a finer step. Scale
// and zero are fitted to the resulting integers by least squares, twice.
//
// 16 rows are processed at a time, one in each lane of a vector, so that no sum runs across lanes:
//
//   source [16 rows][columns]  ->  tiles [column][16 rows]  ->  q [16 rows][columns]
//
// `kernels/quantize/reference.py` does the same float32 operations in the same order, so that both give the same bits.
// Products and sums are therefore never fused here.
#include <atomic>
#include <vector>

#include "ops.h"
#include "rows.h"
#include "simd.h"
#include "threads.h"
#include "transpose.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

constexpr int64_t kRows = kLanes;  // of a block
constexpr float kLargest = 1e30f;  // magnitude of a weight: sums of their products with integers are finite
constexpr float kSmallestStep = 1e-37f;  // the reciprocal of a smaller one may be infinite
constexpr float kShare = 0.9f;
constexpr int kRounds = 2;

f32x16 inverse(f32x16 step) {
    return select_less(set_f32(kSmallestStep), step, div(set_f32(1.0f), step), zero_f32());
}

f32x16 rounded(f32x16 x, f32x16 lowest, f32x16 highest) {
    return min(max(to_f32(round_to_i32(x)), lowest), highest);
}

// The fit of each lane's group, and its gain: the reduction of the sum of squared errors.
struct Fit {
    f32x16 scale, minimum, gain;
};

Fit better(const Fit& a, const Fit& b) {
    return {select_less(a.gain, b.gain, b.scale, a.scale), select_less(a.gain, b.gain, b.minimum, a.minimum),
            select_less(a.gain, b.gain, b.gain, a.gain)};
}

// One group in each of 16 rows, and the range of its integers. `Shifted` groups have a minimum.
template <bool Shifted>
struct Tile {
    const float* x;  // [group][kLanes]
    int64_t group;
    f32x16 lowest, highest;

    f32x16 at(int64_t column) const { return load_f32(x + column * kLanes); }

    f32x16 integer(int64_t column, f32x16 factor, f32x16 zero) const {
        return rounded(add(mul(at(column), factor), zero), lowest, highest);
    }

    f32x16 sum() const {
        f32x16 total = zero_f32();
        for (int64_t c = 0; c < group; c++) total = add(total, at(c));
        return total;
    }

    // The least-squares fit to the integers that this scale and minimum give. A minimum below 0 becomes 0.
    Fit refitted(f32x16 scale, f32x16 minimum, f32x16 sum_x) const {
        const f32x16 factor = inverse(scale), shift = mul(minimum, factor), zero = zero_f32();
        const f32x16 count = set_f32(static_cast<float>(group));
        f32x16 sum_q = zero, sum_qq = zero, sum_qx = zero;
        for (int64_t c = 0; c < group; c++) {
            const f32x16 q = integer(c, factor, shift);
            if (Shifted) sum_q = add(sum_q, q);
            sum_qq = add(sum_qq, mul(q, q));
            sum_qx = add(sum_qx, mul(q, at(c)));
        }
        const f32x16 bound = select_less(zero, sum_qq, div(sum_qx, sum_qq), zero);
        if (!Shifted) return {bound, zero, mul(bound, sum_qx)};
        const f32x16 spread = sub(mul(count, sum_qq), mul(sum_q, sum_q));
        const f32x16 slope = sub(mul(count, sum_qx), mul(sum_q, sum_x));
        const f32x16 free = select_less(zero, spread, div(slope, spread), zero);
        const f32x16 offset = div(sub(mul(free, sum_q), sum_x), count);
        const f32x16 bound_gain = sub(mul(bound, sum_qx), div(mul(sum_x, sum_x), count));
        return {select_less(offset, zero, bound, free), max(offset, zero),
                select_less(offset, zero, bound_gain, div(mul(free, slope), count))};
    }

    Fit search() const {
        f32x16 low = zero_f32(), high = zero_f32();
        for (int64_t c = 0; c < group; c++) {
            low = min(low, at(c));
            high = max(high, at(c));
        }
        const f32x16 depth = sub(zero_f32(), low), total = sum();
        const f32x16 range = Shifted ? add(high, depth) : max(high, depth);
        const f32x16 step = div(range, highest);
        const f32x16 part = set_f32(kShare);
        Fit best = refitted(step, Shifted ? depth : zero_f32(), total);
        best = better(best, refitted(mul(step, part), Shifted ? mul(depth, part) : zero_f32(), total));
        for (int i = 0; i < kRounds; i++) best = better(best, refitted(best.scale, best.minimum, total));
        return best;
    }

    // The best zero, in units of 1 / `units` of a step, for a scale that was rounded after the fit.
    f32x16 zero_for(f32x16 scale, f32x16 minimum, f32x16 units) const {
        const f32x16 factor = inverse(scale), shift = mul(minimum, factor);
        f32x16 sum_q = zero_f32();
        for (int64_t c = 0; c < group; c++) sum_q = add(sum_q, integer(c, factor, shift));
        const f32x16 zero = div(sub(sum_q, mul(sum(), factor)), set_f32(static_cast<float>(group)));
        return rounded(mul(zero, units), zero_f32(), set_f32(127.0f));
    }
};

struct Scratch {
    std::vector<float> x, scales, zeros;

    // Rounded up to whole squares.
    Scratch(int64_t groups, int64_t group)
        : x(groups * group * kLanes), scales((groups + kLanes) * kLanes), zeros(scales.size()) {}
};

// Transpose `rows` rows from `first` on to `x` [columns][16 rows], zero-padded to whole groups. False: an element is
// not finite or too large.
bool transpose_rows(const QuantizeArgs& args, int64_t first, int64_t rows, std::vector<float>& x) {
    f32x16 poison = zero_f32(), most = zero_f32();
    for (int64_t i = 0; i < static_cast<int64_t>(x.size()) / kLanes; i += kLanes) {
        i32x16 square[kLanes];
        for (int64_t r = 0; r < kLanes; r++) {
            const Row row{args.source, args.source_dtype, (first + r) * args.columns, args.columns};
            const f32x16 part = r < rows && i < args.columns ? row.at(i) : zero_f32();
            most = max(most, abs(part));
            poison = add(poison, mul(part, zero_f32()));
            square[r] = bits_as_i32(part);
        }
        transpose(square);
        for (int64_t c = 0; c < kLanes; c++) store_i32(x.data() + (i + c) * kLanes, square[c]);
    }
    return sum_lanes(poison) == 0.0f && max_lane(most) <= kLargest;
}

// Writes the first `rows` lanes of `count` vectors of whole numbers, plus `shift`, as bytes to `target` [rows][count].
void store_bytes(const float* x, int64_t count, int64_t rows, float shift, uint8_t* target) {
    for (int64_t c = 0; c < count; c += kLanes) {
        i32x16 square[kLanes];
        for (int64_t i = 0; i < kLanes; i++)
            square[i] = round_to_i32(add(load_f32(x + (c + i) * kLanes), set_f32(shift)));
        transpose(square);
        for (int64_t r = 0; r < rows; r++) {
            uint8_t bytes[kLanes];
            narrow_i8(bytes, square[r]);
            std::memcpy(target + r * count + c, bytes, static_cast<size_t>(std_min(kLanes, count - c)));
        }
    }
}

// Rounds the scales, in place, to multiples of a step, 1/255 of each lane's largest; returns the steps.
f32x16 as_multiples(float* scales, int64_t groups) {
    f32x16 most = zero_f32();
    for (int64_t g = 0; g < groups; g++) most = max(most, load_f32(scales + g * kLanes));
    const f32x16 step = div(most, set_f32(255.0f)), factor = inverse(step);
    for (int64_t g = 0; g < groups; g++)
        store_f32(scales + g * kLanes,
                  rounded(mul(load_f32(scales + g * kLanes), factor), set_f32(1.0f), set_f32(255.0f)));
    return step;
}

template <bool Shifted>
void quantize_groups(const QuantizeArgs& args, int64_t first, int64_t rows, Scratch& scratch) {
    const int64_t group = args.group, groups = (args.columns + group - 1) / group;
    float *x = scratch.x.data(), *scales = scratch.scales.data(), *zeros = scratch.zeros.data();
    const float values = static_cast<float>(1 << args.bits), centre = Shifted ? 0.0f : values / 2;
    const auto tile = [&](int64_t g) {
        return Tile<Shifted>{x + g * group * kLanes, group, set_f32(-centre), set_f32(values - 1.0f - centre)};
    };
    for (int64_t g = 0; g < groups; g++) {
        const Fit fit = tile(g).search();
        store_f32(scales + g * kLanes, fit.scale);
        store_f32(zeros + g * kLanes, fit.minimum);
    }
    const f32x16 step = as_multiples(scales, groups);
    for (int64_t g = 0; g < groups; g++) {
        const f32x16 scale = mul(step, load_f32(scales + g * kLanes)), factor = inverse(scale);
        const Tile<Shifted> at = tile(g);
        f32x16 zero = zero_f32();
        if (Shifted) {
            const f32x16 units = set_f32(static_cast<float>(args.zero_units));
            const f32x16 stored = at.zero_for(scale, load_f32(zeros + g * kLanes), units);
            store_f32(zeros + g * kLanes, stored);
            zero = div(stored, units);
        }
        for (int64_t c = 0; c < group; c++)
            store_f32(x + (g * group + c) * kLanes, at.integer(c, factor, zero));
    }
    store_bytes(x, args.columns, rows, centre, args.q + first * args.columns);
    store_bytes(scales, groups, rows, 0.0f, args.scales + first * groups);
    if (Shifted) store_bytes(zeros, groups, rows, 0.0f, args.zeros + first * groups);
    write_row(args.row_scales, kFloat32, first, rows, step);
}

}  // namespace

bool quantize(const QuantizeArgs& args) {
    const int64_t groups = (args.columns + args.group - 1) / args.group, blocks = (args.num_rows + kRows - 1) / kRows;
    std::atomic<bool> refused{false};
    parallel([&](int64_t, int64_t) {
        Scratch scratch(groups, args.group);
        take_turns(blocks, [&](int64_t block, int64_t) {
            const int64_t first = block * kRows, rows = std_min(kRows, args.num_rows - first);
            if (!transpose_rows(args, first, rows, scratch.x)) {
                refused = true;
            } else if (args.zero_units) {
                quantize_groups<true>(args, first, rows, scratch);
            } else {
                quantize_groups<false>(args, first, rows, scratch);
            }
        });
    });
    return !refused;
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
