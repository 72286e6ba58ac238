// Attention of a ragged batch over the paged cache, for decodes and prompt chunks: causal, bidirectional over texts, or
// causal but for tokens that also see later ones, as those of an image do.
//
// The queries that share a key head, tokens x heads, are its rows. Up to kRows rows form a tile. A tile processes
// its keys in superblocks of 512, at fixed absolute positions: scores, their maximum, powers of 2, weighted values. The
// partial results of superblocks are combined from first to last, as in online softmax (Milakov and Gimelshein, 2018,
// arXiv:1805.02867). So a row's result depends only on its query and its keys; a masked key has weight 0, and adding
// zeros changes nothing. Nor does it depend on which thread computes a superblock: threads take whole tiles; if there
// are few, the superblocks of all tiles are divided by work, and the parts of a divided tile are combined in memory.
//
// Over a cache whose elements are exact in bfloat16 (bfloat16 or int8), the attention weights are rounded to bfloat16,
// so that products with values are products of bfloat16 pairs, exact and summed in float32; other instruction sets
// compute the same on widened elements, and AMX in tiles (`attention_tiles.h`), in an order of its own. Queries for
// bfloat16 keys are rounded alike. Queries for int8 keys are transformed as these are (`hadamard.h`) and rounded to 8
// bits with a scale per head: scores are then exact sums of integers. Weighted sums of int8 values are transformed
// back.
//
// Adjacent decodes whose first blocks are the same, as after a common prompt, form tiles together: the shared keys are
// read and widened once for all of them.
#include "attention_kinds.h"
#if defined(PENSTOCK_TILES)
#include "attention_tiles.h"
#endif
#include "hadamard.h"
#include "kv_layout.h"
#include "latents.h"
#include "ops.h"
#include "prefetch.h"
#include "rows.h"
#include "simd.h"
#include "threads.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

constexpr int64_t kSuperblock = 512;
constexpr int64_t kScoreStride = kSuperblock + 3 * kLanes;  // an odd number of lines, so that rows use different cache sets
constexpr int64_t kTileWork = 4;                            // cost of reading a key, in rows
constexpr int64_t kManyTiles = 16;                          // per thread, so that none waits long for the last
constexpr float kInfinity = __builtin_huge_valf();

// The data read after the current.
struct Next {
    const uint8_t* data;
    int64_t bytes;
};

// A tile: rows of one key head, from one sequence, or from adjacent one-query sequences whose first blocks are the
// same.
struct Tile {
    int64_t seq, num_seqs;
    int64_t first;       // index among the sequence's tokens x heads that share the key head
    int rows;
    int64_t begin, end;  // keys that any of its rows sees
    int64_t shared;      // end of the keys that its sequences have in the same blocks
    int64_t head = 0;
};

// Partial result of one or several superblocks: for each row the maximum score, as an exponent of 2, the sum of the
// weights, and the weighted values.
struct Part {
    float* most;    // [kRows]
    float* sum;     // [kRows]
    float* values;  // [kRows, width]
};

template <class Kind, class Keys, class Values>
class Attention {
    using Query = typename Keys::Factor;
    using Weight = typename Values::Factor;
    static constexpr int kRows = Keys::kRows, kRowLanes = (kRows + kLanes - 1) / kLanes * kLanes;
    static constexpr int64_t kValueTokens = Values::kTokens;  // whose weighted values are summed together

  public:
    explicit Attention(const AttentionArgs& args)
        : args_(args),
          batch_(*args.batch),
          blocks_(*args.cache),
          kv_heads_(args.cache->num_heads),
          share_(args.num_heads / kv_heads_),
          head_dim_(args.cache->head_dim),
          width_((head_dim_ + kLanes - 1) / kLanes * kLanes),
          latent_floats_(blocks_.latent() ? latent_floats(blocks_.block_size, head_dim_) : 0) {
        for (int64_t seq = 0; seq < batch_.num_seqs; seq++) longest_ = std_max(longest_, batch_.seq_lens[seq]);
    }

    int64_t scratch_bytes() const { return 4 * args_.threads * (own_floats() + shared_floats()); }

    void run() {
        int64_t all_tiles = 0;
        for (int64_t seq = 0, count; seq < batch_.num_seqs; seq += count) {
            count = num_alike(seq);
            const int64_t tiles = num_tiles(seq);
            for (int64_t index = 0; index < tiles; index++)
                work_ += kv_heads_ * work_of(tile(seq, count, index, tiles));
            all_tiles += tiles * kv_heads_;
        }
        parallel(
            [&](int64_t thread, int64_t threads) {
                const typename Keys::Registers registers;
                Worker worker(*this, thread);
                if (all_tiles >= kManyTiles * threads)
                    return take_turns(all_tiles, [&](int64_t index, int64_t) { worker.compute_whole(index); });
                worker.compute(thread, threads);
                barrier();
                worker.finish_divided(thread);
            },
            work_ * head_dim_ * Kind::kSize / 2);
    }

