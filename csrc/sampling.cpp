// Sampling: draws a token from a row of logits under its controls; top-k log-probabilities; masks.
//
// A token's weight is its probability relative to the row's most likely, in fixed point with 40 bits
// (kernels/sampling/reference.py says why). The cut-offs of top_k, top_p and typical_p are found without sorting the
// vocabulary: a histogram over ranks finds the bucket of the cut-off, and only that bucket's tokens are sorted.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "ops.h"
#include "rows.h"
#include "simd.h"
#include "threads.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

constexpr int kLowBits = 16, kHighBits = 24;  // 40 in all
constexpr int64_t kChunk = 1024;   // tokens whose weights' high parts sum to less than 2^31 in each lane
constexpr int64_t kBuckets = 2048;
constexpr float kDeepest = 28.0f;  // e to the power of -28 is below 2 to the power of -40
constexpr float kInfinity = __builtin_huge_valf();

// Fixed-point numbers: high * 2^kLowBits + low.
struct Fixed {
    i32x16 high = zero_i32(), low = zero_i32();

    void operator+=(const Fixed& other) { high = add(high, other.high), low = add(low, other.low); }
    void store(int64_t* lanes) const { store_i64<kLowBits>(lanes, high, low); }
    int64_t total() const {
        int64_t lanes[kLanes], sum = 0;
        store(lanes);
        for (int64_t lane : lanes) sum += lane;
        return sum;
    }
};

// From floats between 0 and 1, truncated.
inline Fixed to_fixed(f32x16 x) {
    const f32x16 scaled = mul(x, set_f32(1 << kHighBits));
    const i32x16 high = truncate_to_i32(scaled);
    return {high, truncate_to_i32(mul(sub(scaled, to_f32(high)), set_f32(1 << kLowBits)))};
}

// Loads 16 logits; minus infinity behind the row's end.
inline f32x16 load_logits(const float* x, int64_t i, int64_t count) {
    if (i + kLanes <= count) return load_f32(x + i);
    alignas(64) float lanes[kLanes];
    for (int64_t lane = 0; lane < kLanes; lane++) lanes[lane] = i + lane < count ? x[i + lane] : -kInfinity;
    return load_f32(lanes);
}

struct Range {
    float lowest, top;
    bool finite() const { return std::isfinite(top); }  // `top` is also infinite if a logit is NaN
};

Range range_of(const float* x, int64_t count) {
    f32x16 lowest = set_f32(kInfinity), top = set_f32(-kInfinity);
    i32x16 greatest = zero_i32();  // magnitude's bits: above infinity's if one is NaN
    for (int64_t i = 0; i < count; i += kLanes) {
        const f32x16 value = load_logits(x, count < kLanes ? i : std::min(i, count - kLanes), count);
        top = max(value, top);
        lowest = min(value, lowest);
        greatest = max(greatest, bits_as_i32(abs(value)));
    }
    alignas(64) int32_t magnitudes[kLanes];
    store_i32(magnitudes, greatest);
    for (int32_t magnitude : magnitudes) {
        if (magnitude > 0x7f800000) return {0.0f, kInfinity};
    }
    const f32x16 negated = sub(zero_f32(), lowest);
    return {-max_lane(negated), max_lane(top)};
}

// Index of the first largest logit.
int64_t first_of(const float* x, int64_t count, float top) {
    int64_t i = 0;
    while (less_bits(load_logits(x, i, count), set_f32(top)) == 0xffff) i += kLanes;
    while (x[i] < top) i++;
    return i;
}

// The tokens that stay: those of ranks below `limit`, and those of rank `limit` up to token `last`.
struct Cut {
    float limit = kInfinity;
    int64_t last = INT64_MAX;
    float below = std::nextafterf(limit, -kInfinity);

    f32x16 limits(int64_t i) const {
        if (i + kLanes - 1 <= last) return set_f32(limit);
        if (i > last) return set_f32(below);
        alignas(64) float lanes[kLanes];
        for (int64_t lane = 0; lane < kLanes; lane++) lanes[lane] = i + lane <= last ? limit : below;
        return load_f32(lanes);
    }
    f32x16 apply(f32x16 rank, f32x16 share, int64_t i) const {
        return select_less(limits(i), rank, zero_f32(), share);
    }
};

struct Candidate {
    float rank;
    int32_t token;
    int64_t weight;

    bool operator<(const Candidate& other) const {
        return rank != other.rank ? rank < other.rank : token < other.token;
    }
};

