// Disentangled attention of an encoder: each token of a text attends to all of it, and a score has up to three terms.
//
//   score(query i, key j) = scale * (q_i k_j + q_i K_b + k_j Q_b)     b: the bucket of the distance i - j
//
// K and Q are keys and queries of distances. A tile of queries processes its keys in tiles, too: the distances between
// two tiles have few buckets, adjacent ones, with which the queries and the keys are multiplied; each score then adds its
// two products. All scores of a tile of queries are kept, up to the end of the text. So a row's result depends on its text
// alone: every sum runs in the order of the keys, from the text's first one on.
#include "attention_kinds.h"
#include "kv_layout.h"
#include "ops.h"
#include "prefetch.h"
#include "rows.h"
#include "simd.h"
#include "threads.h"
#include "transpose.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

constexpr int64_t kSide = 48;  // queries or keys of a tile
static_assert(kSide % kLanes == 0 && kSide % kMaxRows == 0, "whole vectors, and whole groups of rows");
constexpr float kInfinity = __builtin_huge_valf();
using Floats = Widened<CacheFloat32>;

int64_t rounded_up(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

// c [rows, columns] = a b, or c += a b: `a` [rows, count], `b` [count, columns], columns in whole vectors.
void multiply(int64_t rows, int64_t columns, const float* a, int64_t a_stride, const float* b, int64_t b_stride,
              int64_t count, bool fresh, float* c, int64_t c_stride) {
    Prefetch nothing;
    for (int64_t r = 0; r < rows; r += kMaxRows) {
        const int64_t here = std_min(kMaxRows, rows - r);
        for (int64_t i = 0; i < columns;) {
            const int vectors = columns - i > kLanes ? kMaxVectors : 1;
            kAccumulate<Floats>.of[here - 1][vectors - 1](a + r * a_stride, a_stride,
                                                          reinterpret_cast<const uint8_t*>(b + i), 4 * b_stride, count,
                                                          nothing, 0, fresh, c + r * c_stride + i, c_stride);
            i += vectors * kLanes;
        }
    }
}

// Adjacent buckets, as whole vectors.
struct Band {
    int64_t first, count;
};

class Disentangled {
  public:
    explicit Disentangled(const DisentangledArgs& args)
        : args_(args), batch_(*args.batch), width_(rounded_up(args.head_dim)) {
        int64_t longest = 1;
        for (int64_t seq = 0; seq < batch_.num_seqs; seq++) {
            longest = std_max(longest, length(seq));
            tiles_ += num_tiles(seq);
        }
        scores_stride_ = (longest + kSide - 1) / kSide * kSide + kLanes;
        for (int64_t apart = -(longest - 1) / kSide; apart <= (longest - 1) / kSide; apart++) {
            const int64_t first = std_max(apart * kSide - kSide + 1, 1 - longest);
            widest_ = std_max(widest_, band(first, std_min(apart * kSide + kSide - 1, longest - 1)).count);
        }
    }

    int64_t scratch_bytes() const { return 4 * args_.threads * own_floats(); }

    void run() const {
        parallel(
            [&](int64_t thread, int64_t) {
                Worker worker(*this, thread);
                take_turns(args_.num_heads * tiles_, [&](int64_t index, int64_t) {
                    worker.compute(index / tiles_, index % tiles_);
                });
            },
            batch_.num_tokens * args_.num_heads * args_.head_dim * 64);
    }

  private:
    int64_t own_floats() const { return kSide * (4 * width_ + 2 * widest_ + scores_stride_); }
    int64_t length(int64_t seq) const { return batch_.query_start[seq + 1] - batch_.query_start[seq]; }
    int64_t num_tiles(int64_t seq) const { return (length(seq) + kSide - 1) / kSide; }

    // The buckets of the distances `first` to `last`.
    Band band(int64_t first, int64_t last) const {
        const int32_t* bucket = args_.buckets + args_.num_distances;
        const int64_t begin = bucket[first] / kLanes * kLanes;
        return {begin, rounded_up(bucket[last] + 1 - begin)};
    }

    // One thread's memory.
    class Worker {
      public:
        Worker(const Disentangled& attention, int64_t thread) : of_(attention), width_(attention.width_) {
            query_ = reinterpret_cast<float*>(of_.args_.scratch) + thread * of_.own_floats();
            rows_ = query_ + kSide * width_;
            columns_ = rows_ + kSide * width_;
            result_ = columns_ + kSide * width_;
            by_query_ = result_ + kSide * width_;
            by_key_ = by_query_ + kSide * of_.widest_;
            scores_ = by_key_ + kSide * of_.widest_;
        }

        // A tile of a head's queries, numbered through the texts. A thread's tiles of a head ascend.
        void compute(int64_t head, int64_t tile) {
            if (tile < tiles_before_) seq_ = tiles_before_ = 0;  // of the next head
            while (tile >= tiles_before_ + of_.num_tiles(seq_)) tiles_before_ += of_.num_tiles(seq_), seq_++;
            const DisentangledArgs& args = of_.args_;
            const int64_t start = of_.batch_.query_start[seq_], length = of_.length(seq_);
            const int64_t first = (tile - tiles_before_) * kSide, rows = std_min(kSide, length - first);
            load(kQueries, head, start + first, rows, query_);
            for (int64_t key = 0; key < length; key += kSide) {
                const int64_t count = std_min(kSide, length - key);
                load(kKeys, head, start + key, count, rows_);
                score(head, first, rows, key, count);
            }
            float sums[kSide];
            for (int64_t r = 0; r < rows; r++) sums[r] = weigh(scores_ + r * of_.scores_stride_, length);
            for (int64_t key = 0; key < length; key += kSide) {
                const int64_t count = std_min(kSide, length - key);
                load(kValues, head, start + key, count, rows_);
                multiply(rows, width_, scores_ + key, of_.scores_stride_, rows_, width_, count, key == 0, result_, width_);
            }
            for (int64_t r = 0; r < rows; r++) {
                const int64_t at = ((start + first + r) * args.num_heads + head) * args.head_dim;
                const f32x16 inverse = div(set_f32(1.0f), set_f32(sums[r]));
                for (int64_t i = 0; i < args.head_dim; i += kLanes) {
                    const f32x16 value = mul(load_f32(result_ + r * width_ + i), inverse);
                    write_row(args.out, args.dtype, at + i, args.head_dim - i, value);
                }
            }
        }

      private:
        enum Part : int64_t { kQueries = 0, kKeys = 1, kValues = 2 };

        // Widens a head of `count` tokens from `token` on; elements beyond the head are 0.
        void load(Part part, int64_t head, int64_t token, int64_t count, float* target) const {
            const DisentangledArgs& args = of_.args_;
            for (int64_t r = 0; r < count; r++) {
                const int64_t at = (((token + r) * 3 + part) * args.num_heads + head) * args.head_dim;
                for (int64_t i = 0; i < width_; i += kLanes)
                    store_f32(target + r * width_ + i,
                              load_some_as_f32(args.qkv, args.dtype, at + i, args.head_dim - i));
            }
        }

        // Scores, not yet scaled, of the queries from `first` on and the `count` keys from `key` on, which are loaded.
        void score(int64_t head, int64_t first, int64_t rows, int64_t key, int64_t count) const {
            const DisentangledArgs& args = of_.args_;
            const int64_t stride = of_.scores_stride_, size = args.head_dim;
            transpose_keys(count);
            float* scores = scores_ + key;
            multiply(rows, rounded_up(count), query_, width_, columns_, kSide, size, true, scores, stride);
            const Band band = of_.band(first - key - count + 1, first + rows - 1 - key);
            const int32_t* bucket = args.buckets + args.num_distances + first - key;
            const int64_t table = head * size * args.num_buckets + band.first;
            if (args.keys) {
                multiply(rows, band.count, query_, width_, args.keys + table, args.num_buckets, size, true, by_query_,
                         of_.widest_);
                for (int64_t r = 0; r < rows; r++) {
                    const float* products = by_query_ + r * of_.widest_;
                    for (int64_t j = 0; j < count; j++) scores[r * stride + j] += products[bucket[r - j] - band.first];
                }
            }
            if (args.queries) {
                multiply(count, band.count, rows_, width_, args.queries + table, args.num_buckets, size, true, by_key_,
                         of_.widest_);
                for (int64_t r = 0; r < rows; r++) {
                    const float* products = by_key_;
                    for (int64_t j = 0; j < count; j++, products += of_.widest_)
                        scores[r * stride + j] += products[bucket[r - j] - band.first];
                }
            }
        }

        // The loaded keys as columns; those beyond `count`, up to a whole vector, have any content.
        void transpose_keys(int64_t count) const {
            for (int64_t row = 0; row < count; row += kLanes) {
                for (int64_t i = 0; i < width_; i += kLanes) {
                    i32x16 square[kLanes];
                    for (int64_t k = 0; k < kLanes; k++) square[k] = load_i32(rows_ + (row + k) * width_ + i);
                    transpose(square);
                    for (int64_t k = 0; k < kLanes; k++) store_i32(columns_ + (i + k) * kSide + row, square[k]);
                }
            }
        }

        // Turns a row's scores into weights; returns their sum.
        float weigh(float* row, int64_t length) const {
            const int64_t end = rounded_up(length);
            for (int64_t i = length; i < end; i++) row[i] = -kInfinity;
            f32x16 most = set_f32(-kInfinity), total = zero_f32();
            for (int64_t i = 0; i < end; i += kLanes) most = max(load_f32(row + i), most);
            // The largest is subtracted before scaling, so that its own weight is exactly 1, however large it is.
            const f32x16 scale = set_f32(of_.args_.scale * kLog2E), largest = set_f32(max_lane(most));
            for (int64_t i = 0; i < end; i += kLanes) {
                const f32x16 weight = exp2(mul(sub(load_f32(row + i), largest), scale));
                store_f32(row + i, weight);
                total = add(total, weight);
            }
            return sum_lanes(total);
        }

        const Disentangled& of_;
        const int64_t width_;
        float *query_, *rows_, *columns_, *result_;  // [kSide, width_]; `columns_` [width_, kSide]
        float *by_query_, *by_key_;                  // [kSide, widest_]: products with the band's keys and queries
        float* scores_;                              // [kSide, scores_stride_]
        int64_t seq_ = 0, tiles_before_ = 0;         // of the last tile
    };

    const DisentangledArgs& args_;
    const Batch& batch_;
    const int64_t width_;
    int64_t tiles_ = 0, widest_ = 0, scores_stride_ = 0;
};

}  // namespace

int64_t disentangled_scratch_bytes(const DisentangledArgs& args) { return Disentangled(args).scratch_bytes(); }

void disentangled(const DisentangledArgs& args) { Disentangled(args).run(); }

}  // namespace PENSTOCK_ISA
}  // namespace penstock