  private:
    int64_t part_floats() const { return 2 * kRowLanes + kRows * width_; }
    int64_t own_floats() const {
        return kRows * (width_ + 3 * kScoreStride) + 2 * part_floats() + latent_floats_ + group_floats();
    }
    // Of values laid out for tiles.
    int64_t group_floats() const {
#if defined(PENSTOCK_TILES)
        if constexpr (Values::kTiled) return TiledValues<Kind>::memory_floats(head_dim_);
#endif
        return 0;
    }
    int64_t shared_floats() const {
        return args_.threads > 1 ? (longest_ + kSuperblock - 1) / kSuperblock * part_floats() : 0;
    }

    Part part_at(float* memory) const { return {memory, memory + kRowLanes, memory + 2 * kRowLanes}; }
    // The part of a superblock of the tile that is divided among threads from `owner` on.
    Part shared_part(int64_t owner, int64_t superblock) const {
        float* memory = reinterpret_cast<float*>(args_.scratch) + args_.threads * own_floats();
        return part_at(memory + owner * shared_floats() + superblock * part_floats());
    }

    int64_t query_len(int64_t seq) const { return batch_.query_start[seq + 1] - batch_.query_start[seq]; }
    int64_t num_tiles(int64_t seq) const { return (query_len(seq) * share_ + kRows - 1) / kRows; }

    // How many sequences, from `seq` on, form tiles together.
    int64_t num_alike(int64_t seq) const {
        const auto block = [&](int64_t other) { return *table(other); };
        int64_t last = seq + 1;
        if (args_.window || args_.chunk || query_len(seq) > 1) return 1;
        while (last < batch_.num_seqs && query_len(last) == 1 && block(last) == block(seq) &&
               (last + 1 - seq) * share_ <= kRows)
            last++;
        return last - seq;
    }

    // End of the whole groups of keys that these sequences have in the same blocks.
    int64_t end_of_shared(int64_t seq, int64_t count) const {
        int64_t shared = batch_.seq_lens[seq];
        for (int64_t other = seq + 1; other < seq + count; other++) {
            const int64_t most = std_min(shared, batch_.seq_lens[other]) / blocks_.block_size;
            int64_t block = 0;
            while (block < most && table(seq)[block] == table(other)[block]) block++;
            shared = block * blocks_.block_size;
        }
        return shared / kValueTokens * kValueTokens;
    }

    // One of the evenly sized tiles of a sequence's rows, or of `count` sequences that form tiles together.
    Tile tile(int64_t seq, int64_t count, int64_t index, int64_t tiles) const {
        const int64_t rows = count * query_len(seq) * share_;
        const int64_t first = rows * index / tiles, last = rows * (index + 1) / tiles;
        Tile tile{seq, count, first, static_cast<int>(last - first), 0, 0, 0};
        tile.begin = first_key(tile, 0);
        for (int64_t i = 0; i < count; i++) tile.end = std_max(tile.end, end_key(tile, tile.rows - 1 - i * share_));
        tile.shared = count > 1 ? end_of_shared(seq, count) : tile.end;
        return tile;
    }

    // The sequence of a tile's row, and the row's index among its tokens x heads.
    int64_t seq_of(const Tile& tile, int row) const { return tile.num_seqs > 1 ? tile.seq + row / share_ : tile.seq; }
    int64_t index_of(const Tile& tile, int row) const { return tile.num_seqs > 1 ? row % share_ : tile.first + row; }
    // Offset of a row's first element in the queries or results, whose tokens are `stride` apart and heads `step`.
    int64_t place_of(const Tile& tile, int row, int64_t stride, int64_t step) const {
        return (batch_.query_start[seq_of(tile, row)] + index_of(tile, row) / share_) * stride +
               head_of(tile, row) * step;
    }
    // The query head of a row.
    int64_t head_of(const Tile& tile, int row) const { return tile.head * share_ + index_of(tile, row) % share_; }
    int64_t end_key(const Tile& tile, int row) const {
        const int64_t seq = seq_of(tile, row);
        const int64_t next = position(tile, row) + 1;
        if (args_.takes_ends && batch_.seen_ends) {
            const int64_t token = batch_.query_start[seq] + index_of(tile, row) / share_;
            return std_min(batch_.seq_lens[seq], batch_.seen_ends[token]);
        }
        if (!args_.bidirectional) return next;
        return args_.window ? std_min(batch_.seq_lens[seq], next - 1 + args_.window) : batch_.seq_lens[seq];
    }
    int64_t first_key(const Tile& tile, int row) const { return first_seen(position(tile, row) + 1); }
    int64_t position(const Tile& tile, int row) const {
        const int64_t seq = seq_of(tile, row);
        return batch_.seq_lens[seq] - query_len(seq) + index_of(tile, row) / share_;
    }
    int64_t first_key(int64_t seq) const {  // of any of its rows
        return first_seen(batch_.seq_lens[seq] - query_len(seq) + 1);
    }
    // The first key seen by a query that ends before key `end`.
    int64_t first_seen(int64_t end) const {
        if (args_.chunk) return (end - 1) / args_.chunk * args_.chunk;
        return args_.window ? std_max(0, end - args_.window) : 0;
    }

