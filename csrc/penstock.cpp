// The library's C interface, and the choice of an instruction set.
//
// Nothing here throws or exits: a function that can fail returns a code. The library expects one caller at a time in
// each process, as the engine's step loop is; each calling thread has scratch memory of its own.
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <type_traits>

#include "ops.h"
#include "processor.h"
#define PENSTOCK_ISA every  // instruction set
#include "threads.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace penstock {

namespace generic { extern const Ops table; }
namespace neon { extern const Ops table; }
namespace neon_dotprod { extern const Ops table; }
namespace neon_bf16 { extern const Ops table; }
namespace avx2 { extern const Ops table; }
namespace avx_vnni { extern const Ops table; }
namespace avx_vnni_emulated { extern const Ops table; }
namespace avx512 { extern const Ops table; }
namespace avx512_vnni { extern const Ops table; }
namespace avx512_bf16 { extern const Ops table; }
namespace amx { extern const Ops table; }
namespace amx_emulated { extern const Ops table; }

namespace {

struct InstructionSet {
    const char* name;
    const Ops* ops;
    bool (Processor::*supported)() const;
};

// The instruction sets that are built, best first; the emulated ones must be chosen by name.
const InstructionSet kSets[] = {
#if defined(PENSTOCK_HAS_amx)
    {"amx", &amx::table, &Processor::amx},
#endif
#if defined(PENSTOCK_HAS_avx512_bf16)
    {"avx512_bf16", &avx512_bf16::table, &Processor::avx512_bf16},
#endif
#if defined(PENSTOCK_HAS_avx512_vnni)
    {"avx512_vnni", &avx512_vnni::table, &Processor::avx512_vnni},
#endif
#if defined(PENSTOCK_HAS_avx512)
    {"avx512", &avx512::table, &Processor::avx512},
#endif
#if defined(PENSTOCK_HAS_avx_vnni)
    {"avx_vnni", &avx_vnni::table, &Processor::avx_vnni},
#endif
#if defined(PENSTOCK_HAS_avx2)
    {"avx2", &avx2::table, &Processor::avx2},
#endif
#if defined(PENSTOCK_HAS_neon_bf16)
    {"neon_bf16", &neon_bf16::table, &Processor::neon_bf16},
#endif
#if defined(PENSTOCK_HAS_neon_dotprod)
    {"neon_dotprod", &neon_dotprod::table, &Processor::neon_dotprod},
#endif
#if defined(PENSTOCK_HAS_neon)
    {"neon", &neon::table, &Processor::neon},
#endif
#if defined(PENSTOCK_HAS_generic)
    {"generic", &generic::table, &Processor::generic},
#endif
#if defined(PENSTOCK_HAS_amx_emulated)
    {"amx_emulated", &amx_emulated::table, &Processor::avx512_vnni},
#endif
#if defined(PENSTOCK_HAS_avx_vnni_emulated)
    {"avx_vnni_emulated", &avx_vnni_emulated::table, &Processor::avx512_vnni},
#endif
};

const InstructionSet* chosen = nullptr;

const Ops& ops() { return *chosen->ops; }

// At least `bytes` of memory for the calling thread's current operation, aligned to a cache line; null: out of memory.
uint8_t* scratch(int64_t bytes) {
    struct Buffer {
        void* data = nullptr;
        int64_t bytes = 0;
        ~Buffer() { std::free(data); }
    };
    static thread_local Buffer buffer;
    if (bytes > buffer.bytes) {
        std::free(buffer.data);
        const int64_t rounded = (bytes + 4095) / 4096 * 4096;
        buffer.data = std::aligned_alloc(64, static_cast<size_t>(rounded));
        buffer.bytes = buffer.data ? rounded : 0;
    }
    return static_cast<uint8_t*>(buffer.data);
}

// What is known only when a recorded call is made.
struct Now {
    int64_t rows;
    int32_t threads;
    uint8_t* memory;
};

template <class Args, class = void>
constexpr bool has_rows = false;
template <class Args>
constexpr bool has_rows<Args, std::void_t<decltype(Args::rows)>> = true;

// Arguments without a number of rows have a batch, which knows it.
template <class Args>
void fill(Args& args, const Now& now) {
    if constexpr (has_rows<Args>) args.rows = now.rows;
}
void fill(UnpackArgs& args, const Now& now) { args.num_rows = now.rows; }
void fill(GatherArgs& args, const Now& now) { args.num_rows = now.rows; }
void fill(ScatterArgs& args, const Now& now) { args.num_rows = now.rows; }
void fill(RouteArgs& args, const Now& now) { args.tokens = now.rows; }
void fill(AttentionArgs& args, const Now& now) {
    args.threads = now.threads;
    args.scratch = now.memory;
}
void fill(DisentangledArgs& args, const Now& now) {
    args.threads = now.threads;
    args.scratch = now.memory;
}
void fill(LinearArgs& args, const Now& now) {
    args.tokens = now.rows;
    args.scratch = now.memory;
}
void fill(ExpertsArgs& args, const Now& now) {
    args.tokens = now.rows;
    args.scratch = now.memory;
}
void fill(LoraArgs& args, const Now& now) {
    args.tokens = now.rows;
    args.scratch = reinterpret_cast<float*>(now.memory);
}

template <class Args>
int64_t scratch_bytes(const Args&) {
    return 0;
}
int64_t scratch_bytes(const LinearArgs& args) { return ops().linear_scratch_bytes(*args.weight, args.tokens); }
int64_t scratch_bytes(const AttentionArgs& args) { return ops().attention_scratch_bytes(args); }
int64_t scratch_bytes(const DisentangledArgs& args) { return ops().disentangled_scratch_bytes(args); }
int64_t scratch_bytes(const ExpertsArgs& args) { return ops().experts_scratch_bytes(args); }
int64_t scratch_bytes(const LoraArgs& args) { return ops().lora_scratch_bytes(args); }

// Whether no rank is lost after a call.
template <class Args>
bool is_whole(const Args&) {
    return true;
}
bool is_whole(const ExpertsArgs& args) { return !args.ranks || !args.ranks->lost; }

template <class Args>
Args filled(const Call& call, const Now& now) {
    Args args = *static_cast<const Args*>(call.arguments);
    fill(args, now);
    return args;
}

// The state that a team's threads share while they run segments.
struct Run {
    const Segment* segments;
    int64_t count;
    int32_t threads;
    uint8_t* memory;
    mutable bool lost = false;  // whether a rank is lost, so that the remaining calls are skipped

