// An adapter's update of one row, for kernels that divide the rows among the threads themselves.
#pragma once

#include "ops.h"

namespace penstock {
namespace PENSTOCK_ISA {

constexpr int64_t kMostRanks = 256;  // of a map: MAX_RANK of checkpoint/adapters/peft.py

// Writes the update of the row `x` [columns], of type `dtype`, to `y` [y_columns]: the bits that `lora` computes.
void lora_row(const LoraMaps&, int32_t dtype, const void* x, int64_t columns, float* y, int64_t y_columns);

}  // namespace PENSTOCK_ISA
}  // namespace penstock
