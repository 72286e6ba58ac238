// Parallel loops on torch's OpenMP threads.
//
// The library calls the OpenMP runtime that torch has loaded, through GCC's names of its entry points, and links none
// itself: the names are bound when Python loads it. So the process has one pool of threads, whose size
// `torch.set_num_threads` sets, whatever compiler built the library and whatever torch's runtime is (LLVM's and Intel's
// runtimes export these names, too).
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>

#include "relax.h"

extern "C" {
void GOMP_parallel(void (*body)(void*), void* data, unsigned num_threads, unsigned flags);
int omp_get_thread_num();
int omp_get_num_threads();
int omp_get_max_threads();
int omp_in_parallel();
}

namespace penstock {

// The barrier of a team's threads, and the count of loop items taken since the last one.
struct TeamBarrier {
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<unsigned> count{0};
    alignas(64) std::atomic<int64_t> taken{0};
};
inline thread_local TeamBarrier* team_barrier = nullptr;  // of this thread's team

namespace PENSTOCK_ISA {

// Iterations of the waiting loop, about 100 microseconds, after which a thread yields its processor in each.
constexpr int kPatience = 2000;

// Barrier of the threads in `team`.
//
// The runtime's own barrier spins for up to 15 ms: when two threads share a processor, the waiting one would keep it
// from the other, at each of the hundreds of barriers in a step.
inline void barrier() {
    TeamBarrier& here = *team_barrier;
    const unsigned count = here.count.load(std::memory_order_relaxed);
    if (here.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == omp_get_num_threads()) {
        here.arrived.store(0, std::memory_order_relaxed);
        here.taken.store(0, std::memory_order_relaxed);
        here.count.store(count + 1, std::memory_order_release);
        return;
    }
    for (int turn = 0; here.count.load(std::memory_order_acquire) == count; turn++) {
        if (turn < kPatience) {
            relax();
        } else {
            sched_yield();
        }
    }
}

// Run body() on every thread of a new team of `threads` threads; 0: as many as torch has.
template <class Body>
void team(const Body& body, unsigned threads = 0) {
    struct Team {
        const Body& body;
        TeamBarrier team_barrier;
    } begun{body, {}};
    const auto join = [](void* data) {
        team_barrier = &static_cast<Team*>(data)->team_barrier;
        static_cast<Team*>(data)->body();
    };
    GOMP_parallel(join, &begun, threads, 0);
}

// Work, roughly in bytes read, that one thread finishes before a team could start.
constexpr int64_t kTeamBytes = 64 << 10;

// Run body(thread, threads) on every thread of the team, or on the caller alone if there is little `work`. Within a
// program (penstock.cpp) the team exists already, and each of its threads makes this call.
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

// Items assigned statically to each thread before dynamic scheduling: count / (2 * threads - 1), so 2/3 of all for two
// threads.
inline int64_t first_turn(int64_t count, int64_t threads) { return count / (2 * threads - 1); }

// Within `parallel`: run body(i, next) for each i below `count`. Each thread begins with the static share of its
// number. The threads then take runs of consecutive items, which get shorter, so that slower threads take fewer items
// and all finish together. `next` is the item that the thread probably takes next. A barrier must precede the next such
// call.
template <class Body>
void take_turns(int64_t count, const Body& body) {
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads(), parts = 2 * threads - 1;
    const int64_t first = first_turn(count, threads), given = first * threads;
    std::atomic<int64_t>& taken = team_barrier->taken;  // of the items that are not assigned statically
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

// Run body(i) for each i below `count`; every thread gets an equal run of consecutive items.
template <class Body>
void parallel_for(int64_t count, const Body& body) {
    parallel([&](int64_t thread, int64_t threads) {
        for (int64_t i = count * thread / threads; i < count * (thread + 1) / threads; i++) body(i);
    });
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