    int64_t most_scratch_bytes() const {
        int64_t most = 1;
        for_calls([&](const Call& call, const Now& now) {
            int64_t bytes = 0;
            switch (static_cast<Operation>(call.operation)) {
#define PENSTOCK_CASE(name, Args) case Operation::name: bytes = scratch_bytes(filled<Args>(call, now)); break;
                PENSTOCK_OPERATIONS(PENSTOCK_CASE)
#undef PENSTOCK_CASE
                case Operation::exchange: break;
            }
            most = bytes > most ? bytes : most;
            return true;
        });
        return most;
    }

    void run() const {
        for_calls([&](const Call& call, const Now& now) {
            const bool whole = make(call, now);
            if (!whole && member.thread == 0) lost = true;
            return whole;
        });
    }

  private:
    // Returns false if a rank is lost.
    bool make(const Call& call, const Now& now) const {
        switch (static_cast<Operation>(call.operation)) {
#define PENSTOCK_CASE(name, Args)                       \
    case Operation::name: {                             \
        const Args args = filled<Args>(call, now);      \
        ops().name(args);                               \
        return is_whole(args);                          \
    }
            PENSTOCK_OPERATIONS(PENSTOCK_CASE)
#undef PENSTOCK_CASE
            case Operation::exchange: return exchange(filled<ExchangeArgs>(call, now));
        }
        return true;
    }

    // Until `body` returns false.
    template <class Body>
    void for_calls(const Body& body) const {
        for (const Segment* segment = segments; segment < segments + count; segment++)
            for (int64_t i = 0; i < segment->count; i++)
                if (!body(segment->calls[i], Now{segment->rows, threads, memory})) return;
    }
};

}  // namespace

// Run segments one after another, in one parallel region. Returns 0; 1: out of memory; 2: a rank is lost, and the
// results are undefined.
EXPORT int32_t penstock_run(const Segment* segments, int64_t count) {
    Run run{segments, count, ready_threads(), nullptr};
    run.memory = scratch(run.most_scratch_bytes());
    if (!run.memory) return 1;
    if (count == 1 && segments->count == 1) {
        run.run();
    } else {
        every::team([&] { run.run(); }, false);
    }
    return run.lost ? 2 : 0;
}

// Choose the instruction set `name`, or the best where `name` is empty. Returns its name; null: this machine lacks it.
EXPORT const char* penstock_choose(const char* name) {
    const Processor processor;
    for (const InstructionSet& set : kSets) {
        if ((*name == '\0' || std::strcmp(name, set.name) == 0) && (processor.*set.supported)()) {
            chosen = &set;
            return set.name;
        }
    }
    return nullptr;
}

// Name of the instruction set at `index` among those that are built, best first; null: there are fewer.
EXPORT const char* penstock_built(int64_t index) {
    return index < static_cast<int64_t>(std::size(kSets)) ? kSets[index].name : nullptr;
}

// Prefault the bytes `from` to `to` of `memory`, on all threads. Their content is kept.
EXPORT void penstock_back(uint8_t* memory, int64_t from, int64_t to) {
    constexpr int64_t page = 4096, step = 2 << 20;
    every::parallel_for((to - from + step - 1) / step, [&](int64_t index) {
        const int64_t begin = from + index * step, end = begin + step < to ? begin + step : to;
        for (int64_t at = begin; at < end; at += page) {
            volatile uint8_t* byte = memory + at;
            *byte = *byte;
        }
    });
}

