// A library with the interface of libpenstock.so whose functions run in an emulated process: so tests call the library
// of another processor. PENSTOCK_EMULATED is the command that starts the process, divided at spaces.
//
// Start the caller with an unlimited stack (`ulimit -s unlimited`): the system then maps its memory where the emulator
// has none of its own.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "protocol.h"

namespace {

std::mutex mutex;  // one call at a time

[[noreturn]] void fail(const char* reason) {
    std::fprintf(stderr, "the emulated library: %s\n", reason);
    std::abort();
}

// Start the emulated process; returns the socket.
int start() {
    int sockets[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets)) fail("no socket");
    const char* command = std::getenv("PENSTOCK_EMULATED");
    if (!command) fail("PENSTOCK_EMULATED is not set");
    std::istringstream words(command);
    std::vector<std::string> arguments;
    for (std::string word; words >> word;) arguments.push_back(word);
    std::vector<char*> pointers;
    for (std::string& argument : arguments) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    const pid_t child = fork();
    if (child < 0) fail("no process");
    if (child == 0) {
        const rlimit usual{8 << 20, RLIM_INFINITY};
        setrlimit(RLIMIT_STACK, &usual);
        if (sockets[1] == kSocket) fcntl(kSocket, F_SETFD, 0);
        dup2(sockets[1], kSocket);
        execvp(pointers[0], pointers.data());
        std::perror(pointers[0]);
        _exit(1);
    }
    close(sockets[1]);
    return sockets[0];
}

Page read_page(int64_t address) {
    Page page{};
    const iovec to{page.bytes, kPageBytes}, from{reinterpret_cast<void*>(address), kPageBytes};
    page.mapped = process_vm_readv(getpid(), &to, 1, &from, 1, 0) == kPageBytes;
    return page;
}

int64_t call(const char* name, const int64_t (&arguments)[kMostArguments]) {
    const std::lock_guard<std::mutex> guard(mutex);
    static const int socket = start();
    Request request{};
    std::strncpy(request.name, name, sizeof request.name - 1);
    std::memcpy(request.arguments, arguments, sizeof arguments);
    bool connected = send_all(socket, &request, sizeof request);
    Message message{};
    while (connected && receive_all(socket, &message, sizeof message)) {
        if (message.kind == kResult) return message.address;
        if (message.kind == kRead) {
            const Page page = read_page(message.address);
            connected = send_all(socket, &page, sizeof page);
        } else {
            connected = receive_all(socket, reinterpret_cast<void*>(message.address), message.bytes);
        }
    }
    fail("its process has ended");
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// More arguments than a function has are read from where they would be, and ignored by it.
#define FORWARD(name)                                                                                              \
    EXPORT int64_t name(int64_t a, int64_t b, int64_t c, int64_t d, int64_t e, int64_t f, int64_t g, int64_t h,    \
                        int64_t i, int64_t j, int64_t k) {                                                         \
        return call(#name, {a, b, c, d, e, f, g, h, i, j, k});                                                     \
    }

FORWARD(penstock_run)
FORWARD(penstock_back)
FORWARD(penstock_set_threads)
FORWARD(penstock_threads)
FORWARD(penstock_lay_out)
FORWARD(penstock_weight_bytes)
FORWARD(penstock_pack)
FORWARD(penstock_quantize)
FORWARD(penstock_argmax)
FORWARD(penstock_sample)
FORWARD(penstock_topk_logprobs)
FORWARD(penstock_apply_bitmask)
FORWARD(penstock_penalize)

// Texts are in the emulated process's memory: it copies them to this one's.
EXPORT const char* penstock_headers() {
    static char text[256];
    return call("penstock_headers", {0, reinterpret_cast<int64_t>(text)}) ? text : nullptr;
}
EXPORT const char* penstock_choose(const char* name) {
    static char text[256];
    return call("penstock_choose", {reinterpret_cast<int64_t>(name), reinterpret_cast<int64_t>(text)}) ? text : nullptr;
}
EXPORT const char* penstock_built(int64_t index) {
    static char text[256];
    return call("penstock_built", {index, reinterpret_cast<int64_t>(text)}) ? text : nullptr;
}