    const int32_t* table(int64_t seq) const { return batch_.blocks + batch_.table_start[seq]; }

    static int64_t key_work(const Tile& tile) {
        const int64_t apart = (tile.num_seqs - 1) * (tile.end - tile.shared) / tile.end;
        return tile.rows + kTileWork * (1 + apart);
    }
    static int64_t work_of(const Tile& tile) { return key_work(tile) * (tile.end - tile.begin); }

    // One thread's share of the work, and its memory.
    class Worker {
      public:
        Worker(const Attention& attention, int64_t thread)
            : of_(attention), stride_(attention.width_) {
            float* memory = reinterpret_cast<float*>(of_.args_.scratch) + thread * of_.own_floats();
            query_ = reinterpret_cast<Query*>(memory);
            scores_ = memory + kRows * stride_;
            key_scales_ = scores_ + kRows * kScoreStride;
            value_scales_ = key_scales_ + kRows * kScoreStride;
            float* parts = value_scales_ + kRows * kScoreStride;
            part_ = of_.part_at(parts);
            total_ = of_.part_at(parts + of_.part_floats());
            latents_ = reinterpret_cast<uint8_t*>(parts + 2 * of_.part_floats());
            groups_ = latents_ + 4 * of_.latent_floats_;
        }

        // One tile, numbered through the sequences and the heads of each. A thread's tiles ascend.
        void compute_whole(int64_t index) {
            while (index >= first_index_ + num_here_) {
                first_index_ += num_here_;
                seq_ += alike_;
                alike_ = of_.num_alike(seq_);
                num_here_ = of_.num_tiles(seq_) * of_.kv_heads_;
            }
            const int64_t tiles = num_here_ / of_.kv_heads_, here = index - first_index_;
            Tile tile = of_.tile(seq_, alike_, here % tiles, tiles);
            tile.head = here / tiles;
            after_ = after(tile, seq_ + alike_);
            compute_tile(tile, 0, 0, work_of(tile), 1);
        }

        // A superblock belongs to the thread in whose share of the total work it begins.
        void compute(int64_t thread, int64_t threads) {
            const int64_t from = of_.work_ * thread / threads, to = of_.work_ * (thread + 1) / threads;
            int64_t at = 0;
            for (int64_t seq = 0, count; seq < of_.batch_.num_seqs && at < to; seq += count) {
                const int64_t tiles = of_.num_tiles(seq);
                count = of_.num_alike(seq);
                for (int64_t index = 0; index < tiles * of_.kv_heads_ && at < to; index++) {
                    Tile tile = of_.tile(seq, count, index % tiles, tiles);
                    tile.head = index / tiles;
                    const int64_t end = at + work_of(tile);
                    if (end > from) {
                        after_ = after(tile, seq + count);
                        compute_tile(tile, at, from, to, threads);
                    }
                    at = end;
                }
            }
        }

        // Combine the parts of the tile that this thread began and others continued.
        void finish_divided(int64_t thread) {
            if (!divided_) return;
            for (int64_t block = tile_.begin / kSuperblock; block * kSuperblock < tile_.end; block++)
                merge(tile_, block, of_.shared_part(thread, block));
            write(tile_);
        }

