// Routing: the experts of each token are those with the largest scores (ties: the first ones), with their weights.
//
// The order of a row's operations depends on the number of experts alone. Ids are valid whatever a row contains; if a
// logit is NaN or infinite the weights are NaN.
#include "ops.h"
#include "rows.h"
#include "simd.h"
#include "threads.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

constexpr float kLowest = -__builtin_inff();

struct alignas(64) Experts {
    float value[kMostExperts + kLanes];
};

// The `count` largest of `values` [n], in descending order; ties go to the first.
void find_largest(const float* values, int64_t n, int64_t count, int32_t* places) {
    int64_t found = 0;
    for (int64_t i = 0; i < n; i++) {
        if (found == count && !(values[i] > values[places[found - 1]])) continue;
        int64_t at = found < count ? found++ : count - 1;
        for (; at > 0 && values[i] > values[places[at - 1]]; at--) places[at] = places[at - 1];
        places[at] = static_cast<int32_t>(i);
    }
}

// Replaces each value by exp(value - most), where `most` is the largest; returns their sum.
float exponentials(float* values, int64_t n, float most) {
    f32x16 total = zero_f32();
    for (int64_t i = 0; i < n; i += kLanes) {
        const f32x16 x = exp(sub(load_some_as_f32(values, kFloat32, i, n - i), set_f32(most)));
        write_row(values, kFloat32, i, n - i, x);
        total = add(total, load_some_as_f32(values, kFloat32, i, n - i));
    }
    return sum_lanes(total);
}

float largest_of(const float* values, int64_t n) {
    float most = values[0];
    for (int64_t i = 1; i < n; i++) most = values[i] > most ? values[i] : most;
    return most;
}

// Sets the scores of all but the best groups to minus infinity.
void leave_groups(const RouteArgs& args, float* choice) {
    const int64_t size = args.experts / args.groups;
    float scores[kMostExperts];
    int32_t tops[kMostExperts], kept[kMostExperts];
    for (int64_t group = 0; group < args.groups; group++) {
        find_largest(choice + group * size, size, args.group_tops, tops);
        scores[group] = 0.0f;
        for (int32_t i = 0; i < args.group_tops; i++) scores[group] += choice[group * size + tops[i]];
    }
    find_largest(scores, args.groups, args.top_groups, kept);
    for (int64_t group = 0; group < args.groups; group++) {
        bool is_kept = false;
        for (int64_t i = 0; i < args.top_groups; i++) is_kept |= kept[i] == group;
        for (int64_t i = 0; !is_kept && i < size; i++) choice[group * size + i] = kLowest;
    }
}

// The weight of the largest remaining score, by a softmax over all scores near to it.
void mix_sparsely(const RouteArgs& args, const float* logits, Experts& left, int64_t place, int32_t* ids,
                  float* weights) {
    const int64_t n = args.experts;
    find_largest(left.value, n, 1, ids + place);
    const float most = left.value[ids[place]];
    Experts near;
    for (int64_t i = 0; i < n; i++) {
        const float magnitude = logits[i] < 0 ? -logits[i] : logits[i], factor = magnitude < most ? most : magnitude;
        near.value[i] = (most - logits[i]) / factor > 2 * args.jitter ? kLowest : left.value[i];
    }
    const float total = exponentials(near.value, n, most);
    weights[place] = near.value[ids[place]] / total;
    left.value[ids[place]] = kLowest;
}

void route_row(const RouteArgs& args, int64_t row) {
    const int64_t n = args.experts, k = args.top_k;
    const float* logits = args.logits + row * n;
    int32_t* ids = args.ids + row * k;
    float* weights = args.weights + row * k;
    Experts scores, choice;
    std::memcpy(choice.value, logits, static_cast<size_t>(n) * sizeof(float));
    if (args.score == kSparseMixer) {
        for (int64_t place = 0; place < k; place++) mix_sparsely(args, logits, choice, place, ids, weights);
        return;
    }
    if (args.score == kSigmoid) {
        for (int64_t i = 0; i < n; i += kLanes) {
            const f32x16 x = load_some_as_f32(logits, kFloat32, i, n - i), one = set_f32(1.0f);
            store_f32(scores.value + i, div(one, add(one, exp(sub(zero_f32(), x)))));
        }
        std::memcpy(choice.value, scores.value, static_cast<size_t>(n) * sizeof(float));
    } else if (args.score == kSoftmax && args.correction) {  // without, the logits have the same order
        std::memcpy(scores.value, logits, static_cast<size_t>(n) * sizeof(float));
        const float total = exponentials(scores.value, n, largest_of(logits, n));
        for (int64_t i = 0; i < n; i++) choice.value[i] = scores.value[i] / total;
    }
    for (int64_t i = 0; args.correction && i < n; i++) choice.value[i] += args.correction[i];
    if (args.groups > 1) leave_groups(args, choice.value);
    find_largest(choice.value, n, k, ids);
    if (args.score == kSoftmaxOfTop) {
        for (int64_t i = 0; i < k; i++) weights[i] = logits[ids[i]];
        const float total = exponentials(weights, k, weights[0]);
        for (int64_t i = 0; i < k; i++) weights[i] /= total;
    } else if (args.score == kSoftmax) {
        std::memcpy(scores.value, logits, static_cast<size_t>(n) * sizeof(float));
        const float total = exponentials(scores.value, n, largest_of(logits, n));
        for (int64_t i = 0; i < k; i++) weights[i] = scores.value[ids[i]] / total;
    } else {
        for (int64_t i = 0; i < k; i++) weights[i] = scores.value[ids[i]];
    }
    float total = args.epsilon;
    for (int64_t i = 0; i < k; i++) total += weights[i];
    for (int64_t i = 0; i < k; i++) {
        weights[i] = (args.renormalize ? weights[i] / total : weights[i]) * args.scaling;
        if (args.expert_scales) weights[i] *= args.expert_scales[ids[i]];
    }
}

}  // namespace

void route(const RouteArgs& args) {
    parallel(
        [&](int64_t thread, int64_t threads) {
            const int64_t end = args.tokens * (thread + 1) / threads;
            for (int64_t row = args.tokens * thread / threads; row < end; row++) route_row(args, row);
        },
        args.tokens * args.experts * 8);
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
