// The library's C interface, and the choice of an instruction set.
//
// Nothing here throws or exits: a function that can fail says so by what it returns. The library expects one thread to
// call it at a time in each process, as the engine's step loop does; each calling thread has scratch memory of its own.
#include <cstdlib>
#include <cstring>

#include "ops.h"
#include "processor.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

extern "C" int omp_get_max_threads();

namespace penstock {

namespace avx2 { extern const Ops table; }
namespace avx512 { extern const Ops table; }
namespace avx512_vnni { extern const Ops table; }
namespace amx { extern const Ops table; }
namespace amx_emulated { extern const Ops table; }

namespace {

struct InstructionSet {
    const char* name;
    const Ops* ops;
    bool (Processor::*supported)() const;
};

// The best first; the last is chosen by its name alone.
const InstructionSet kSets[] = {
    {"amx", &amx::table, &Processor::amx},
    {"avx512_vnni", &avx512_vnni::table, &Processor::avx512_vnni},
    {"avx512", &avx512::table, &Processor::avx512},
    {"avx2", &avx2::table, &Processor::avx2},
#if defined(PENSTOCK_TILES_EMULATED)
    {"amx_emulated", &amx_emulated::table, &Processor::avx512_vnni},
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

}  // namespace

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

EXPORT int64_t penstock_weight_bytes(const Weight* weight) { return ops().weight_bytes(*weight); }

EXPORT void penstock_pack(const Weight* weight, int64_t first_row, int64_t num_rows, const void* source,
                          int32_t source_dtype, const float* scales, const uint8_t* zeros) {
    ops().pack({weight, first_row, num_rows, source, source_dtype, scales, zeros});
}

EXPORT void penstock_unpack(const Weight* weight, const int64_t* row_ids, int64_t num_rows, void* y, int32_t y_dtype) {
    ops().unpack({weight, row_ids, num_rows, y, y_dtype});
}

// Returns the first row that cannot be quantized, as a weight is not finite or far too large; `num_rows` if all can.
EXPORT int64_t penstock_quantize(int32_t kind, const void* source, int32_t source_dtype, int64_t num_rows,
                                 int64_t columns, uint8_t* q, float* scales, uint8_t* zeros) {
    return ops().quantize({kind, source_dtype, source, num_rows, columns, q, scales, zeros});
}

// Returns 0; 1: out of memory.
EXPORT int32_t penstock_linear(const Weight* weight, const void* x, int64_t x_stride, int32_t x_dtype, void* y,
                               int64_t y_stride, int32_t y_dtype, int64_t tokens, const float* bias) {
    uint8_t* memory = scratch(ops().linear_scratch_bytes(*weight, tokens));
    if (!memory) return 1;
    ops().linear({weight, x, x_stride, x_dtype, y_dtype, y, y_stride, tokens, bias, memory});
    return 0;
}

// Attention of a step's queries; arguments as in AttentionArgs. Returns 0; 1: out of memory.
EXPORT int32_t penstock_attention(const PagedCache* cache, const Batch* batch, const void* query, int64_t query_stride,
                                  int32_t dtype, void* out, int64_t num_heads, int64_t window, float scale,
                                  float soft_cap) {
    AttentionArgs args{cache,  batch, query,    query_stride,          dtype,  out, num_heads,
                       window, scale, soft_cap, omp_get_max_threads(), nullptr};
    args.scratch = scratch(ops().attention_scratch_bytes(args));
    if (!args.scratch) return 1;
    ops().attention(args);
    return 0;
}

// Normalise and rotate queries and keys, and store keys and values; arguments as in RotaryArgs.
EXPORT void penstock_rotate_and_store(const PagedCache* cache, const Batch* batch, void* qkv, int32_t dtype,
                                      int64_t num_heads, const float* angles, int64_t num_angles,
                                      const void* query_norm, const void* key_norm, float eps) {
    ops().rotate_and_store({cache, batch, qkv, dtype, num_heads, angles, num_angles, query_norm, key_norm, eps});
}

// y = norm(x); with a residual, it becomes residual + x, and y its norm.
EXPORT void penstock_rms_norm(void* x, void* residual, void* y, const void* weight, int32_t dtype, int64_t rows,
                              int64_t columns, float eps) {
    ops().rms_norm({x, residual, y, weight, dtype, rows, columns, eps});
}

// Of each row of `x` the place of the first of its largest; -1: one is no number or plus infinity, or all minus infinity.
EXPORT void penstock_argmax(const float* x, int64_t rows, int64_t columns, int64_t* places) {
    ops().argmax(x, rows, columns, places);
}

}  // namespace penstock