      private:
        // The superblocks of a tile that begin within `from` to `to`; the tile's first begins at `at`.
        void compute_tile(const Tile& tile, int64_t at, int64_t from, int64_t to, int64_t threads) {
            const int64_t first = tile.begin / kSuperblock, last = (tile.end - 1) / kSuperblock;
            const auto start = [&](int64_t block) {
                return at + key_work(tile) * (std_max(block * kSuperblock, tile.begin) - tile.begin);
            };
            const bool whole = at >= from && start(last) < to;
            int64_t owner = 0;
            while (!whole && at >= of_.work_ * (owner + 1) / threads) owner++;
            bool loaded = false;
            for (int64_t block = first; block <= last; block++) {
                if (start(block) < from || start(block) >= to) continue;
                if (!loaded) load_queries(tile);
                loaded = true;
                const Part part = whole ? part_ : of_.shared_part(owner, block);
                compute_superblock(tile, block, block < last, part);
                if (whole) merge(tile, block, part);
            }
            if (whole) write(tile);
            if (!whole && at >= from) divided_ = true, tile_ = tile;
        }

        void load_queries(const Tile& tile) {
            const AttentionArgs& args = of_.args_;
            for (int r = 0; r < tile.rows; r++) {
                const int64_t at = of_.place_of(tile, r, args.query_stride, args.query_step);
                Query* row = query_ + r * kQueryStep * stride_;
                if constexpr (sizeof(Query) == 1) {
                    int32_t sum;
                    alignas(64) float query[kMaxHeadDim];
                    for (int64_t i = 0; i < of_.head_dim_; i += kLanes)
                        store_f32(query + i, load_some_as_f32(args.query, args.dtype, at + i, of_.head_dim_ - i));
                    hadamard(query, of_.head_dim_);
                    query_scales_[r] = to_int8({query, kFloat32, 0, of_.head_dim_}, 0, stride_, row, &sum);
                    sum *= -Kind::kKeyBias;
                    if constexpr (Keys::kTiled) {
                        first_sums_[r] = sum;
                    } else {
                        std::memcpy(row + of_.head_dim_, &sum, 4);
                    }
                } else {
                    constexpr int32_t type = sizeof(Query) == 2 ? kBFloat16 : kFloat32;
                    for (int64_t i = 0; i < of_.head_dim_; i += kLanes) {
                        const f32x16 query = load_some_as_f32(args.query, args.dtype, at + i, of_.head_dim_ - i);
                        store_from_f32(row, type, i, Keys::kRounded ? as_bf16(query) : query);
                    }
                }
                const int64_t bytes = stride_ * static_cast<int64_t>(sizeof(Query));
                if constexpr (Keys::kTiled)  // up to whole tiles
                    std::memset(reinterpret_cast<uint8_t*>(row) + bytes, 0, static_cast<size_t>(-bytes & 63));
            }
        }

        // c [rows, columns] = a b, or c += a b; the last vector of c may be written beyond `columns`.
        template <class Side>
        static void multiply(int rows, int64_t columns, const typename Side::Factor* a, int64_t a_stride,
                             const uint8_t* b, int64_t b_step, int64_t count, const Next& next, bool fresh, float* c,
                             int64_t c_stride) {
            constexpr int64_t column_bytes = Side::kSize * Side::kGroup, most = kMaxVectors * kLanes;
            const int64_t steps = (columns + most - 1) / most * ((count + Side::kTogether - 1) / Side::kTogether);
            Prefetch prefetch(next.data, next.bytes, steps, true);
            for (int64_t i = 0; i < columns;) {
                const int vectors = columns - i > kLanes ? kMaxVectors : 1;
                kAccumulate<Side>.of[rows - 1][vectors - 1](a, a_stride, b + i * column_bytes, b_step, count, prefetch,
                                                            next.data - b, fresh, c + i, c_stride);
                i += vectors * kLanes;
            }
        }

        // The rows of a tile that belong to sequence `seq`, or to all its sequences, and the keys for them.
        struct Piece {
            int64_t head, seq, row;
            int rows;
            int64_t begin, end;
        };

        // body(piece) for the keys from `begin` to `end` shared by the tile's sequences, then for the others of each
        // sequence.
        template <class Body>
        void for_pieces(const Tile& tile, int64_t begin, int64_t end, const Body& body) const {
            const int64_t middle = std_min(std_max(tile.shared, begin), end);
            if (begin < middle) body(Piece{tile.head, tile.seq, 0, tile.rows, begin, middle});
            for (int64_t i = 0; i < tile.num_seqs && middle < end; i++) {
                const int64_t last = std_min(end, of_.batch_.seq_lens[tile.seq + i]);
                const int rows = static_cast<int>(of_.share_);
                if (middle < last) body(Piece{tile.head, tile.seq + i, i * rows, rows, middle, last});
            }
        }

