// Messages between a process that calls the library (proxy.cpp) and the library in an emulated process of another
// processor (emulated.cpp).
//
// The caller sends Requests. Until the Result the emulated process reads the caller's memory page by page as it touches
// it, and writes back what it has changed: addresses mean the same in both.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <cstdint>

constexpr int kSocket = 3;  // of the emulated process
constexpr int64_t kPageBytes = 4096;
constexpr int kMostArguments = 11;

struct Request {
    char name[32];  // of the function
    int64_t arguments[kMostArguments];  // addresses and integers
};

enum Kind : int64_t { kRead, kWrite, kResult };

struct Message {
    int64_t kind;
    int64_t address;  // or the result
    int64_t bytes;    // that follow a kWrite
};

// The answer to a kRead.
struct Page {
    int64_t mapped;
    uint8_t bytes[kPageBytes];
};

// Returns false if the other side has gone.
inline bool send_all(int socket, const void* data, int64_t bytes) {
    for (const char* at = static_cast<const char*>(data); bytes > 0;) {
        const ssize_t sent = send(socket, at, static_cast<size_t>(bytes), MSG_NOSIGNAL);
        if (sent <= 0) return false;
        at += sent, bytes -= sent;
    }
    return true;
}
inline bool receive_all(int socket, void* data, int64_t bytes) {
    return bytes == 0 || recv(socket, data, static_cast<size_t>(bytes), MSG_WAITALL) == bytes;
}
