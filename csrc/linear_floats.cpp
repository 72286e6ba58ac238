// Linear maps by floating-point weights, on every instruction set.
#include "linear_bfp16.h"
#include "linear_float16.h"
#include "linear_float32.h"
#include "linear_float8.h"
#include "linear_run.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace kinds {

const LinearFunctions float32 = functions<Float32>, float16 = functions<Float16>, bfp16 = functions<Bfp16>,
                      float8_by_32 = functions<Float8By32>;

}  // namespace kinds
}  // namespace PENSTOCK_ISA
}  // namespace penstock