        void compute_superblock(const Tile& tile, int64_t superblock, bool more, const Part& part) {
            const int64_t origin = superblock * kSuperblock;
            // Starts at a whole vector, but not before the first key's block: earlier keys may be another sequence's.
            const int64_t vector_begin = std_max(origin, tile.begin / kLanes * kLanes);
            const int64_t block_begin = tile.begin / of_.blocks_.block_size * of_.blocks_.block_size;
            const int64_t begin = std_max(vector_begin, block_begin);
            const int64_t end = std_min(origin + kSuperblock, tile.end);
            for_pieces(tile, begin, end, [&](const Piece& piece) { score(tile, piece, origin); });
            for (int r = 0; r < tile.rows; r++)
                weigh(tile, r, vector_begin - origin, end - origin, origin, part);
            const Next after = more ? keys_of(tile.seq, tile.head, end) : after_;
            for_pieces(tile, begin, end,
                       [&](const Piece& piece) { add_values(piece, origin, begin, after, part); });
        }

        // The data likely read after a tile: keys of the next head, or of the next sequence.
        Next after(const Tile& tile, int64_t next_seq) const {
            if (tile.head + 1 < of_.kv_heads_) return keys_of(tile.seq, tile.head + 1, tile.begin);
            if (next_seq < of_.batch_.num_seqs) return keys_of(next_seq, 0, of_.first_key(next_seq));
            return {keys_of(tile.seq, tile.head, tile.begin).data, 0};
        }

        // A head's keys in the block of the sequence's `key`; prefetches their few scales at once.
        Next keys_of(int64_t seq, int64_t head, int64_t key) const {
            const Blocks<Kind>& blocks = of_.blocks_;
            const int64_t block = of_.table(seq)[key / blocks.block_size];
            for (int64_t i = 0; Kind::kScaled && i < 2 * blocks.block_size; i += kLanes)
                __builtin_prefetch(blocks.scales(block, head) + i);
            return {blocks.keys(block, head), blocks.part_bytes()};
        }

        // A piece's values in the block of `key`.
        Next values_of(const Piece& piece, int64_t key) const {
            const Blocks<Kind>& blocks = of_.blocks_;
            const int64_t block = key / blocks.block_size;
            const int64_t count = std_min(piece.end - block * blocks.block_size, blocks.block_size);
            return {blocks.values(of_.table(piece.seq)[block], piece.head), count * of_.head_dim_ * Kind::kSize};
        }

        // A piece's values of the tokens in a group from `key` on, as far as they are in one block.
        Next group_values(const Piece& piece, int64_t key) const {
            const Blocks<Kind>& blocks = of_.blocks_;
            const int64_t offset = key % blocks.block_size;
            const int64_t count = std_min(std_min(kValueTokens, blocks.block_size - offset), piece.end - key);
            const int64_t bytes = of_.head_dim_ * Kind::kSize;
            return {blocks.values(of_.table(piece.seq)[key / blocks.block_size], piece.head) + offset * bytes,
                    count * bytes};
        }

        // Scores of a piece, and for int8 the scales of its keys and values.
        void score(const Tile& tile, const Piece& piece, int64_t origin) {
            const Blocks<Kind>& blocks = of_.blocks_;
            const int64_t size = blocks.block_size;
            const int32_t* table = of_.table(piece.seq);
            for (int64_t key = piece.begin, count; key < piece.end; key += count) {
                const int64_t block = key / size, offset = key % size;
                count = std_min(size - offset, piece.end - key);
                const Next next = key + count < piece.end ? keys_of(piece.seq, piece.head, key + count)
                                                          : values_of(piece, piece.begin);
                constexpr int64_t word = Kind::kKeyGroup * Kind::kSize;
                const Query* queries = query_ + piece.row * kQueryStep * stride_;
                const uint8_t* keys = blocks.keys(table[block], piece.head) + offset * word;
                float* scores = scores_ + piece.row * kScoreStride + key - origin;
                if constexpr (Keys::kTiled) {
                    multiply_in_tiles(piece.rows, count, queries, keys, next, scores);
                } else {
                    multiply<Keys>(piece.rows, count, queries, kQueryStep * stride_, keys, size * word, of_.head_dim_,
                                   next, true, scores, kScoreStride);
                }
                if (!Kind::kScaled) continue;
                const float* scales = blocks.scales(table[block], piece.head) + offset;
                const float* value_scales = blocks.value_scales(table[block], piece.head) + offset;
                for (int64_t r = piece.row; r < piece.row + piece.rows; r += scales_step(tile)) {
                    const int64_t at = r * kScoreStride + key - origin;
                    for (int64_t i = 0; i < count; i += kLanes) {  // the excess is overwritten later or masked
                        store_f32(key_scales_ + at + i, load_f32(scales + i));
                        store_f32(value_scales_ + at + i, load_f32(value_scales + i));
                    }
                }
            }
        }

