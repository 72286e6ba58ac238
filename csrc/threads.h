// Parallel loops on the library's own threads.
//
// A thread that calls kernels is the first of a team; the others are its workers (threads.cpp), which are started when
// it first needs them, run on the processors that it may use itself, and end with it. So several threads may call
// kernels at the same time. A child of fork(2) starts workers of its own.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>

#include "relax.h"

namespace penstock {

// Threads in a parallel region, and what they share: a barrier, and the count of loop items taken since the last one.
struct Team {
    int threads = 1;
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<unsigned> count{0};
    alignas(64) std::atomic<int64_t> taken{0};
};

// A thread's place in its team; outside parallel regions it has none.
struct Member {
    Team* team;
    int thread;
};
inline thread_local Member member = {nullptr, 0};

// Number of threads of a team that the calling thread begins, which are started if they are not there yet.
int ready_threads();

// Run body(data) on every thread of the calling thread's team, which is ready, itself the first of them.
void run_team(void (*body)(void*), void* data);

// Iterations of a waiting loop, about 100 microseconds, after which a thread yields its processor in each.
constexpr int kPatience = 2000;

// Wait in a loop until condition().
template <class Condition>
void wait_until(const Condition& condition) {
    for (int turn = 0; !condition(); turn++) turn < kPatience ? relax() : static_cast<void>(sched_yield());
}

namespace PENSTOCK_ISA {

// Barrier of the threads of a team.
inline void barrier() {
    Team& team = *member.team;
    const unsigned count = team.count.load(std::memory_order_relaxed);
    if (team.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == team.threads) {
        team.arrived.store(0, std::memory_order_relaxed);
        team.taken.store(0, std::memory_order_relaxed);
        team.count.store(count + 1, std::memory_order_release);
        return;
    }
    wait_until([&] { return team.count.load(std::memory_order_acquire) != count; });
}

// Run body() on every thread of the caller's team, or on a team of the caller alone.
template <class Body>
void team(const Body& body, bool alone) {
    if (!alone && ready_threads() > 1)
        return run_team([](void* data) { (*static_cast<const Body*>(data))(); }, const_cast<Body*>(&body));
    Team of_one;
    member = {&of_one, 0};
    body();
    member = {nullptr, 0};
}

// Work, roughly in bytes read, that one thread finishes before a team could start.
constexpr int64_t kTeamBytes = 64 << 10;

// Run body(thread, threads) on every thread of the team, or on the caller alone if there is little `work`. Within a
// program (penstock.cpp) the team exists already, and each of its threads makes this call.
template <class Body>
void parallel(const Body& body, int64_t work = kTeamBytes) {
    const auto share = [&] {
        body(int64_t{member.thread}, int64_t{member.team->threads});
        barrier();
    };
    member.team ? share() : team(share, work < kTeamBytes);
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
    const int64_t thread = member.thread, threads = member.team->threads, parts = 2 * threads - 1;
    const int64_t first = first_turn(count, threads), given = first * threads;
    std::atomic<int64_t>& taken = member.team->taken;  // of the items that are not assigned statically
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
