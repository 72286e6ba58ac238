// Where the ranks of an engine meet: memory that their processes share.
//
//     | cells: one a rank, and one that says that a rank is lost | slot | slot |
//
// What the ranks exchange they write to a slot; then they meet, and read. The next exchange has the other slot: who
// writes to it has met all others since they read from it.
#pragma once

#include <cstdint>

namespace penstock {

// A rank's view; the only thing that changes is `count`, and `lost` once.
struct Ranks {
    int32_t rank;
    int32_t size;
    uint8_t* shared;
    int64_t slot_bytes;
    int64_t count;  // how often this rank has met the others
    int64_t lost;   // set when a rank has ended: no exchange can complete
};

// Each row of y gets what every rank has of it: its own columns, or, where there are `row_ids`, the whole row from the
// rank that owns its id. Rank r owns of n things those from n * r / size to n * (r + 1) / size.
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
    int32_t first_only;  // only the first rank reads
};

inline int64_t own_begin(const Ranks& ranks, int64_t total) { return total * ranks.rank / ranks.size; }

// Each thread's share of an exchange; returns false if a rank is lost.
bool exchange_share(const ExchangeArgs& args, int64_t thread, int64_t threads);

// The whole exchange, on a new team of threads.
bool exchange(const ExchangeArgs& args);

}  // namespace penstock