        // Rows that share scales, stored at the first of them.
        int64_t scales_step(const Tile& tile) const { return tile.num_seqs > 1 ? of_.share_ : kRows; }

        // Add the weighted values of a piece; they are its rows' first ones if it begins at `first`.
        void add_values(const Piece& piece, int64_t origin, int64_t first, const Next& after, const Part& part) {
            if constexpr (Values::kTiled) {
                add_values_by_tiles(piece, origin, first, after, part);
            } else {
                add_values_by_vectors(piece, origin, first, after, part);
            }
        }

        void add_values_by_vectors(const Piece& piece, int64_t origin, int64_t first, const Next& after,
                                   const Part& part) {
            const Blocks<Kind>& blocks = of_.blocks_;
            const int64_t size = blocks.block_size;
            const int32_t* table = of_.table(piece.seq);
            const LatentValues<Kind> latents(blocks, latents_);
            for (int64_t key = piece.begin, count; key < piece.end; key += count) {
                const int64_t block = key / size, offset = key % size;
                count = std_min(size - offset, piece.end - key);
                const uint8_t* values = blocks.values(table[block], piece.head) + offset * of_.head_dim_ * Kind::kSize;
                int64_t step = of_.head_dim_ * Kind::kValueGroup * Kind::kSize;
                if (blocks.latent()) {
                    values = latents.lay_out(table[block], piece.head, offset, count);
                    step = latents.step();
                }
                multiply<Values>(piece.rows, of_.head_dim_, weights(piece.row) + key - origin, weights(1) - weights(0),
                                 values, step, count, key + count < piece.end ? values_of(piece, key + count) : after,
                                 key == first, part.values + piece.row * stride_, stride_);
            }
        }

#if defined(PENSTOCK_TILES)
        // Scores of `count` keys of a block.
        void multiply_in_tiles(int rows, int64_t count, const Query* queries, const uint8_t* keys, const Next& next,
                               float* scores) const {
            const int64_t lines = of_.head_dim_ / Kind::kKeyGroup, line_bytes = 4 * of_.blocks_.block_size;
            Prefetch prefetch(next.data, next.bytes, num_pairs_of_tiles(count) * (lines / kTile), true);
            multiply_keys<Keys>(Tiles(rows), queries, 4 * stride_, keys, line_bytes, lines, count, prefetch, scores,
                                4 * kScoreStride);
        }

        void add_values_by_tiles(const Piece& piece, int64_t origin, int64_t first, const Next& after,
                                 const Part& part) {
            using Groups = TiledValues<Kind>;
            const Tiles tiles(piece.rows);
            const Groups groups(of_.blocks_, of_.table(piece.seq), piece.head, latents_, groups_);
            for (int64_t key = piece.begin, last; key < piece.end; key = last) {
                typename Groups::Group together[Groups::kTogether];
                const int64_t start = key / kValueTokens * kValueTokens;
                last = std_min(start + Groups::kTogether * kValueTokens, piece.end);
                int count = 0;
                for (int64_t from = key, to; from < last; from = to) {
                    to = std_min(from / kValueTokens * kValueTokens + kValueTokens, last);
                    const int64_t ahead = start + (Groups::kTogether + count) * kValueTokens;
                    Next next{after.data, last == piece.end && count == 0 ? after.bytes : 0};
                    if (ahead < piece.end) next = group_values(piece, ahead);
                    together[count] = groups.group(from, to, count, next.data, next.bytes);
                    count++;
                }
                multiply_values(tiles, weights(piece.row) + start - origin, 4 * kScoreStride, together, count,
                                of_.head_dim_, key == first, part.values + piece.row * stride_, 4 * stride_);
            }
        }
#endif

