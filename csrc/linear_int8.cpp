// Linear maps by integers of 8 bits.
#include "linear_integers.h"
#include "linear_run.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace kinds {

const LinearFunctions int8 = functions<Integers<8, false>>, int8_by_16 = functions<Integers<8, true>>;

}  // namespace kinds
}  // namespace PENSTOCK_ISA
}  // namespace penstock
