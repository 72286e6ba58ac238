// Prints the instruction sets of the machine that it runs on, for CMakeLists.txt.
#include <cstdio>

#include "processor.h"

int main() {
    const penstock::Processor processor;
    if (processor.avx2()) std::puts("avx2");
    if (processor.avx_vnni()) std::puts("avx_vnni");
    if (processor.avx512()) std::puts("avx512");
    if (processor.avx512_vnni()) std::puts("avx512_vnni");
    if (processor.avx512_bf16()) std::puts("avx512_bf16");
    if (processor.amx()) std::puts("amx");
}
