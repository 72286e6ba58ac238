// The library's operations: the arguments of each, and the table of one instruction set's versions of them.
//
// The caller owns all memory. Sizes are in elements unless the name says bytes. All threads of a team (threads.h) take part in a call.
#pragma once

#include <cstdint>

#include "ranks.h"

namespace penstock {

enum DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// Storage types of the scales and offsets of integer weights, beside those of DType.
enum StoredType : int32_t { kNone = -1, kInt8 = 3, kUInt8 = 4 };

enum WeightKind : int32_t {
    kWeightFloat32 = 0,
    kWeightBfp16 = 1,  // bfloat16 on sets without bfloat16 products: 16-bit integers that share an exponent
    kWeightIntegers = 2,
    kWeightFloat16 = 3,   // multiplied as float32
    kWeightBFloat16 = 4,  // this and the next: on instruction sets that multiply bfloat16
    kWeightBFloat12 = 5,  // bfloat16 in 12 bits
    kWeightFloat8 = 6,    // multiplied as float32
    kWeightFloat8By16 = 7,  // multiplied as bfloat16, on instruction sets that do so
};

// The offset of integer weights: the middle of their range; a zero per group, in whole steps or in 128ths of the
// range; or a minimum per group.
enum Offset : int32_t { kCentre = 0, kZero = 1, kFraction = 2, kMinimum = 3 };

// A packed weight [rows, columns]: y = x Wᵀ. `linear_kind.h` and the other `linear_*.h` draw the layouts.
struct Weight {
    int32_t kind;
    int32_t gated;  // gate and up rows are interleaved: each panel holds half a panel of each
    int64_t rows;
    int64_t columns;
    uint8_t* data;
    float* row_scales;  // [rows rounded up to panels], if a super scale covers a whole row; else null
    // The integer format; see `penstock.config.weight_formats`.
    int32_t bits;
    int32_t group;
    int32_t scale_type;
    int32_t offset;
    int32_t offset_type;
    int32_t super_type;
    int64_t super_columns;
    int64_t x_group;  // columns of activations that share a scale: 32 or 128
    int64_t x_bytes;  // bytes that activations are rounded to: 1, or 2 (each weight is then multiplied twice)
};

// Activation of a gate, which then multiplies `up`; or of a map's output. Those from kRelu on are for ActivateArgs alone.
enum Activation : int32_t {
    kNoActivation = 0,
    kSilu = 1,
    kGeluTanh = 2,
    kClampedSwiglu = 3,
    kSquaredRelu = 4,
    kGelu = 5,
    kRelu = 6,
    kLogistic = 7,  // the sigmoid
    kTanh = 8,
    kClip = 9,  // to -1 to 1
    kXielu = 10,
};

// The rows of a pass grouped into runs by adapter: a run's rows are contiguous in `rows`.
struct AdapterRows {
    int64_t num_runs;       // 0: no row has an adapter, and the other fields are not read
    const int32_t* slots;   // [num_runs]: the adapter's slot; -1: none
    const int32_t* starts;  // [num_runs + 1], in `rows`
    const int32_t* rows;
    const int32_t* row_slots;  // of each row; -1: no adapter
};

// An adapter's update of a map: scale * B (A x), added to its columns from `first` on.
struct LoraMap {
    const void* a;  // [rank, columns]; of an embedding [vocabulary, rank]
    const void* b;  // [rank, rows]: B transposed
    int64_t first;
    int64_t rows;
    int64_t first_rank;  // the sum of the ranks of the maps before it
    int64_t rank;        // 0: these columns have no update
    float scale;
};

// The maps of an adapter: contiguous, covering all columns; or none.
struct LoraMaps {
    const LoraMap* maps;
    int64_t count;
    const float* factors;  // of each column of x Wᵀ (DoRA); or null
};

struct LinearArgs {
    const Weight* weight;
    const void* x;  // [tokens, columns], rows `x_stride` apart
    int64_t x_stride;
    int32_t x_dtype;
    int32_t y_dtype;
    void* y;  // [tokens, rows], or [tokens, rows / 2] = activation(gate) * up of a gated weight; rows `y_stride` apart
    int64_t y_stride;
    int64_t tokens;
    const float* bias;  // [rows] or null
    uint8_t* scratch;  // linear_scratch_bytes
    int32_t after_gate;  // y holds a gate on entry, and becomes activation(gate) times the product
    int32_t activation;  // of the gate; without a gate, of the result
    const float* added;  // [tokens, rows] to add to x Wᵀ + b, rows `added_stride` apart; or null
    int64_t added_stride;
    const AdapterRows* adapters;  // where no row has an adapter, `added` is not read
    const LoraMaps* lora;  // by slot, `lora_stride` apart, for their factors; or null
    int64_t lora_stride;
    int64_t lora_first;  // the first row's place among the factors
    const int32_t* row_slots;  // those of `adapters`, if they are read
};

struct LoraArgs {
    const AdapterRows* adapters;
    const LoraMaps* slots;
    const void* x;  // [tokens, columns], rows `x_stride` apart
    int64_t x_stride;
    int32_t dtype;  // of x, and of the adapters' weights
    int64_t columns;
    float* y;  // [tokens, y_columns]: the update; not written if no row has an adapter
    int64_t y_columns;
    int64_t tokens;
    float* scratch;  // lora_scratch_bytes
};

// Adds an adapter's update to each row of y that an embedding was looked up for.
struct LoraLookupArgs {
    const AdapterRows* adapters;
    const LoraMaps* slots;  // of one map each, or none
    const int64_t* row_ids;  // [rows]
    void* y;  // [rows, columns], replaced
    int32_t dtype;  // of y, and of the adapters' weights
    int64_t rows;
    int64_t columns;
};

// Rows to pack. Integers are one unsigned byte each; the other arrays have the types and shapes that the kind stores
// (`penstock.config.weight_formats`), null if it has none.
struct PackArgs {
    const Weight* weight;
    int64_t first_row;
    int64_t num_rows;
    const void* source;  // [num_rows, columns]: float32, bfloat16, float16, or integers
    int32_t source_dtype;
    const void* scales;         // [num_rows, groups]
    const void* offsets;        // [num_rows, groups]: zeros or minima
    const void* super_scales;   // [num_rows, supers]
    const void* super_offsets;  // [num_rows, supers]
};

struct UnpackArgs {
    const Weight* weight;
    const int64_t* row_ids;  // [num_rows]
    int64_t num_rows;
    void* y;  // [num_rows, columns]
    int32_t y_dtype;
};

// Fill `q` [num_rows, columns], `scales` and `zeros` [num_rows, groups of 32 columns], and `row_scales` [num_rows].
struct QuantizeArgs {
    int32_t bits;
    int32_t group;  // columns that share a scale: a multiple of 16
    int32_t zero_units;  // units of a stored zero per quantization step; 0: the zero is the centre, and none is stored
    int32_t source_dtype;
    const void* source;  // [num_rows, columns]
    int64_t num_rows;
    int64_t columns;
    uint8_t* q;
    uint8_t* scales;
    uint8_t* zeros;
    float* row_scales;
};

// The element type of a cache: one of DType, or int8 with a scale for each token and head.
constexpr int64_t kCacheInt8 = 3;
constexpr int64_t kCachePadding = 256;
constexpr int64_t kMaxHeadDim = 576;

// One layer's keys and values in blocks; `kv_layout.h` draws the layout.
struct PagedCache {
    int64_t num_heads;
    int64_t head_dim;
    int64_t block_size;
    int64_t kind;
    int64_t block_stride;  // bytes from a block to the next
    uint8_t* data;
    int64_t latent;  // the stored keys are also the values
};

// The ragged batch of a step.
struct Batch {
    int64_t num_tokens;
    int64_t num_seqs;
    const int32_t* query_start;  // [num_seqs + 1]: the first token of each sequence, and at the end num_tokens
    const int32_t* seq_lens;     // [num_seqs]: keys of each sequence, those of this step included
    const int32_t* table_start;  // [num_seqs + 1]: where the block table of each sequence begins in `blocks`
    const int32_t* blocks;       // the sequences' block tables, one after another
    const int32_t* slots;        // [num_tokens]: block * block_size + offset, for each token's key and value
    const int32_t* branches;     // [2, num_seqs]: the block that a sequence's state continues in, or -1, and after how
                                 // many of its tokens of the step; null: each is -1
    const int32_t* seen_ends;    // [num_tokens]: the position after the last key that each token sees, ascending in a
                                 // sequence; null: each sees keys up to its own
};

struct AttentionArgs {
    const PagedCache* cache;
    const Batch* batch;
    const void* query;  // [num_tokens, num_heads, head_dim], tokens `query_stride` apart, and heads `query_step`
    int64_t query_stride;
    int64_t query_step;
    int32_t dtype;
    void* out;  // [num_tokens, num_heads, head_dim], of the same type
    int64_t num_heads;
    int64_t window;  // keys that a query attends to, its own included; 0: all
    int32_t bidirectional;  // a query also attends to as many keys after it as before it; all keys are stored before
    int32_t takes_ends;     // a query attends to keys up to its end in `batch->seen_ends`, if there are any
    int64_t chunk;   // tokens of a chunk: a query attends to keys of its own chunk alone; 0: no chunks
    float scale;
    float soft_cap;    // 0: none
    const float* sinks;  // [num_heads], attention sinks: a logit of each head that belongs to no key; or null
    const float* position_bias;  // [num_heads, bias_stride], added to scores: of the key `d` after a query (before it, if
                                 // negative) at bias_stride / 2 + d, with a vector more at each end; or null
    int64_t bias_stride;
    int32_t threads;   // at most
    uint8_t* scratch;  // attention_scratch_bytes
};

// Disentangled attention (DeBERTa; He et al., 2021, arXiv:2006.03654) within whole texts.
struct DisentangledArgs {
    const Batch* batch;
    const void* qkv;  // [num_tokens, 3 * num_heads * head_dim]: queries, keys, values
    int32_t dtype;
    void* out;  // [num_tokens, num_heads * head_dim], of the same type
    int64_t num_heads;
    int64_t head_dim;
    const float* keys;     // [num_heads, head_dim, num_buckets]: of distances, multiplied with queries; or null
    const float* queries;  // likewise, multiplied with keys; or null
    int64_t num_buckets;   // a multiple of 16
    const int32_t* buckets;  // [2 * num_distances], ascending: of a query `d` after its key at num_distances + d
    int64_t num_distances;   // at least as many as a text has tokens
    float scale;
    int32_t threads;   // at most
    uint8_t* scratch;  // disentangled_scratch_bytes
};

struct RopeArgs {
    const PagedCache* cache;
    const Batch* batch;
    void* qkv;  // [num_tokens, num_heads * query_step + (parts - 1) * cache->num_heads * head_dim]: queries, which are
                // replaced, are the first head_dim of each query_step elements; the rest is stored
    int32_t dtype;
    int32_t parts;  // 3: queries, keys, values; 2: no values, which are the keys as they come, or those of a latent
                // cache; 1: queries alone
    int32_t value_norm;  // each head of the values is divided by its root mean square
    int64_t num_heads;
    int64_t query_step;
    const float* angles;  // [num_tokens, 2, num_angles]: cosines, then sines
    int64_t num_angles;
    int32_t interleaved;  // angle i rotates the elements 2 i and 2 i + 1; otherwise i and i + num_angles
    const float* query_factors;  // [num_tokens], times the queries, or null
    const void* query_norm;  // [head_dim] or null, of type `norm_dtype`; so is key_norm
    const void* key_norm;
    int32_t norm_dtype;
    int32_t norm_last;  // the norms' weights multiply queries and keys after their rotation
    float eps;
};

struct NormArgs {
    void* x;         // [rows, columns], rows `stride` apart
    void* residual;  // the same, or null
    void* y;         // the same; may be x
    int64_t stride;
    const void* weight;  // [columns], of type `weight_dtype`
    int32_t weight_dtype;
    int32_t dtype;
    int64_t rows;
    int64_t columns;
    float eps;
    float factor;  // of x, applied before it is added to the residual
    int64_t groups;  // groups of `columns` in a row, each normalised by itself; a residual only if it is 1
    const void* bias;   // [columns], of type `weight_dtype`: of a layer norm, which also subtracts the mean; or null
    const void* after;  // [columns], of type `after_dtype`: x is normalised with it before it is added; or null
    int32_t after_dtype;
    float after_eps;
    const float* total;  // factor of the sum with the residual, or null
};

struct GatherArgs {
    const uint8_t* table;  // rows of `row_bytes`, `table_stride` bytes apart
    int64_t table_stride;
    int64_t row_bytes;
    const int64_t* row_ids;  // [num_rows]
    int64_t num_rows;
    uint8_t* y;  // [num_rows, row_bytes]
};

// Gathers from a table by three row ids: each column is taken from the row of its axis.
struct GatherAxesArgs {
    const float* table;      // [any, 2, columns]
    const int64_t* row_ids;  // [rows, 3]
    const int32_t* axes;     // [columns]: 0 to 2
    int64_t rows;
    int64_t columns;
    float* y;  // [rows, 2, columns]
};

// Copies for each token the rows of the `width` tokens around it side by side; those beyond its text are zeros.
struct NeighboursArgs {
    const Batch* batch;
    const uint8_t* x;  // [num_tokens, x_bytes]
    int64_t x_bytes;
    uint8_t* y;  // [num_tokens, y_bytes]: zeros after the rows
    int64_t y_bytes;
    int64_t width;  // odd: as many tokens before as after
};

struct ScatterArgs {
    const uint8_t* x;  // [num_rows, row_bytes]
    int64_t row_bytes;
    const int64_t* row_ids;  // [num_rows], all different
    int64_t num_rows;
    uint8_t* table;  // rows of `row_bytes`, `table_stride` bytes apart
    int64_t table_stride;
};

// x = factor * activation(x / divisor), rounded once.
struct ActivateArgs {
    void* x;  // [rows, columns]
    int32_t dtype;
    int32_t activation;
    int64_t rows;
    int64_t columns;
    float divisor;
    float factor;
    const float* alpha_p;  // [1], of xielu; so is alpha_n
    const float* alpha_n;
};

// Limits columns of each row to `low` up to `high`; NaN stays.
struct LimitArgs {
    void* x;  // [rows, columns], rows `stride` elements apart
    int64_t stride;
    int32_t dtype;
    int64_t rows;
    int64_t columns;
    const float* low;
    const float* high;
};

// Copies columns of each row, for each of `heads`: `count` columns from `first` on, heads `step` apart, to the columns
// from `to` on, heads `to_step` apart. `paired`: the even columns first, then the odd ones; x and y are of one type.
struct ColumnsArgs {
    const uint8_t* x;  // rows `x_stride` apart
    int64_t x_stride;
    uint8_t* y;  // rows `y_stride` apart
    int64_t y_stride;
    int32_t dtype;    // of x
    int32_t y_dtype;  // elements are converted, rounded once
    int32_t paired;
    int64_t rows;
    int64_t first;
    int64_t to;
    int64_t count;
    int64_t heads;
    int64_t step;
    int64_t to_step;
};

// residual = (residual + factor * x) * total.
struct AddArgs {
    const void* x;  // [rows, columns]
    void* residual;
    int32_t dtype;
    int64_t rows;
    int64_t columns;
    float factor;
    const float* total;  // null: 1
};

// x = activation(x) * y.
struct GateArgs {
    void* x;        // [rows, columns]
    const void* y;  // [rows, columns], rows `y_stride` apart
    int64_t y_stride;
    int32_t dtype;
    int32_t activation;
    int64_t rows;
    int64_t columns;
};

// Sums of streams: out[:, o] = scale * sum over i of factors[o, i] * x[:, i].
struct MixStreamsArgs {
    const void* x;  // [rows, inputs, size], rows `x_stride` apart
    int64_t x_stride;
    const float* factors;  // [rows, outputs, inputs], rows `factors_stride` apart
    int64_t factors_stride;
    const float* scale;  // [size]; or null
    int32_t dtype;
    int64_t rows;
    int64_t inputs;
    int64_t outputs;
    int64_t size;
    void* out;  // [rows, outputs, size]
};

// Scales each row of x to the root mean square of a row of `like`.
struct MatchArgs {
    void* x;           // [rows, columns], replaced
    const void* like;  // the same, rows `like_stride` apart
    int64_t like_stride;
    int32_t dtype;
    int64_t rows;
    int64_t columns;
    float least;  // of the mean square of x
};

// Subtracts from each row its mean and so many standard deviations; what is then below 0 becomes 0.
struct KeepAboveArgs {
    void* x;  // [rows, columns], replaced
    int32_t dtype;
    int64_t rows;
    int64_t columns;
    float deviations;
};

// Multiplies each head of x by the sigmoid of its gate.
struct HeadGatesArgs {
    void* x;           // [rows, num_heads, head_dim]
    const void* gate;  // the same, rows `gate_stride` apart, and heads `gate_step`
    int64_t gate_stride;
    int64_t gate_step;
    int32_t dtype;
    int64_t rows;
    int64_t num_heads;
    int64_t head_dim;
};

// A part of one layer's states, in blocks: `kernels/recurrent/states.py` draws the layout.
struct StatePart {
    float* data;
    int64_t block_stride;  // elements from a block to the next
    int64_t block_size;    // tokens
};

// Convolution of each channel over a token and the tokens before it. The input is columns of x from `values` on, times
// those from `before` on; the output is multiplied by those from `after` on. -1: no such factor.
struct ConvArgs {
    StatePart state;  // [kernel - 1, channels]
    const Batch* batch;
    const void* x;  // [num_tokens, any], rows `x_stride` apart
    int64_t x_stride;
    int32_t dtype;
    int32_t silu;
    int64_t values;
    int64_t before;
    int64_t after;
    int64_t kernel;
    int64_t channels;
    const float* taps;  // [kernel, channels], the tap of the token itself last
    const float* bias;  // [channels] or null
    void* out;          // [num_tokens, channels]
};

struct DeltaArgs {
    StatePart state;  // [value_heads, slices, key_dim, kSlice]
    const Batch* batch;
    const void* qkv;  // [num_tokens, 2 * key_heads * key_dim + value_heads * value_dim], rows `qkv_stride` apart
    int64_t qkv_stride;
    const void* gates;  // [num_tokens, 2 * value_heads]: rates, then time steps (`by_channel`: more of these); rows
                        // `gates_stride` apart
    int64_t gates_stride;
    int32_t dtype;
    int64_t key_heads;
    int64_t value_heads;
    int64_t key_dim;
    int64_t value_dim;
    int32_t in_turn;         // value head h has key head h % key_heads; otherwise neighbouring value heads share one
    int32_t by_channel;      // time steps are those of the channels of keys, value_heads * key_dim, not of value heads
    const float* log_decay;  // [value_heads]
    const float* step_bias;  // [value_heads], or by channel
    void* out;               // [num_tokens, value_heads * value_dim]
};

struct ScanArgs {
    StatePart state;  // [heads, slices, state_size, kSlice]
    const Batch* batch;
    const void* xbc;  // [num_tokens, heads * head_dim + 2 * groups * state_size], rows `xbc_stride` apart
    int64_t xbc_stride;
    const void* steps;  // [num_tokens, heads], rows `steps_stride` apart
    int64_t steps_stride;
    int32_t dtype;
    int64_t heads;
    int64_t head_dim;
    int64_t groups;
    int64_t state_size;
    float shortest_step;
    float longest_step;
    const float* log_decay;  // [heads]
    const float* step_bias;  // [heads]
    const float* skip;       // [heads]
    void* out;               // [num_tokens, heads * head_dim]
};

// The scan of Mamba (1); see `kernels/recurrent`.
struct SelectiveScanArgs {
    StatePart state;  // [1, slices, state_size, kSlice]
    const Batch* batch;
    const void* x;  // [num_tokens, channels], rows `x_stride` apart
    int64_t x_stride;
    const void* steps;  // [num_tokens, channels], rows `steps_stride` apart
    int64_t steps_stride;
    const void* inputs;  // [num_tokens, 2 * state_size]: inputs (B), then outputs (C); rows `inputs_stride` apart
    int64_t inputs_stride;
    int32_t dtype;
    int64_t channels;
    int64_t state_size;
    const float* log_decay;  // [channels, state_size]
    const float* step_bias;  // [channels]
    const float* skip;       // [channels]
    void* out;               // [num_tokens, channels]
};

struct GatedNormArgs {
    void* x;           // [rows, columns], replaced
    const void* gate;  // [rows, columns], rows `gate_stride` apart
    int64_t gate_stride;
    const void* weight;  // [weights]: of the columns, repeated
    int64_t weights;
    int32_t dtype;
    int32_t gate_first;  // norm(x * silu(gate)) * weight; else norm(x) * weight * silu(gate)
    int64_t rows;
    int64_t columns;
    int64_t group;  // columns that are normalised together
    float eps;
};

// Routing: the experts of each token from the router's logits; see `penstock.config.feed_forward.Routing`.
enum Score : int32_t { kSoftmax = 0, kSoftmaxOfTop = 1, kSigmoid = 2, kSparseMixer = 3 };

struct RouteArgs {
    const float* logits;      // [tokens, experts]
    const float* correction;  // [experts], added to the scores for the choice alone; or null
    int32_t* ids;             // [tokens, top_k], in the order of choice
    float* weights;           // [tokens, top_k]
    int64_t tokens;
    int64_t experts;
    int64_t top_k;
    int64_t groups;      // groups of consecutive experts; experts are chosen from the best `top_groups`; 1: from all
    int64_t top_groups;
    int32_t score;
    int32_t group_tops;   // a group's score is the sum of its `group_tops` largest scores
    int32_t renormalize;  // weights are divided by their sum, and by `epsilon` with it
    float epsilon;
    float scaling;
    float jitter;  // of the sparse mixer
    const float* expert_scales;  // [experts], factors of the final weights; or null
};
constexpr int64_t kMostExperts = 1024;

// y = the sum over a token's experts, in the order of `ids`, of weight * down(activation(gate) * up). Each expert has a
// matrix in `gate_up` (gated) and `down`; or in `gate`, `gate_up` (then `up` alone) and `down`. With `mixed`, each
// expert may do either, in formats of its own.
struct ExpertsArgs {
    const Weight* const* gate;  // [experts]: null where gate and up are one matrix; or null, if they are everywhere
    const Weight* const* gate_up;
    const Weight* const* down;
    const float* gate_up_bias;  // [experts, gate and up], or null
    const float* down_bias;     // [experts, rows of down], or null
    int64_t experts;
    int64_t top_k;
    int64_t tokens;
    const int32_t* ids;      // [tokens, top_k]
    const float* weights;    // [tokens, top_k]
    const void* x;           // [tokens, columns]
    const void* shared;      // [tokens, rows of down], added to the sum; or null; rows `shared_stride` apart
    int64_t shared_stride;
    const float* shared_gate;  // [tokens]: the sigmoid of it multiplies `shared`; or null
    void* y;                 // [tokens, rows of down]
    int32_t dtype;           // of x, shared and y
    int32_t activation;
    int32_t scale_x;  // weights scale the experts' input instead of their output
    int32_t mixed;
    uint8_t* scratch;  // experts_scratch_bytes
    Ranks* ranks;      // tensor-parallel ranks, each with its own rows of every weight; or null
    const AdapterRows* adapters;  // or null
    const LoraMaps* gate_up_slots;  // [slots, experts]
    const LoraMaps* down_slots;     // [slots, experts]
};

// The operations that are recorded: each is a function of its arguments. The number of rows and the scratch memory are
// filled into these when a recorded call is made.
#define PENSTOCK_OPERATIONS(OP)             \
    OP(linear, LinearArgs)                  \
    OP(lora, LoraArgs)                      \
    OP(lora_lookup, LoraLookupArgs)         \
    OP(unpack, UnpackArgs)                  \
    OP(attention, AttentionArgs)            \
    OP(disentangled, DisentangledArgs)      \
    OP(rope_and_cache, RopeArgs)            \
    OP(rms_norm, NormArgs)                  \
    OP(gather, GatherArgs)                  \
    OP(gather_axes, GatherAxesArgs)         \
    OP(scatter, ScatterArgs)                \
    OP(neighbours, NeighboursArgs)          \
    OP(activate, ActivateArgs)              \
    OP(limit, LimitArgs)                    \
    OP(copy_columns, ColumnsArgs)           \
    OP(add_rows, AddArgs)                   \
    OP(mix_streams, MixStreamsArgs)         \
    OP(match_magnitude, MatchArgs)          \
    OP(keep_above, KeepAboveArgs)           \
    OP(head_gates, HeadGatesArgs)           \
    OP(gate, GateArgs)                      \
    OP(causal_conv, ConvArgs)               \
    OP(gated_delta_rule, DeltaArgs)         \
    OP(state_space_scan, ScanArgs)          \
    OP(selective_scan, SelectiveScanArgs)   \
    OP(gated_rms_norm, GatedNormArgs)       \
    OP(route, RouteArgs)                    \
    OP(experts, ExpertsArgs)

// The other functions that are compiled once for each instruction set: result, name, arguments.
#define PENSTOCK_FUNCTIONS(FUNCTION)                                                                             \
    FUNCTION(int64_t, weight_bytes, (const Weight&))                                                             \
    FUNCTION(bool, pack, (const PackArgs&))                                                                      \
    FUNCTION(bool, quantize, (const QuantizeArgs&))                                                              \
    FUNCTION(int64_t, linear_scratch_bytes, (const Weight&, int64_t tokens))                                     \
    FUNCTION(int64_t, attention_scratch_bytes, (const AttentionArgs&))                                           \
    FUNCTION(int64_t, disentangled_scratch_bytes, (const DisentangledArgs&))                                     \
    FUNCTION(int64_t, experts_scratch_bytes, (const ExpertsArgs&))                                               \
    FUNCTION(int64_t, lora_scratch_bytes, (const LoraArgs&))                                                     \
    FUNCTION(void, argmax, (const float* x, int64_t rows, int64_t columns, int64_t* places))                     \
    FUNCTION(int64_t, sample_scratch_bytes, (int64_t vocab))                                                     \
    FUNCTION(void, sample, (const SampleArgs&))                                                                  \
    FUNCTION(void, topk_logprobs, (const TopkLogprobsArgs&))                                                     \
    FUNCTION(void, apply_bitmask,                                                                                \
             (float* logits, int64_t vocab, const int64_t* rows, int64_t num_rows, const uint32_t* bits))

// `exchange` is the same for all instruction sets (`ranks.h`).
enum class Operation : int64_t {
#define PENSTOCK_NUMBER(name, Args) name,
    PENSTOCK_OPERATIONS(PENSTOCK_NUMBER)
#undef PENSTOCK_NUMBER
    exchange,
};

struct Call {
    int64_t operation;      // one of Operation
    const void* arguments;  // of the type that the operation takes
};

// Calls to make one after another over the same number of rows: of the batch's tokens, if there is a batch.
struct Segment {
    const Call* calls;
    int64_t count;
    int64_t rows;
};

// Controls of a row's distribution, applied in this order. Neutral values: top_k 0, top_p 1, min_p 0, typical_p 1.
struct SampleControls {
    double temperature;  // 0: greedy (the first largest logit); the other controls are not used
    double top_k;
    double top_p;
    double min_p;
    double typical_p;
    double uniform;  // random number in [0, 1)
};

struct SampleArgs {
    const float* logits;  // [rows, vocab]
    int64_t rows;
    int64_t vocab;
    const SampleControls* controls;  // [rows]
    int64_t* tokens;   // [rows]; -1: a logit is NaN or plus infinity, or all are minus infinity
    uint8_t* scratch;  // sample_scratch_bytes for each thread
};

struct TopkLogprobsArgs {
    const float* logits;  // [rows, vocab]
    int64_t rows;
    int64_t vocab;
    int64_t k;
    float* tops;      // [rows]: the largest logit; infinite if the row cannot be sampled from
    int64_t* totals;  // [rows]: sums of the tokens' weights
    float* values;    // [rows, k], descending, ties by token id
    int64_t* tokens;  // [rows, k]
};

// One instruction set's versions of the operations; each source is compiled once for each set. In a program every
// thread of the team makes each call: outside of `parallel` an operation only reads.
struct Ops {
#define PENSTOCK_MEMBER(name, Args) void (*name)(const Args&);
    PENSTOCK_OPERATIONS(PENSTOCK_MEMBER)
#undef PENSTOCK_MEMBER
#define PENSTOCK_MEMBER(result, name, arguments) result(*name) arguments;
    PENSTOCK_FUNCTIONS(PENSTOCK_MEMBER)
#undef PENSTOCK_MEMBER
};

}  // namespace penstock
