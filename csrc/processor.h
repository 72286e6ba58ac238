// The instruction sets of this machine. PENSTOCK_PROCESSOR_SETS lists those of its kind of processor.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include <cstddef>
#include <cstdint>

namespace penstock {

#if defined(__x86_64__)

// The processor's sets (CPUID) whose state the system saves (XCR0).
class Processor {
public:
    Processor() {
        uint32_t eax, ebx, ecx, edx;
        if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return;
        base_ = ecx;
        if (!has(base_, kOsxsave)) return;
        asm("xgetbv" : "=a"(saved_), "=d"(edx) : "c"(0));
        if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) extended_b_ = ebx, extended_c_ = ecx, extended_d_ = edx;
        if (eax >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) more_ = eax;
    }

    bool generic() const { return true; }
    bool avx2() const { return has(saved_, kYmm) && has(base_, kFma | kF16c) && has(extended_b_, kAvx2); }
    bool avx_vnni() const { return avx2() && has(more_, kAvxVnni); }
    bool avx512() const { return avx2() && has(saved_, kZmm) && has(extended_b_, kAvx512fDqBwVl); }
    bool avx512_vnni() const { return avx512() && has(extended_c_, kVnni); }
    bool avx512_bf16() const { return avx512_vnni() && has(more_, kBf16); }

    // Linux grants the 8 KiB of tile state to processes that request it; this does.
    bool amx() const {
        constexpr long kRequestPermission = 0x1023, kTileData = 18;
        return avx512_bf16() && has(saved_, kTiles) && has(extended_d_, kAmxTileBf16Int8) &&
               syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    }

private:
    static constexpr uint32_t kFma = 1u << 12, kOsxsave = 1u << 27, kF16c = 1u << 29, kAvx2 = 1u << 5, kVnni = 1u << 11;
    static constexpr uint32_t kAvxVnni = 1u << 4, kBf16 = 1u << 5;
    static constexpr uint32_t kAvx512fDqBwVl = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
    static constexpr uint32_t kAmxTileBf16Int8 = 1u << 24 | 1u << 22 | 1u << 25;
    static constexpr uint32_t kYmm = 0x6, kZmm = 0xe0, kTiles = 0x60000;

    static bool has(uint32_t bits, uint32_t wanted) { return (bits & wanted) == wanted; }

    uint32_t base_ = 0, saved_ = 0, extended_b_ = 0, extended_c_ = 0, extended_d_ = 0, more_ = 0;
};
#define PENSTOCK_PROCESSOR_SETS(SET) \
    SET(generic) SET(avx2) SET(avx_vnni) SET(avx512) SET(avx512_vnni) SET(avx512_bf16) SET(amx)

#elif defined(__aarch64__)

// What the system says of the processor; of others than Linux and macOS, nothing.
class Processor {
public:
    bool neon() const { return true; }
    bool neon_dotprod() const { return dotprod_; }
    bool neon_bf16() const { return dotprod_ && i8mm_ && bf16_; }

private:
#if defined(__linux__)
    // The bits of the kernel's ABI; older C libraries do not name all of them.
    static bool has(unsigned long word, int bit) { return getauxval(word) >> bit & 1; }
    const bool dotprod_ = has(AT_HWCAP, 20), i8mm_ = has(AT_HWCAP2, 13), bf16_ = has(AT_HWCAP2, 14);
#elif defined(__APPLE__)
    static bool has(const char* feature) {
        int found = 0;
        size_t bytes = sizeof found;
        return sysctlbyname(feature, &found, &bytes, nullptr, 0) == 0 && found;
    }
    const bool dotprod_ = has("hw.optional.arm.FEAT_DotProd"), i8mm_ = has("hw.optional.arm.FEAT_I8MM"),
               bf16_ = has("hw.optional.arm.FEAT_BF16");
#else
    const bool dotprod_ = false, i8mm_ = false, bf16_ = false;
#endif
};
#define PENSTOCK_PROCESSOR_SETS(SET) SET(neon) SET(neon_dotprod) SET(neon_bf16)

#else

class Processor {
public:
    bool generic() const { return true; }
};
#define PENSTOCK_PROCESSOR_SETS(SET) SET(generic)

#endif

}  // namespace penstock
