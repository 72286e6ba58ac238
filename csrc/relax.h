// A waiting loop's hint to the processor, which gives way to the core's other thread and saves power.
#pragma once

namespace penstock {

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");  // some 40 cycles, as pause; yield does nothing on most cores
#endif
}

}  // namespace penstock