struct Scratch {
    int64_t buckets[kBuckets];  // number of a bucket's tokens, or their weight
    Candidate* candidates;  // one per token
    int64_t* sums;          // one per chunk

    static int64_t bytes(int64_t vocab) {
        const int64_t size = sizeof(Scratch) + vocab * sizeof(Candidate) + (vocab / kChunk + 1) * sizeof(int64_t);
        return (size + 63) / 64 * 64;
    }
    static Scratch& at(uint8_t* memory, int64_t vocab) {
        Scratch& scratch = *reinterpret_cast<Scratch*>(memory);
        scratch.candidates = reinterpret_cast<Candidate*>(memory + sizeof(Scratch));
        scratch.sums = reinterpret_cast<int64_t*>(scratch.candidates + vocab);
        return scratch;
    }
};

// One row and its controls. Ranks (lower is better) are the negated logits; for typical_p, the distance of a token's
// information from the mean.
class Tokens {
   public:
    Tokens(const float* logits, int64_t count, Range range, const SampleControls& controls, Scratch& scratch)
        : x_(logits), count_(count), top_(range.top), temperature_(static_cast<float>(controls.temperature)),
          scratch_(scratch) {
        depth_ = std::min((top_ - range.lowest) / temperature_, kDeepest);
        if (controls.top_k > 0 && controls.top_k < static_cast<double>(count)) {
            keep_top_k(static_cast<int64_t>(controls.top_k), controls.top_p);
        } else if (controls.top_p < 1) {
            keep_top_p(controls.top_p);
        }
        min_p_ = static_cast<float>(controls.min_p);
        if (controls.typical_p < 1) keep_typical(controls.typical_p);
    }

    int64_t draw(double uniform) {
        int64_t total = 0, chunk = 0;
        for (int64_t i = 0; i < count_; i += kChunk) total += scratch_.sums[i / kChunk] = chunk_weight(i);
        int64_t target = std::min(static_cast<int64_t>(uniform * static_cast<double>(total)), total - 1);
        while (target >= scratch_.sums[chunk]) target -= scratch_.sums[chunk++];
        int64_t weights[kLanes];
        for (int64_t i = chunk * kChunk; i < count_; i += kLanes) {
            to_fixed(shares(i)).store(weights);
            for (int lane = 0; lane < kLanes; lane++) {
                target -= weights[lane];
                if (target < 0) return i + lane;
            }
        }
        return -1;  // not reached: the target is below the total
    }

   private:
    f32x16 logits(int64_t i) const { return load_logits(x_, i, count_); }

    // Whether top_k or top_p drops all of these tokens.
    bool dropped(f32x16 logits) const { return less_bits(logits, set_f32(-top_cut_.limit)) == 0xffff; }

    // Information of a token, less that of the most likely token.
    f32x16 depths(f32x16 logits) const { return div(sub(set_f32(top_), logits), set_f32(temperature_)); }

    f32x16 ranks(f32x16 logits) const {
        return by_type_ ? abs(sub(depths(logits), set_f32(mean_))) : sub(zero_f32(), logits);
    }

    // Each token's probability relative to the most likely; 0 if the controls drop it.
    f32x16 shares(int64_t i) const {
        const f32x16 x = logits(i);
        f32x16 share = exp(div(sub(x, set_f32(top_)), set_f32(temperature_)));
        share = select_less(share, set_f32(min_p_), zero_f32(), share);
        share = top_cut_.apply(sub(zero_f32(), x), share, i);
        return by_type_ ? type_cut_.apply(ranks(x), share, i) : share;
    }

    int64_t chunk_weight(int64_t begin) const {
        Fixed sum;
        for (int64_t i = begin; i < std::min(begin + kChunk, count_); i += kLanes) {
            if (!dropped(logits(i))) sum += to_fixed(shares(i));
        }
        return sum.total();
    }

    f32x16 places(f32x16 logits) const {
        return min(mul(sub(ranks(logits), set_f32(best_)), set_f32(scale_)), set_f32(kBuckets - 1));
    }

    // Clears the histogram, and sets its kBuckets buckets to equal widths over the ranks from `best` on.
    void set_buckets(float best, float width) {
        best_ = best;
        scale_ = std::min((kBuckets - 1) / width, 1e38f);
        std::fill(scratch_.buckets, scratch_.buckets + kBuckets, 0);
    }

    void count_tokens() {
        alignas(64) int32_t places_of[kLanes];
        for (int64_t i = 0; i < count_; i += kLanes) {
            store_i32(places_of, truncate_to_i32(places(logits(i))));
            const int64_t lanes = std::min<int64_t>(kLanes, count_ - i);
            for (int64_t lane = 0; lane < lanes; lane++) scratch_.buckets[places_of[lane]]++;
        }
    }

