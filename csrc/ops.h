// What the library can do: the arguments of each operation, and the table of one instruction set's versions of them.
//
// Memory is the caller's; sizes are in elements unless a name says bytes. All threads of OpenMP take part in a call.
#pragma once

#include <cstdint>

namespace penstock {

enum DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// Types that scales and offsets of integer weights are stored in, beside those of DType.
enum StoredType : int32_t { kNone = -1, kInt8 = 3, kUInt8 = 4 };

enum WeightKind : int32_t {
    kWeightFloat32 = 0,
    kWeightBfp16 = 1,  // bfloat16 and float16 checkpoints: 16-bit integers that share an exponent
    kWeightIntegers = 2,
    kWeightBFloat16 = 4,  // of instruction sets that multiply bfloat16, as the next
    kWeightBFloat12 = 5,  // bfloat16 in 12 bits
};

// What integer weights have taken off: the middle of their range; a zero a group, in whole steps or parts of 128 of all
// of them; or a minimum a group.
enum Offset : int32_t { kCentre = 0, kZero = 1, kFraction = 2, kMinimum = 3 };

// A packed weight [rows, columns]: y = x Wᵀ. `linear_kind.h` and its neighbours draw the layouts.
struct Weight {
    int32_t kind;
    int32_t gated;  // rows come in pairs of gate and up: half a panel of each
    int64_t rows;
    int64_t columns;
    uint8_t* data;
    float* row_scales;  // [rows rounded up to panels], where one super scale is a row's; else null
    // The format of integers, which `penstock.weight_formats` explains.
    int32_t bits;
    int32_t group;
    int32_t scale_type;
    int32_t offset;
    int32_t offset_type;
    int32_t super_type;
    int64_t super_columns;
    int64_t x_bytes;  // that activations are rounded to: 1, or 2 where integers meet them twice
};

struct LinearArgs {
    const Weight* weight;
    const void* x;  // [tokens, columns], rows `x_stride` apart
    int64_t x_stride;
    int32_t x_dtype;
    int32_t y_dtype;
    void* y;  // [tokens, rows], or [tokens, rows / 2] = silu(gate) * up of a gated weight; rows `y_stride` apart
    int64_t y_stride;
    int64_t tokens;
    const float* bias;  // [rows] or null
    uint8_t* scratch;  // linear_scratch_bytes
    int32_t after_gate;  // y holds a gate, and becomes silu(gate) times what would be written
};

// Rows to pack. Integers are one uint8 a value, from 0 on; the rest is of the types and shapes that the kind stores
// (`penstock.weight_formats`), null where it has none.
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
    int32_t zero_units;  // of a stored zero in a step of the values; 0: the zero is the centre, and none is stored
    int32_t source_dtype;
    const void* source;  // [num_rows, columns]
    int64_t num_rows;
    int64_t columns;
    uint8_t* q;
    uint8_t* scales;
    uint8_t* zeros;
    float* row_scales;
};

// What a cache holds: one of DType, or int8 with a scale for each token and head.
constexpr int64_t kCacheInt8 = 3;
constexpr int64_t kCachePadding = 256;
constexpr int64_t kMaxHeadDim = 512;

// One layer's keys and values in blocks; `kv_layout.h` draws them.
struct PagedCache {
    int64_t num_heads;
    int64_t head_dim;
    int64_t block_size;
    int64_t kind;
    int64_t block_stride;  // bytes from a block to the next
    uint8_t* data;
};

// The ragged batch of a step.
struct Batch {
    int64_t num_tokens;
    int64_t num_seqs;
    const int32_t* query_start;  // [num_seqs + 1]: the first token of each sequence, and at the end num_tokens
    const int32_t* seq_lens;     // [num_seqs]: keys of each sequence, those of this step included
    const int32_t* table_start;  // [num_seqs + 1]: where the block table of each sequence begins in `blocks`
    const int32_t* blocks;       // the sequences' block tables, one after another
    const int32_t* slots;        // [num_tokens]: block * block_size + offset in the block, for the new keys and values
};

