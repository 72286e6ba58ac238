// The shared memory of an engine's ranks.
//
//     | cells: one per rank, and one that says whether a rank is lost | slot | slot |
//
// In an exchange each rank writes its part to a slot, waits at a barrier for all others, and reads. The next exchange
// uses the other slot: a rank that writes to it has passed a barrier since all others read it.
#pragma once

#include <cstdint>

namespace penstock {

// One rank's view. Only `count` changes, and `lost` once.
struct Ranks {
    int32_t rank;
    int32_t size;
    uint8_t* shared;
    int64_t slot_bytes;
    int64_t count;  // barriers that this rank has reached
    int64_t lost;   // set when a rank has ended: no exchange can complete
};

// Gathers rows of y from all ranks: each rank's own columns or, with `row_ids`, each whole row from the rank that owns
// its id. Of n items rank r owns n * r / size up to n * (r + 1) / size.
struct ExchangeArgs {
    Ranks* ranks;
    const uint8_t* x;   // [rows, own columns], or [rows, columns]; rows `x_stride` bytes apart
    int64_t x_stride;
    uint8_t* y;         // [rows, columns]
    int64_t rows;
    int64_t columns;
    int64_t element_bytes;
    const int64_t* row_ids;  // [rows] or null
    int64_t num_ids;
    int32_t first_only;  // only rank 0 needs y
};

inline int64_t own_begin(const Ranks& ranks, int64_t total) { return total * ranks.rank / ranks.size; }

// One thread's share of an exchange; returns false if a rank is lost.
bool exchange_share(const ExchangeArgs& args, int64_t thread, int64_t threads);

// The whole exchange, on a new team of threads.
bool exchange(const ExchangeArgs& args);

}  // namespace penstock
