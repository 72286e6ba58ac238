// The most likely token of each row of logits.
#include "ops.h"
#include "prefetch.h"
#include "rows.h"
#include "simd.h"
#include "threads.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

constexpr int64_t kWindow = 8192;  // elements that are prefetched while as many are scanned

// Index of the first of the largest; -1 where one is NaN or plus infinity, or all are minus infinity.
int64_t argmax_row(const float* x, int64_t count) {
    const float infinity = __builtin_huge_valf();
    f32x16 best = set_f32(-infinity), place = zero_f32();  // places are integers: bits of these lanes
    i32x16 greatest = zero_i32();                          // magnitude's bits: above infinity's if one is NaN
    Prefetch prefetch;
    for (int64_t i = 0; i < count; i += kLanes) {
        if (i % kWindow == 0)
            prefetch = Prefetch(reinterpret_cast<const uint8_t*>(x + i + kWindow), kWindow * 4, kWindow / kLanes, true);
        prefetch.steps(1);
        f32x16 value = load_some(x + i, count - i);
        if (i + kLanes > count) {  // exclude elements behind the row's end
            alignas(64) float lanes[kLanes];
            store_f32(lanes, value);
            for (int64_t lane = count - i; lane < kLanes; lane++) lanes[lane] = -infinity;
            value = load_f32(lanes);
        }
        place = select_less(best, value, bits_as_f32(set_i32(static_cast<int32_t>(i / kLanes))), place);
        best = max(value, best);
        greatest = max(greatest, bits_as_i32(abs(value)));
    }
    alignas(64) int32_t places[kLanes], magnitudes[kLanes];
    alignas(64) float values[kLanes];
    store_i32(places, bits_as_i32(place));
    store_i32(magnitudes, greatest);
    store_f32(values, best);
    const float most = max_lane(best);
    int64_t found = count;
    for (int lane = 0; lane < kLanes; lane++) {
        if (magnitudes[lane] > 0x7f800000) return -1;
        if (values[lane] == most) found = std_min(found, int64_t{places[lane]} * kLanes + lane);
    }
    return most > -infinity && most < infinity ? found : -1;
}

}  // namespace

void argmax(const float* x, int64_t rows, int64_t columns, int64_t* places) {
    parallel(
        [&](int64_t thread, int64_t threads) {
            for (int64_t row = rows * thread / threads; row < rows * (thread + 1) / threads; row++)
                places[row] = argmax_row(x + row * columns, columns);
        },
        rows > 1 ? rows * columns * 4 : 0);
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