    int64_t add_weights() {
        alignas(64) int32_t places_of[kLanes];
        alignas(64) int64_t weights[kLanes];
        for (int64_t i = 0; i < count_; i += kLanes) {
            const f32x16 x = logits(i);
            if (dropped(x)) continue;
            to_fixed(shares(i)).store(weights);
            store_i32(places_of, truncate_to_i32(places(x)));
            for (int lane = 0; lane < kLanes; lane++) scratch_.buckets[places_of[lane]] += weights[lane];
        }
        return std::accumulate(scratch_.buckets, scratch_.buckets + kBuckets, int64_t{0});
    }

    // Collects the tokens of the buckets `first` to `last` as candidates; returns their number.
    int64_t gather(int64_t first, int64_t last) {
        const f32x16 from = set_f32(static_cast<float>(first)), to = set_f32(static_cast<float>(last + 1));
        alignas(64) float rank[kLanes];
        alignas(64) int64_t weights[kLanes];
        int64_t found = 0;
        for (int64_t i = 0; i < count_; i += kLanes) {
            const f32x16 x = logits(i);
            if (dropped(x)) continue;
            const f32x16 place = places(x);
            uint32_t inside = less_bits(place, to) & ~less_bits(place, from);
            if (count_ - i < kLanes) inside &= (1u << (count_ - i)) - 1;
            if (!inside) continue;
            store_f32(rank, ranks(x));
            to_fixed(shares(i)).store(weights);
            for (; inside; inside &= inside - 1) {
                const int lane = __builtin_ctz(inside);
                scratch_.candidates[found++] = {rank[lane], static_cast<int32_t>(i + lane), weights[lane]};
            }
        }
        return found;
    }

    // top_k keeps all tokens as likely as the k-th; top_p then keeps the first of these whose weights reach its share.
    void keep_top_k(int64_t top_k, double top_p) {
        set_buckets(-top_, depth_ * temperature_);
        count_tokens();
        int64_t last = 0, before = 0;
        while (before + scratch_.buckets[last] < top_k) before += scratch_.buckets[last++];
        const int64_t found = gather(0, last);
        Candidate* candidates = scratch_.candidates;
        std::nth_element(candidates, candidates + top_k - 1, candidates + found);
        top_cut_ = {candidates[top_k - 1].rank};
        if (top_p >= 1) return;
        int64_t kept = top_k, total = 0;
        for (int64_t i = top_k; i < found; i++) {
            if (candidates[i].rank == top_cut_.limit) std::swap(candidates[kept++], candidates[i]);
        }
        for (int64_t i = 0; i < kept; i++) total += candidates[i].weight;
        top_cut_ = cut_at(top_p * static_cast<double>(total), 0, kept, top_cut_);
    }

    void keep_top_p(double top_p) {
        set_buckets(-top_, depth_ * temperature_);
        top_cut_ = cut_bucket_at(top_p * static_cast<double>(add_weights()));
    }

    // The cut-off where the weights, summed by rank and token, reach `limit`; behind all tokens if rounding prevents
    // that.
    Cut cut_bucket_at(double limit) {
        int64_t sum = 0, bucket = 0;
        while (bucket < kBuckets && static_cast<double>(sum + scratch_.buckets[bucket]) < limit)
            sum += scratch_.buckets[bucket++];
        return bucket == kBuckets ? Cut{} : cut_at(limit, sum, gather(bucket, bucket), Cut{});
    }

    Cut cut_at(double limit, int64_t sum, int64_t found, Cut otherwise) {
        std::sort(scratch_.candidates, scratch_.candidates + found);
        for (int64_t i = 0; i < found; i++) {
            const Candidate& one = scratch_.candidates[i];
            sum += one.weight;
            if (static_cast<double>(sum) >= limit) return {one.rank, one.token};
        }
        return otherwise;
    }

    // typical_p: keeps the tokens whose information is nearest to the mean; all as near as the last stay.
    void keep_typical(double typical_p) {
        int64_t weight = 0, information = 0;
        for (int64_t begin = 0; begin < count_; begin += kChunk) {
            Fixed weights, products;
            for (int64_t i = begin; i < std::min(begin + kChunk, count_); i += kLanes) {
                const f32x16 x = logits(i);
                if (dropped(x)) continue;
                const f32x16 share = shares(i), depth = min(depths(x), set_f32(100.0f));
                weights += to_fixed(share);
                products += to_fixed(mul(share, depth));
            }
            weight += weights.total(), information += products.total();
        }
        mean_ = static_cast<float>(static_cast<double>(information) / static_cast<double>(weight));
        by_type_ = true;
        set_buckets(0.0f, depth_);
        type_cut_ = {cut_bucket_at(typical_p * static_cast<double>(add_weights())).limit};
    }