        // Turn a row's scores `begin` to `end`, relative to `origin`, into the weights of the keys that it sees.
        void weigh(const Tile& tile, int r, int64_t begin, int64_t end, int64_t origin, const Part& part) const {
            const int64_t low = std_max(of_.first_key(tile, r) - origin, begin);
            const int64_t high = std_min(of_.end_key(tile, r) - origin, end);
            const int64_t first = low / kLanes * kLanes, last = (high + kLanes - 1) / kLanes * kLanes;
            begin = begin / kValueTokens * kValueTokens, end = (end + kValueTokens - 1) / kValueTokens * kValueTokens;
            if (low >= high) return store_zeros(r, begin, end);  // its result is not used
            store_zeros(r, begin, first);
            float* scores = scores_ + r * kScoreStride;
            const float* key_scales = key_scales_ + r / scales_step(tile) * scales_step(tile) * kScoreStride;
            const float* value_scales = key_scales + (value_scales_ - key_scales_);
            const float soft_cap = of_.args_.soft_cap;
            const float* bias = bias_of(tile, r, origin);
            const bool scaled = soft_cap != 0.0f || bias;  // the scores, before their maximum is taken
            const float unit = of_.args_.scale * (Kind::kScaled ? query_scales_[r] : 1.0f);
            const f32x16 lowest = set_f32(static_cast<float>(low)), highest = set_f32(static_cast<float>(high));
            const f32x16 nothing = set_f32(-kInfinity);
            alignas(64) static const float lanes[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
            const auto index = [&](int64_t i) { return add(load_f32(lanes), set_f32(static_cast<float>(i))); };
            f32x16 largest = nothing;
            for (int64_t i = first; i < last; i += kLanes) {
                f32x16 score = sum_at(r, scores + i);
                if (Kind::kScaled) score = mul(score, load_f32(key_scales + i));
                if (scaled) score = mul(score, set_f32(unit));
                if (soft_cap != 0.0f) score = cap(score, soft_cap);
                if (bias) score = add(score, load_f32(bias + i));
                if (i < low || i + kLanes > high) {
                    score = select_less(index(i), highest, score, nothing);
                    score = select_less(index(i), lowest, nothing, score);
                }
                store_f32(scores + i, score);
                largest = max(score, largest);
            }
            const float factor = (scaled ? 1.0f : unit) * kLog2E;
            part.most[r] = max_lane(largest) * factor;
            const f32x16 scale = set_f32(factor), reference = set_f32(-part.most[r]);
            f32x16 total = zero_f32();
            for (int64_t i = first; i < last; i += kLanes) {
                f32x16 weight = exp2(fma(load_f32(scores + i), scale, reference));
                total = add(total, weight);
                if (Kind::kScaled) {
                    f32x16 value_scale = load_f32(value_scales + i);
                    if (i < low || i + kLanes > high) {  // there may be no scales there
                        value_scale = select_less(index(i), highest, value_scale, zero_f32());
                        value_scale = select_less(index(i), lowest, zero_f32(), value_scale);
                    }
                    weight = mul(weight, value_scale);
                }
                store_weights(r, i, weight);
            }
            store_zeros(r, last, end);  // last, since narrow weights overwrite the scores before them
            part.sum[r] = sum_lanes(total);
        }

        // A row's products of query and keys.
        f32x16 sum_at(int r, const float* sums) const {
            if constexpr (Keys::kIntegerSums) return to_f32(add(load_i32(sums), set_i32(first_sums_[r])));
            return load_f32(sums);
        }

        // The position bias of a row's key at `origin`, with those of the keys after it; null if there is none.
        const float* bias_of(const Tile& tile, int r, int64_t origin) const {
            const AttentionArgs& args = of_.args_;
            if (!args.position_bias) return nullptr;
            return args.position_bias + of_.head_of(tile, r) * args.bias_stride + args.bias_stride / 2 + origin -
                   of_.position(tile, r);
        }

        // A row's weights, stored where its scores were.
        Weight* weights(int64_t row) const { return reinterpret_cast<Weight*>(scores_ + row * kScoreStride); }
        void store_weights(int64_t row, int64_t at, f32x16 weight) const {
            if constexpr (sizeof(Weight) == 2) {
                store_bf16(weights(row) + at, weight);
            } else {
                store_f32(weights(row) + at, Values::kRounded ? as_bf16(weight) : weight);
            }
        }
        void store_zeros(int64_t row, int64_t begin, int64_t end) const {
            for (int64_t i = begin; i < end; i += kLanes) store_weights(row, i, zero_f32());
        }

        static f32x16 cap(f32x16 score, float soft_cap) {
            const f32x16 one = set_f32(1.0f), two = set_f32(2.0f);
            const f32x16 power = exp(mul(score, set_f32(2.0f / soft_cap)));
            return mul(sub(one, div(two, add(power, one))), set_f32(soft_cap));  // tanh
        }

        // Combine a superblock's partial result with those before it.
        void merge(const Tile& tile, int64_t superblock, const Part& part) {
            const bool first = superblock == tile.begin / kSuperblock;
            if (first)
                for (int r = 0; r < tile.rows; r++) total_.most[r] = -kInfinity, total_.sum[r] = 0.0f;
            for (int r = 0; r < tile.rows; r++) {
                float* values = total_.values + r * stride_;
                const float* more = part.values + r * stride_;
                const int64_t begin = superblock * kSuperblock, end = begin + kSuperblock;
                const bool unseen = of_.first_key(tile, r) >= end || of_.end_key(tile, r) <= begin;
                if (unseen || total_.sum[r] == 0.0f) {  // one of the two is empty
                    if (!unseen) total_.most[r] = part.most[r], total_.sum[r] = part.sum[r];
                    for (int64_t i = 0; i < stride_ && (first || !unseen); i += kLanes)
                        store_f32(values + i, unseen ? zero_f32() : load_f32(more + i));
                    continue;
                }
                const float most = total_.most[r] > part.most[r] ? total_.most[r] : part.most[r];
                const f32x16 left = exp2(set_f32(total_.most[r] - most)), right = exp2(set_f32(part.most[r] - most));
                for (int64_t i = 0; i < stride_; i += kLanes)
                    store_f32(values + i, fma(load_f32(more + i), right, mul(load_f32(values + i), left)));
                const f32x16 sum = fma(set_f32(part.sum[r]), right, mul(set_f32(total_.sum[r]), left));
                write_row(total_.sum, kFloat32, r, 1, sum);
                total_.most[r] = most;
            }
        }

        void write(const Tile& tile) {
            const AttentionArgs& args = of_.args_;
            for (int r = 0; r < tile.rows; r++) {
                const int64_t at = of_.place_of(tile, r, args.num_heads * of_.head_dim_, of_.head_dim_);
                f32x16 sum = set_f32(total_.sum[r]);
                if (args.sinks) {  // as a key with this score whose value is 0
                    const float sink = args.sinks[of_.head_of(tile, r)] * kLog2E - total_.most[r];
                    sum = add(sum, exp2(min(set_f32(126.0f), set_f32(sink))));
                }
                const f32x16 inverse = div(set_f32(1.0f), sum);
                if (Kind::kScaled) hadamard(total_.values + r * stride_, of_.head_dim_);
                for (int64_t i = 0; i < of_.head_dim_; i += kLanes) {
                    // Add +0, as a sum of -0 would become +0 by adding more zeros.
                    const f32x16 value = add(load_f32(total_.values + r * stride_ + i), zero_f32());
                    write_row(args.out, args.dtype, at + i, of_.head_dim_ - i, mul(value, inverse));
                }
            }
        }

        const Attention& of_;
        const int64_t stride_;
        static constexpr int64_t kQueryStep = sizeof(float) / sizeof(Query);  // rows are as far apart as in float32

        Query* query_;
        float query_scales_[kRows];  // int8 only
        int32_t first_sums_[kRows];  // int8 in tiles only: what subtracts the keys' bias
        float *scores_, *key_scales_, *value_scales_;
        Part part_, total_;
        uint8_t* latents_;  // values of one block
        uint8_t* groups_;   // of values, for tiles
        Next after_{};  // the data likely read after the current tile
        int64_t seq_ = 0, alike_ = 0, first_index_ = 0, num_here_ = 0;  // position of compute_whole()
        bool divided_ = false;
        Tile tile_{};
    };

