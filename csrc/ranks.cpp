// Exchange between ranks over shared memory, whose layout `ranks.h` draws. The same code for every instruction set.
#include "ranks.h"

#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <climits>
#include <cstring>

#define PENSTOCK_ISA every  // instruction set
#include "threads.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace penstock {

namespace {

struct alignas(64) Cell {
    std::atomic<uint32_t> count;     // barriers that the rank has reached; in the last cell, whether a rank is lost
    std::atomic<uint32_t> sleepers;  // number of threads that wait for it to change
};
static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t) && sizeof(Cell) == 64, "a futex is a plain word");

constexpr int64_t kPage = 4096;

Cell* cells(const Ranks& ranks) { return reinterpret_cast<Cell*>(ranks.shared); }

int64_t cells_bytes(int64_t size) {
    return (static_cast<int64_t>(sizeof(Cell)) * (size + 1) + kPage - 1) / kPage * kPage;
}

uint8_t* slot(const Ranks& ranks, int64_t round) {
    return ranks.shared + cells_bytes(ranks.size) + (round & 1) * ranks.slot_bytes;
}

// Wake all threads that sleep; and sleep until then, unless the cell's count is no longer the one seen. Elsewhere than on
// Linux a thread looks again every 50 microseconds.
#if defined(__linux__)
constexpr long kSleepNanoseconds = 500'000'000;  // longest sleep before a rank checks again

void wake_all(Cell& cell) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&cell.count), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}
void sleep(Cell& cell, uint32_t seen) {
    const timespec most{0, kSleepNanoseconds};
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&cell.count), FUTEX_WAIT, seen, &most, nullptr, 0);
}
#else
void wake_all(Cell&) {}
void sleep(Cell&, uint32_t) {
    const timespec turn{0, 50'000};
    nanosleep(&turn, nullptr);
}
#endif

void wake(Cell& cell) {
    if (cell.sleepers.load(std::memory_order_seq_cst)) wake_all(cell);
}

// Wait until the rank of `cell` has reached `count` barriers; false: a rank is lost.
bool wait(Cell& cell, uint32_t count, const Cell& lost) {
    const auto met = [&](uint32_t seen) { return static_cast<int32_t>(seen - count) >= 0; };
    for (int turn = 0; turn < kPatience; turn++) {
        if (met(cell.count.load(std::memory_order_acquire))) return true;
        relax();
    }
    for (;;) {
        cell.sleepers.fetch_add(1, std::memory_order_seq_cst);
        const uint32_t seen = cell.count.load(std::memory_order_seq_cst);
        const bool is_lost = lost.count.load(std::memory_order_seq_cst) != 0;
        if (!met(seen) && !is_lost) sleep(cell, seen);
        cell.sleepers.fetch_sub(1, std::memory_order_seq_cst);
        if (met(cell.count.load(std::memory_order_acquire))) return true;
        if (is_lost) return false;
    }
}

// Barrier between all ranks: what any of them wrote before it, all may read after it.
void meet(Ranks& ranks) {
    const uint32_t count = static_cast<uint32_t>(++ranks.count);
    Cell* all = cells(ranks);
    all[ranks.rank].count.store(count, std::memory_order_seq_cst);
    wake(all[ranks.rank]);
    for (int rank = 0; rank < ranks.size; rank++)
        if (rank != ranks.rank && !wait(all[rank], count, all[ranks.size])) ranks.lost = 1;
}

int64_t share_of(int64_t count, int64_t thread, int64_t threads) { return count * thread / threads; }

}  // namespace

bool exchange_share(const ExchangeArgs& args, int64_t thread, int64_t threads) {
    Ranks& ranks = *args.ranks;
    const int64_t row_bytes = args.columns * args.element_bytes, size = args.row_ids ? args.num_ids : args.columns;
    const int64_t begin = size * ranks.rank / ranks.size, end = size * (ranks.rank + 1) / ranks.size;
    const int64_t offset = args.row_ids ? 0 : begin * args.element_bytes;
    const int64_t bytes = args.row_ids ? row_bytes : (end - begin) * args.element_bytes;
    const int64_t most = ranks.slot_bytes / row_bytes;
    for (int64_t first = 0; first < args.rows; first += most) {
        const int64_t rows = args.rows - first < most ? args.rows - first : most;
        const int64_t from = first + share_of(rows, thread, threads), to = first + share_of(rows, thread + 1, threads);
        uint8_t* memory = slot(ranks, ranks.count);  // before the barrier: then a thread changes `count`
        for (int64_t row = from; row < to; row++) {
            if (args.row_ids && (args.row_ids[row] < begin || args.row_ids[row] >= end)) continue;
            std::memcpy(memory + (row - first) * row_bytes + offset, args.x + row * args.x_stride, static_cast<size_t>(bytes));
        }
        every::barrier();
        if (thread == 0) meet(ranks);
        every::barrier();
        if (ranks.lost) return false;
        if (args.first_only && ranks.rank != 0) continue;
        std::memcpy(args.y + from * row_bytes, memory + (from - first) * row_bytes, static_cast<size_t>((to - from) * row_bytes));
    }
    return true;
}

bool exchange(const ExchangeArgs& args) {
    every::parallel([&](int64_t thread, int64_t threads) { exchange_share(args, thread, threads); },
                    args.rows * args.columns * args.element_bytes);
    return !args.ranks->lost;
}

// Bytes of shared memory for so many ranks.
EXPORT int64_t penstock_ranks_bytes(int64_t size, int64_t slot_bytes) {
    return cells_bytes(size) + 2 * slot_bytes;
}

// Start of the slot of the next exchange.
EXPORT uint8_t* penstock_slot(const Ranks* ranks) { return slot(*ranks, ranks->count); }

// Barrier between all ranks. Returns 0; 2: a rank is lost.
EXPORT int32_t penstock_meet(Ranks* ranks) {
    meet(*ranks);
    return ranks->lost ? 2 : 0;
}

// Marks a rank as ended, so that the others stop waiting. Called by a thread that takes no part in exchanges.
EXPORT void penstock_lose(const Ranks* ranks) {
    Cell* all = cells(*ranks);
    all[ranks->size].count.store(1, std::memory_order_seq_cst);
    for (int rank = 0; rank < ranks->size; rank++) wake_all(all[rank]);
}

}  // namespace penstock