struct AttentionArgs {
    const PagedCache* cache;
    const Batch* batch;
    const void* query;  // [num_tokens, num_heads, head_dim], tokens `query_stride` apart
    int64_t query_stride;
    int32_t dtype;
    void* out;  // [num_tokens, num_heads, head_dim], of the same type
    int64_t num_heads;
    int64_t window;  // keys that a query sees, its own included; 0: all
    float scale;
    float soft_cap;    // 0: none
    int32_t threads;   // at most
    uint8_t* scratch;  // attention_scratch_bytes
};

struct RopeArgs {
    const PagedCache* cache;
    const Batch* batch;
    void* qkv;  // [num_tokens, (num_heads + 2 * cache->num_heads) * head_dim]: queries are replaced, the rest is stored
    int32_t dtype;
    int64_t num_heads;
    const float* angles;  // [num_tokens, 2, num_angles]: cosines, then sines
    int64_t num_angles;
    const void* query_norm;  // [head_dim] or null, of type `dtype`; so is key_norm
    const void* key_norm;
    float eps;
};

struct NormArgs {
    void* x;         // [rows, columns]
    void* residual;  // the same, or null
    void* y;         // the same; may be x
    const void* weight;  // [columns]
    int32_t dtype;
    int64_t rows;
    int64_t columns;
    float eps;
    float factor;  // on x, before it is added to the residual
};

struct GatherArgs {
    const uint8_t* table;  // rows of `row_bytes`
    int64_t row_bytes;
    const int64_t* row_ids;  // [num_rows]
    int64_t num_rows;
    uint8_t* y;  // [num_rows, row_bytes]
};

struct ScaleArgs {
    void* x;  // [rows, columns]
    int32_t dtype;
    int64_t rows;
    int64_t columns;
    float factor;
};

// What a step is made of: an operation and its arguments, but for the number of rows and the scratch memory, which
// whoever runs it fills in.
enum Operation : int64_t {
    kLinear = 0,
    kAttention = 1,
    kRopeAndCache = 2,
    kRmsNorm = 3,
    kUnpack = 4,
    kGather = 5,
    kScale = 6,
};

struct Call {
    int64_t operation;
    const void* arguments;  // of the type that the operation takes
};

// Calls to make one after another over so many rows; tokens of the step, where there is a batch.
struct Segment {
    const Call* calls;
    int64_t count;
    int64_t rows;
};

// What to leave of a row, applied in this order; what leaves everything: top_k 0, top_p 1, min_p 0, typical_p 1.
struct SampleControls {
    double temperature;  // 0: the first of the likeliest, whatever the others say
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
    int64_t* tokens;   // [rows]; -1: a logit is no number or plus infinity, or all are minus infinity
    uint8_t* scratch;  // sample_scratch_bytes for each thread
};

struct TopkLogprobsArgs {
    const float* logits;  // [rows, vocab]
    int64_t rows;
    int64_t vocab;
    int64_t k;
    float* tops;      // [rows]: the largest; infinite where the row cannot be sampled from
    int64_t* totals;  // [rows]: sums of the tokens' weights
    float* values;    // [rows, k], descending, equal ones by token
    int64_t* tokens;  // [rows, k]
};

// One instruction set's versions. `linear.cpp` and its neighbours define them once for each set. In a program every
// thread of the team makes each call: outside of `parallel` the operations only read.
struct Ops {
    int64_t (*weight_bytes)(const Weight&);
    int64_t (*linear_scratch_bytes)(const Weight&, int64_t tokens);
    void (*linear)(const LinearArgs&);
    bool (*pack)(const PackArgs&);
    void (*unpack)(const UnpackArgs&);
    bool (*quantize)(const QuantizeArgs&);
    int64_t (*attention_scratch_bytes)(const AttentionArgs&);
    void (*attention)(const AttentionArgs&);
    void (*rope_and_cache)(const RopeArgs&);
    void (*rms_norm)(const NormArgs&);
    void (*gather)(const GatherArgs&);
    void (*scale)(const ScaleArgs&);
    void (*argmax)(const float* x, int64_t rows, int64_t columns, int64_t* places);
    int64_t (*sample_scratch_bytes)(int64_t vocab);
    void (*sample)(const SampleArgs&);
    void (*topk_logprobs)(const TopkLogprobsArgs&);
    void (*apply_bitmask)(float* logits, int64_t vocab, const int64_t* rows, int64_t num_rows, const uint32_t* bits);
};

}  // namespace penstock
