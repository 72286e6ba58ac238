// Runs the functions of a libpenstock.so, whose path is the argument, for the process at the other end of a socket
// (proxy.cpp): the first access to one of its pages copies the page here, to the same address, and after a call what has
// changed is written back.
//
// qemu 7.2 resumes at a wrong instruction after a fault in DC ZVA, with which the C library clears memory: let it choose
// functions without it (GLIBC_TUNABLES=glibc.cpu.name=kunpeng920).
#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include "protocol.h"

namespace {

// Pages of the other process, and what they held when they were copied.
struct Copies {
    static constexpr int64_t kMost = 1 << 18;
    int64_t addresses[kMost];
    uint8_t* originals;  // [kMost][kPageBytes], backed as it is used
    int64_t count = 0;
    std::atomic_flag busy = ATOMIC_FLAG_INIT;
} copies;

void* map(int64_t bytes) {
    void* memory = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) _exit(2);
    return memory;
}

bool is_copied(int64_t address) {
    for (int64_t i = copies.count - 1; i >= 0; i--)
        if (copies.addresses[i] == address) return true;
    return false;
}

// Copy the page of the faulting address. Another thread may have done so meanwhile.
void copy_page(int signal, siginfo_t* information, void*) {
    const int64_t address = reinterpret_cast<int64_t>(information->si_addr) / kPageBytes * kPageBytes;
    while (copies.busy.test_and_set(std::memory_order_acquire)) {
    }
    if (!is_copied(address)) {
        const Message message{kRead, address, 0};
        Page page;
        if (!send_all(kSocket, &message, sizeof message) || !receive_all(kSocket, &page, sizeof page)) _exit(2);
        if (!page.mapped || copies.count == Copies::kMost) {
            std::fprintf(stderr, "signal %d at %p\n", signal, information->si_addr);
            _exit(2);
        }
        std::memcpy(copies.originals + copies.count * kPageBytes, page.bytes, kPageBytes);
        void* memory = map(kPageBytes);
        std::memcpy(memory, page.bytes, kPageBytes);
        if (mremap(memory, kPageBytes, kPageBytes, MREMAP_MAYMOVE | MREMAP_FIXED, reinterpret_cast<void*>(address)) == MAP_FAILED)
            _exit(2);
        copies.addresses[copies.count++] = address;
    }
    copies.busy.clear(std::memory_order_release);
}

// Only changed bytes are written: other threads of the other process may change those beside them.
void write_back() {
    for (int64_t i = 0; i < copies.count; i++) {
        uint8_t* bytes = reinterpret_cast<uint8_t*>(copies.addresses[i]);
        const uint8_t* original = copies.originals + i * kPageBytes;
        for (int64_t from = 0, to; from < kPageBytes; from = to) {
            const bool changed = bytes[from] != original[from];
            for (to = from + 1; to < kPageBytes && (bytes[to] != original[to]) == changed;) to++;
            const Message message{kWrite, copies.addresses[i] + from, to - from};
            if (changed && !(send_all(kSocket, &message, sizeof message) && send_all(kSocket, bytes + from, to - from)))
                _exit(2);
        }
        munmap(bytes, kPageBytes);
    }
    copies.count = 0;
}

int64_t call(void* library, const Request& request) {
    using Function = int64_t (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);
    const int64_t(&a)[kMostArguments] = request.arguments;
    const auto function = reinterpret_cast<Function>(dlsym(library, request.name));
    if (!function) _exit(2);
    const int64_t result = function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10]);
    for (const char* name : {"penstock_headers", "penstock_choose", "penstock_built"})
        if (result && std::strcmp(request.name, name) == 0)  // a text, to copy to where the caller wants it
            std::strcpy(reinterpret_cast<char*>(a[1]), reinterpret_cast<const char*>(result));
    return result;
}

}  // namespace

int main(int, char** arguments) {
    void* library = dlopen(arguments[1], RTLD_NOW);
    if (!library) {
        std::fprintf(stderr, "%s\n", dlerror());
        return 2;
    }
    copies.originals = static_cast<uint8_t*>(map(Copies::kMost * kPageBytes));
    struct sigaction action = {};
    action.sa_sigaction = copy_page;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
    for (Request request; receive_all(kSocket, &request, sizeof request);) {
        const Message message{kResult, call(library, request), 0};
        write_back();
        if (!send_all(kSocket, &message, sizeof message)) break;
    }
    return 0;
}