// Lay a step out in `memory`: the columns of Batch one after another, then the position and the id of each token.
// `numbers` has three columns with one number per sequence: its tokens in this step, the tokens before them, the length
// of its block table. `tables` are the block tables. Returns the number of the pool's blocks up to the last one used;
// -1: a table ends before its sequence.
EXPORT int64_t penstock_lay_out(const int64_t* numbers, const int32_t* tables, const int32_t* token_ids,
                                int64_t num_seqs, int64_t block_size, int32_t* memory) {
    const int64_t *counts = numbers, *starts = numbers + num_seqs, *table_lens = numbers + 2 * num_seqs;
    int32_t *query_start = memory, *seq_lens = query_start + num_seqs + 1, *table_start = seq_lens + num_seqs;
    query_start[0] = table_start[0] = 0;
    for (int64_t seq = 0; seq < num_seqs; seq++) {
        if (starts[seq] + counts[seq] > table_lens[seq] * block_size) return -1;
        query_start[seq + 1] = static_cast<int32_t>(query_start[seq] + counts[seq]);
        seq_lens[seq] = static_cast<int32_t>(starts[seq] + counts[seq]);
        table_start[seq + 1] = static_cast<int32_t>(table_start[seq] + table_lens[seq]);
    }
    const int64_t num_tokens = query_start[num_seqs], num_blocks = table_start[num_seqs];
    int32_t *blocks = table_start + num_seqs + 1, *slot = blocks + num_blocks, *position = slot + num_tokens, last = -1;
    for (int64_t i = 0; i < num_blocks; i++) {
        blocks[i] = tables[i];
        last = blocks[i] > last ? blocks[i] : last;
    }
    for (int64_t seq = 0; seq < num_seqs; seq++) {
        const int32_t* table = blocks + table_start[seq];
        for (int64_t at = starts[seq]; at < seq_lens[seq]; at++) {
            *slot++ = static_cast<int32_t>(table[at / block_size] * block_size + at % block_size);
            *position++ = static_cast<int32_t>(at);
        }
    }
    for (int64_t i = 0; i < num_tokens; i++) position[i] = token_ids[i];
    return last + 1;
}

// A hash of the headers that the library was compiled with; see `tools/native_structs.py`.
EXPORT const char* penstock_headers() { return PENSTOCK_HEADERS; }

EXPORT int64_t penstock_weight_bytes(const Weight* weight) { return ops().weight_bytes(*weight); }

// Returns 0; 1: bfloat16 weights that do not fit in 12 bits.
EXPORT int32_t penstock_pack(const Weight* weight, int64_t first_row, int64_t num_rows, const void* source,
                             int32_t source_dtype, const void* scales, const void* offsets, const void* super_scales,
                             const void* super_offsets) {
    return !ops().pack({weight, first_row, num_rows, source, source_dtype, scales, offsets, super_scales, super_offsets});
}

// Returns 0; 1: a weight is not finite or far too large.
EXPORT int32_t penstock_quantize(int32_t bits, int32_t group, int32_t zero_units, const void* source,
                                 int32_t source_dtype, int64_t num_rows, int64_t columns, uint8_t* q,
                                 uint8_t* scales, uint8_t* zeros, float* row_scales) {
    return !ops().quantize(
        {bits, group, zero_units, source_dtype, source, num_rows, columns, q, scales, zeros, row_scales});
}

// Index of the first largest element of each row of `x`; -1: one is NaN or plus infinity, or all are minus infinity.
EXPORT void penstock_argmax(const float* x, int64_t rows, int64_t columns, int64_t* places) {
    ops().argmax(x, rows, columns, places);
}

// Draw a token for each row; arguments as in SampleArgs. Returns 0; 1: out of memory.
EXPORT int32_t penstock_sample(const float* logits, int64_t rows, int64_t vocab, const SampleControls* controls,
                             int64_t* tokens) {
    uint8_t* memory = scratch(ops().sample_scratch_bytes(vocab) * ready_threads());
    if (!memory) return 1;
    ops().sample({logits, rows, vocab, controls, tokens, memory});
    return 0;
}

// The terms of log-probabilities; arguments as in TopkLogprobsArgs.
EXPORT void penstock_topk_logprobs(const float* logits, int64_t rows, int64_t vocab, int64_t k, float* tops, int64_t* totals,
                             float* values, int64_t* tokens) {
    ops().topk_logprobs({logits, rows, vocab, k, tops, totals, values, tokens});
}

// In the rows `rows` of `logits`, set to minus infinity the logits whose bit in the mask [num_rows, vocab / 32 rounded
// up] is 0.
EXPORT void penstock_apply_bitmask(float* logits, int64_t vocab, const int64_t* rows, int64_t num_rows, const uint32_t* bits) {
    ops().apply_bitmask(logits, vocab, rows, num_rows, bits);
}

}  // namespace penstock
