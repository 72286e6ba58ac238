// What this machine can do at most: bytes read a second, and operations a second of the units that the kernels use.
// Built and run by benchmarks/speed/ceilings.py; prints one JSON object.
#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace {

int threads;

// The best of seven times that all threads take for `work(thread)`.
double seconds(const std::function<void(int)>& work) {
    double best = 1e9;
    for (int round = 0; round < 7; round++) {
        const auto start = std::chrono::steady_clock::now();
        std::vector<std::thread> team;
        for (int i = 0; i < threads; i++) team.emplace_back(work, i);
        for (std::thread& one : team) one.join();
        const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
        if (passed.count() < best) best = passed.count();
    }
    return best;
}

constexpr long kRounds = 4000000;

// Twelve independent chains, more than the units' latency asks for. The registers' content does not matter.
#define CHAINS(op, wide)                                                                                  \
    for (long i = 0; i < kRounds; i++)                                                                    \
        asm volatile(op " %%" wide "15,%%" wide "14,%%" wide "0;" op " %%" wide "15,%%" wide "14,%%" wide \
                        "1;" op " %%" wide "15,%%" wide "14,%%" wide "2;" op " %%" wide "15,%%" wide      \
                        "14,%%" wide "3;" op " %%" wide "15,%%" wide "14,%%" wide "4;" op " %%" wide      \
                        "15,%%" wide "14,%%" wide "5;" op " %%" wide "15,%%" wide "14,%%" wide "6;" op    \
                        " %%" wide "15,%%" wide "14,%%" wide "7;" op " %%" wide "15,%%" wide "14,%%" wide \
                        "8;" op " %%" wide "15,%%" wide "14,%%" wide "9;" op " %%" wide "15,%%" wide      \
                        "14,%%" wide "10;" op " %%" wide "15,%%" wide "14,%%" wide "11;" ::               \
                            : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8",     \
                              "xmm9", "xmm10", "xmm11")

double operations(const std::function<void(int)>& work, double each) {
    return threads * kRounds * 12.0 * each / seconds(work);
}

// Bytes a second that all threads read of `memory`, each of its share through `Streams` parts of a stretch at a time.
template <int Streams>
double read_through(const char* memory, size_t bytes, size_t ahead) {
    constexpr size_t stretch = 256 << 10, stream = stretch / Streams;
    const double time = seconds([&](int thread) {
        const size_t share = bytes / threads / stretch * stretch;
        __m256i sums[8] = {};
        for (const char* p = memory + share * thread; p < memory + share * (thread + 1); p += stretch) {
            for (size_t i = 0; i < stream; i += 64 * 8 / Streams) {
                for (int s = 0; s < 8; s++) {
                    const char* at = p + s % Streams * stream + i + s / Streams * 64;
                    const __m256i* line = reinterpret_cast<const __m256i*>(at);
                    if (ahead) _mm_prefetch(at + ahead, _MM_HINT_T0);
                    sums[s] = _mm256_xor_si256(sums[s], _mm256_xor_si256(line[0], line[1]));
                }
            }
        }
        asm volatile("" ::"m"(sums));
    });
    return bytes / time;
}

// Through eight pages at a time, in each of which the processor fetches ahead on its own, or through one after another:
// which is faster depends on the processor, and so does how far ahead it fetches when it is told to.
double read_bandwidth() {
    constexpr size_t bytes = size_t{1} << 30;
    char* memory = static_cast<char*>(std::aligned_alloc(2 << 20, bytes));
    madvise(memory, bytes, MADV_HUGEPAGE);
    std::memset(memory, 1, bytes);
    double best = 0;
    for (const size_t ahead : {size_t{0}, size_t{1} << 10, size_t{4} << 10, size_t{256} << 10}) {
        best = std::max(best, read_through<8>(memory, bytes, ahead));
        best = std::max(best, read_through<1>(memory, bytes, ahead));
    }
    std::free(memory);
    return best;
}

}  // namespace

int main(int, char** argv) {
    threads = std::atoi(argv[1]);
    std::string line = "{\"read\": " + std::to_string(read_bandwidth());
    if (__builtin_cpu_supports("avx512f")) {
        line += ", \"float32\": " + std::to_string(operations([](int) { CHAINS("vfmadd231ps", "zmm"); }, 32));
    } else {
        line += ", \"float32\": " + std::to_string(operations([](int) { CHAINS("vfmadd231ps", "ymm"); }, 16));
    }
    if (__builtin_cpu_supports("avx512vnni")) {
        line += ", \"int16\": " + std::to_string(operations([](int) { CHAINS("vpdpwssd", "zmm"); }, 64));
        line += ", \"int8\": " + std::to_string(operations([](int) { CHAINS("vpdpbusd", "zmm"); }, 128));
    }
    if (__builtin_cpu_supports("avx512bf16"))
        line += ", \"bfloat16\": " + std::to_string(operations([](int) { CHAINS("vdpbf16ps", "zmm"); }, 64));
    std::printf("%s}\n", line.c_str());
}
