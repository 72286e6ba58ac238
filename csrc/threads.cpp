// The workers of threads that call kernels.
#include <pthread.h>
#include <signal.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#else
#include <condition_variable>
#include <mutex>
#endif

#include <chrono>
#include <climits>
#include <cstdlib>
#include <vector>

#define PENSTOCK_ISA every  // instruction set
#include "threads.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace penstock {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::microseconds kLongestSpin{2000}, kShortestSpin{50};

std::atomic<int> wanted_threads{0};  // of a team; 0: not set
std::atomic<int> num_forks{0};       // that led to this process, since the library was loaded

#if defined(__linux__)

int allowed_processors() {
    cpu_set_t processors;
    return sched_getaffinity(0, sizeof processors, &processors) == 0 ? CPU_COUNT(&processors) : 1;
}

// A counter on which threads sleep until it changes.
class Epoch {
  public:
    void sleep_while(uint32_t seen) {
        while (value.load(std::memory_order_seq_cst) == seen) futex(FUTEX_WAIT_PRIVATE, seen);
    }
    void wake_all() { futex(FUTEX_WAKE_PRIVATE, INT_MAX); }

    std::atomic<uint32_t> value{0};

  private:
    static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "a futex is a plain word");
    void futex(int operation, uint32_t argument) {
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value), operation, argument, nullptr, nullptr, 0);
    }
};

#else

int allowed_processors() {
    const long processors = sysconf(_SC_NPROCESSORS_ONLN);
    return processors > 0 ? static_cast<int>(processors) : 1;
}

class Epoch {
  public:
    void sleep_while(uint32_t seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return value.load(std::memory_order_seq_cst) != seen; });
    }
    void wake_all() {
        { std::lock_guard<std::mutex> lock(mutex_); }  // a thread that has seen the old value now sleeps
        changed_.notify_all();
    }

    std::atomic<uint32_t> value{0};

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
};

#endif

class Workers {
  public:
    Workers() {
        static const int registered = pthread_atfork(nullptr, nullptr, [] { num_forks++; });
        (void)registered;
    }
    ~Workers() { stop(); }

    // Start or end workers until there are `count`, or as many as the system permits. Returns their number.
    int become(int count) {
        if (forks_ != num_forks.load(std::memory_order_relaxed)) forget();
        if (count == wanted_) return size();
        stop();
        wanted_ = count;
        sigset_t blocked, before;  // signals are for the threads of the program, but for those of a worker's own faults
        sigfillset(&blocked);
        for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&blocked, fault);
        pthread_sigmask(SIG_SETMASK, &blocked, &before);
        starts_.reserve(static_cast<size_t>(count));
        while (size() < count) {
            starts_.push_back({this, size() + 1, epoch_.value.load(std::memory_order_relaxed)});
            pthread_t thread;
            if (pthread_create(&thread, nullptr, &Workers::work, &starts_.back())) break;
            threads_.push_back(thread);
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        team_.threads = 1 + size();
        return size();
    }

    void run(void (*body)(void*), void* data) {
        body_ = body, data_ = data;
        next_epoch();
        member = {&team_, 0};
        body(data);
        every::barrier();  // then no worker uses `data` any more
        member = {nullptr, 0};
    }

  private:
    struct Start {
        Workers* workers;
        int thread;
        uint32_t epoch;
    };

    int size() const { return static_cast<int>(threads_.size()); }

    static void* work(void* given) {
        const Start start = *static_cast<Start*>(given);
        Workers& workers = *start.workers;
        member = {&workers.team_, start.thread};
        auto spin = std::chrono::duration_cast<Clock::duration>(kLongestSpin);
        for (uint32_t epoch = start.epoch;; every::barrier()) {
            epoch = workers.await_epoch_after(epoch, spin);
            if (!workers.body_) return nullptr;
            workers.body_(workers.data_);
        }
    }

    void next_epoch() {
        epoch_.value.fetch_add(1, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst)) epoch_.wake_all();
    }

    // Spins first, since a sleeping thread takes tens of microseconds to wake, and milliseconds on a virtual machine:
    // for as long as regions follow one another in a decode, but less and less while nothing happens meanwhile.
    uint32_t await_epoch_after(uint32_t epoch, Clock::duration& spin) {
        const Clock::time_point begin = Clock::now();
        const auto is_over = [&] { return epoch_.value.load(std::memory_order_acquire) != epoch; };
        wait_until([&] { return is_over() || Clock::now() - begin > spin; });
        if (!is_over()) {
            sleepers_.fetch_add(1, std::memory_order_seq_cst);
            epoch_.sleep_while(epoch);
            sleepers_.fetch_sub(1, std::memory_order_seq_cst);
        }
        if (Clock::now() - begin <= kLongestSpin) {
            spin = kLongestSpin;
        } else if (spin > kShortestSpin) {
            spin /= 2;
        }
        return epoch_.value.load(std::memory_order_acquire);
    }

    void stop() {
        if (forks_ != num_forks.load(std::memory_order_relaxed)) return forget();
        body_ = nullptr;
        next_epoch();
        for (pthread_t thread : threads_) pthread_join(thread, nullptr);
        threads_.clear();
        starts_.clear();
        wanted_ = 0;
    }

    // After a fork: its parent has the workers.
    void forget() {
        forks_ = num_forks.load(std::memory_order_relaxed);
        threads_.clear();
        starts_.clear();
        wanted_ = 0;
        sleepers_.store(0, std::memory_order_relaxed);
    }

    Team team_;
    alignas(64) Epoch epoch_;  // the number of regions begun
    std::atomic<int> sleepers_{0};
    void (*body_)(void*) = nullptr;
    void* data_ = nullptr;
    int wanted_ = 0, forks_ = num_forks.load(std::memory_order_relaxed);
    std::vector<pthread_t> threads_;
    std::vector<Start> starts_;
};

thread_local Workers workers;

}  // namespace

int ready_threads() {
    const int wanted = wanted_threads.load(std::memory_order_relaxed);
    return 1 + workers.become((wanted ? wanted : allowed_processors()) - 1);
}

void run_team(void (*body)(void*), void* data) { workers.run(body, data); }

// Set the number of threads that compute.
EXPORT void penstock_set_threads(int64_t threads) { wanted_threads.store(static_cast<int>(threads)); }

// Number of threads that compute.
EXPORT int64_t penstock_threads() { return ready_threads(); }

}  // namespace penstock
