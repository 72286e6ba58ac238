// What linear.cpp, which chooses by the kind of a weight, and the kinds' sources have in common.
#pragma once

#include "linear_kind.h"

namespace penstock {
namespace PENSTOCK_ISA {

// Of activations that stay in a core's cache while panels stream past. Processors with AMX have 2 MiB, and unpacking a
// panel for few tokens would take them longer than the products.
#if defined(PENSTOCK_TILES)
constexpr int64_t kChunkBytes = 1280 << 10;
#else
constexpr int64_t kChunkBytes = 640 << 10;
#endif

// The functions of a kind of weights. Each source with some is a unit of work for compilers, which need a minute and a
// gigabyte for all of them.
struct LinearFunctions {
    int64_t (*panel_bytes)(const Weight&);
    int64_t (*bytes_per_token)(int64_t columns);  // of scratch, for each row of a token
    bool (*pack)(const PackArgs&);
    void (*unpack)(const UnpackArgs&);
    void (*run)(const LinearArgs&);
    void (*prepare)(const LinearArgs&, int64_t from, int64_t token);
    void (*multiply_panel)(const LinearArgs&, int64_t panel, const uint8_t* next);
};

namespace kinds {
extern const LinearFunctions float32, float16, bfp16, float8_by_32;            // linear_floats.cpp
extern const LinearFunctions bfloat16, bfloat12, float8_by_16;                 // linear_bfloats.cpp
extern const LinearFunctions int4, int4_by_16, int5, int6, int6_by_16, int8, int8_by_16;  // linear_int4.cpp to linear_int8.cpp
}  // namespace kinds

inline int64_t num_panels(const Weight& weight) {
    const int64_t rows = weight.gated ? weight.rows / 2 : weight.rows, height = weight.gated ? kPanel / 2 : kPanel;
    return (rows + height - 1) / height;
}

// Finish the sums of tokens `begin` to `end` over a panel and store them to y; a token of two rows gets the sum of both.
void finish(const LinearArgs&, int64_t begin, int64_t end, int64_t panel, const Sums*);

}  // namespace PENSTOCK_ISA
}  // namespace penstock
