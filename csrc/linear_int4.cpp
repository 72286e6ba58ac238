// Linear maps by integers of 4 bits.
#include "linear_integers.h"
#include "linear_run.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace kinds {

const LinearFunctions int4 = functions<Integers<4, false>>, int4_by_16 = functions<Integers<4, true>>;

}  // namespace kinds
}  // namespace PENSTOCK_ISA
}  // namespace penstock
