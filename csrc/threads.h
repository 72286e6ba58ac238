// The team of threads that runs a kernel: that of torch.
//
// The library calls the OpenMP runtime that torch has loaded, by the names GCC gives its entry points, and is linked
// to none: those names are bound when Python loads it. So there is one pool of threads in the process, whose size
// `torch.set_num_threads` sets, whatever compiler built the library and however torch's runtime file is called
// (LLVM's and Intel's runtimes have these names too).
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>

extern "C" {
void GOMP_parallel(void (*body)(void*), void* data, unsigned num_threads, unsigned flags);
int omp_get_thread_num();
int omp_get_num_threads();
int omp_get_max_threads();
int omp_in_parallel();
}

namespace penstock {

// Where the threads of a team meet, and how much of the work since then they have taken.
struct Meeting {
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<unsigned> count{0};
    alignas(64) std::atomic<int64_t> taken{0};
};
inline thread_local Meeting* meeting = nullptr;  // of the team that this thread is in

namespace PENSTOCK_ISA {

// Turns of the waiting loop, some 100 microseconds, before a thread offers its processor to others at each.
constexpr int kPatience = 2000;

// Within `team`: wait until every thread of it has come here.
//
// Not the runtime's barrier, which spins for up to 15 ms: where two threads must share a processor, the one that waits
// would keep it from the one that it waits for, at each of the hundreds of meetings in a step.
inline void barrier() {
    Meeting& here = *meeting;
    const unsigned count = here.count.load(std::memory_order_relaxed);
    if (here.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == omp_get_num_threads()) {
        here.arrived.store(0, std::memory_order_relaxed);
        here.taken.store(0, std::memory_order_relaxed);
        here.count.store(count + 1, std::memory_order_release);
        return;
    }
    for (int turn = 0; here.count.load(std::memory_order_acquire) == count; turn++) {
        if (turn < kPatience) {
            __builtin_ia32_pause();
        } else {
            sched_yield();
        }
    }
}

// Run body() on every thread of a new team; `threads` of them, or as many as torch has where it is 0.
template <class Body>
void team(const Body& body, unsigned threads = 0) {
    struct Team {
        const Body& body;
        Meeting meeting;
    } begun{body, {}};
    const auto join = [](void* data) {
        meeting = &static_cast<Team*>(data)->meeting;
        static_cast<Team*>(data)->body();
    };
    GOMP_parallel(join, &begun, threads, 0);
}

// Work, in bytes read or the like of them, that one thread does sooner than a team would have begun.
constexpr int64_t kTeamBytes = 64 << 10;

// Run body(thread, threads) on every thread of the team, or on the caller alone where there is little `work`. Within
// a program (penstock.cpp) the team is there already, and each of its threads makes this call.
template <class Body>
void parallel(const Body& body, int64_t work = kTeamBytes) {
    const auto share = [&] {
        body(int64_t{omp_get_thread_num()}, int64_t{omp_get_num_threads()});
        barrier();
    };
    if (omp_in_parallel()) {
        share();
    } else {
        team(share, work < kTeamBytes ? 1 : 0);
    }
}

// How many of `count` things each of so many threads begins with: two of three, where they are two, are theirs so.
inline int64_t first_turn(int64_t count, int64_t threads) { return count / (2 * threads - 1); }

// Within `parallel`: run body(i, next) for each i below `count`. A thread begins with its first turn, the thread-th of
// them. The threads then take runs of neighbours in turn, which get shorter, so that one that is slower than others
// takes fewer and all end together. `next` is likely what the thread goes on with. Before the next such call the threads
// meet.
template <class Body>
void take_turns(int64_t count, const Body& body) {
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads(), parts = 2 * threads - 1;
    const int64_t first = first_turn(count, threads), given = first * threads;
    std::atomic<int64_t>& taken = meeting->taken;  // of those that are not given
    const auto turn = [&](int64_t i, int64_t last) {
        for (; i < last; i++) body(i, i + 1 < last ? i + 1 : given + taken.load(std::memory_order_relaxed));
    };
    turn(first * thread, first * (thread + 1));
    for (int64_t i = taken.load(std::memory_order_relaxed); given + i < count;) {
        const int64_t run = (count - given - i + parts - 1) / parts;
        if (!taken.compare_exchange_weak(i, i + run, std::memory_order_relaxed)) continue;
        turn(given + i, given + i + run);
        i = taken.load(std::memory_order_relaxed);
    }
}

// Run body(i) for each i below `count`, an equal run of neighbours on every thread.
template <class Body>
void parallel_for(int64_t count, const Body& body) {
    parallel([&](int64_t thread, int64_t threads) {
        for (int64_t i = count * thread / threads; i < count * (thread + 1) / threads; i++) body(i);
    });
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