    const AttentionArgs& args_;
    const Batch& batch_;
    const Blocks<Kind> blocks_;
    const int64_t kv_heads_, share_, head_dim_, width_, latent_floats_;
    int64_t longest_ = 0, work_ = 0;
};

// Over a widened cache.
template <class Kind>
using Wide = Attention<Kind, Widened<Kind>, Widened<Kind>>;
#if defined(PENSTOCK_TILES)
using OverBFloat16 = Attention<CacheBFloat16, TiledPairs, TiledPairs>;
using OverInt8 = Attention<CacheInt8, TiledIntegers, TiledPairs>;
#else
using OverBFloat16 = Attention<CacheBFloat16, Paired<CacheBFloat16>, Paired<CacheBFloat16>>;
using OverInt8 = Attention<CacheInt8, Integers, Paired<CacheInt8>>;
#endif

// Calls body(attention) with that of the cache's kind.
template <class Body>
auto with_kind(const AttentionArgs& args, const Body& body) {
    switch (args.cache->kind) {
        case kFloat32: return body(Wide<CacheFloat32>(args));
        case kFloat16: return body(Wide<CacheFloat16>(args));
        case kBFloat16: return body(OverBFloat16(args));
        default: return body(OverInt8(args));
    }
}

}  // namespace

int64_t attention_scratch_bytes(const AttentionArgs& args) {
    return with_kind(args, [](const auto& attention) { return attention.scratch_bytes(); });
}

void attention(const AttentionArgs& args) {
    with_kind(args, [](auto&& attention) { attention.run(); });
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