    const float* x_;
    int64_t count_;
    float top_, temperature_;
    Scratch& scratch_;
    float depth_;  // of the least likely token, or kDeepest
    float min_p_ = 0;
    float best_ = 0, scale_ = 0;
    float mean_ = 0;  // mean information, less that of the most likely token
    bool by_type_ = false;
    Cut top_cut_, type_cut_;
};

int64_t sample_row(const float* x, int64_t count, const SampleControls& controls, Scratch& scratch) {
    const Range range = range_of(x, count);
    if (!range.finite()) return -1;
    if (controls.temperature == 0) return first_of(x, count, range.top);
    return Tokens(x, count, range, controls, scratch).draw(controls.uniform);
}

// The k largest elements of a row in descending order; ties by index.
void leading_row(const float* x, int64_t count, int64_t k, float* values, int64_t* tokens) {
    int64_t size = 0;
    for (int64_t i = 0; i < count; i += kLanes) {
        uint32_t better = 0xffff;
        if (size == k) better = less_bits(set_f32(values[k - 1]), load_logits(x, i, count));
        if (count - i < kLanes) better &= (1u << (count - i)) - 1;
        for (; better; better &= better - 1) {
            const int64_t token = i + __builtin_ctz(better);
            if (size == k && !(values[k - 1] < x[token])) continue;
            int64_t at = size < k ? size++ : k - 1;
            for (; at > 0 && values[at - 1] < x[token]; at--)
                values[at] = values[at - 1], tokens[at] = tokens[at - 1];
            values[at] = x[token], tokens[at] = token;
        }
    }
}

int64_t total_weight(const float* x, int64_t count, float top) {
    int64_t total = 0;
    for (int64_t begin = 0; begin < count; begin += kChunk) {
        Fixed sum;
        for (int64_t i = begin; i < std::min(begin + kChunk, count); i += kLanes)
            sum += to_fixed(exp(sub(load_logits(x, i, count), set_f32(top))));
        total += sum.total();
    }
    return total;
}

void mask_row(float* x, int64_t count, const uint32_t* bits) {
    for (int64_t i = 0; i < count; i += 32) {
        const uint32_t allowed = bits[i / 32];
        if (allowed == 0xffffffff) continue;
        const int64_t some = std::min<int64_t>(32, count - i);
        for (int64_t bit = 0; bit < some; bit++) {
            if (!(allowed >> bit & 1)) x[i + bit] = -kInfinity;
        }
    }
}

// Runs body(row, thread) for each row; neighbouring rows go to different threads.
template <class Body>
void each_row(int64_t rows, const Body& body) {
    parallel(
        [&](int64_t thread, int64_t threads) {
            for (int64_t row = thread; row < rows; row += threads) body(row, thread);
        },
        rows > 1 ? kTeamBytes : 0);
}

}  // namespace

int64_t sample_scratch_bytes(int64_t vocab) { return Scratch::bytes(vocab); }

void sample(const SampleArgs& args) {
    const int64_t bytes = Scratch::bytes(args.vocab);
    each_row(args.rows, [&](int64_t row, int64_t thread) {
        Scratch& scratch = Scratch::at(args.scratch + thread * bytes, args.vocab);
        args.tokens[row] = sample_row(args.logits + row * args.vocab, args.vocab, args.controls[row], scratch);
    });
}

void topk_logprobs(const TopkLogprobsArgs& args) {
    each_row(args.rows, [&](int64_t row, int64_t) {
        const float* x = args.logits + row * args.vocab;
        args.tops[row] = range_of(x, args.vocab).top;
        args.totals[row] = std::isfinite(args.tops[row]) ? total_weight(x, args.vocab, args.tops[row]) : 0;
        if (args.k) leading_row(x, args.vocab, args.k, args.values + row * args.k, args.tokens + row * args.k);
    });
}

void apply_bitmask(float* logits, int64_t vocab, const int64_t* rows, int64_t num_rows, const uint32_t* bits) {
    const int64_t words = (vocab + 31) / 32;
    each_row(num_rows, [&](int64_t i, int64_t) { mask_row(logits + rows[i] * vocab, vocab, bits + i * words); });
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
