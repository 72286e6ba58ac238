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

// Where the threads of the team meet. There is one team at a time.
struct Meeting {
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<unsigned> count{0};
};
inline Meeting meeting;

namespace PENSTOCK_ISA {

// Turns of the waiting loop, some 100 microseconds, before a thread offers its processor to others at each.
constexpr int kPatience = 2000;

// Within `parallel`: wait until every thread of the team has come here.
//
// Not the runtime's barrier, which spins for up to 15 ms: where two threads must share a processor, the one that waits
// would keep it from the one that it waits for, at each of the hundreds of meetings in a step.
inline void barrier() {
    const unsigned count = meeting.count.load(std::memory_order_relaxed);
    if (meeting.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == omp_get_num_threads()) {
        meeting.arrived.store(0, std::memory_order_relaxed);
        meeting.count.store(count + 1, std::memory_order_release);
        return;
    }
    for (int turn = 0; meeting.count.load(std::memory_order_acquire) == count; turn++) {
        if (turn < kPatience) {
            __builtin_ia32_pause();
        } else {
            sched_yield();
        }
    }
}

// Work, in bytes read or the like of them, that one thread does sooner than a team would have begun.
constexpr int64_t kTeamBytes = 64 << 10;

// Run body(thread, threads) on every thread of the team, or on the caller alone where there is little `work`. Within
// a program (penstock.cpp) the team is there already, and each of its threads makes this call.
template <class Body>
void parallel(const Body& body, int64_t work = kTeamBytes) {
    const auto call = [](void* data) {
        (*static_cast<const Body*>(data))(int64_t{omp_get_thread_num()}, int64_t{omp_get_num_threads()});
        barrier();
    };
    void* data = const_cast<Body*>(&body);
    if (omp_in_parallel()) {
        call(data);
    } else {
        GOMP_parallel(call, data, work < kTeamBytes ? 1 : 0, 0);
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
