// Prints the instruction sets of the machine that it runs on, for CMakeLists.txt.
#include <cstdio>

#include "processor.h"

int main() {
    const penstock::Processor processor;
#define PRINT(name) \
    if (processor.name()) std::puts(#name);
    PENSTOCK_PROCESSOR_SETS(PRINT)
}
