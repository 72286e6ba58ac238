// Linear maps by integers of 6 bits.
#include "linear_integers.h"
#include "linear_run.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace kinds {

const LinearFunctions int6 = functions<Integers<6, false>>, int6_by_16 = functions<Integers<6, true>>;

}  // namespace kinds
}  // namespace PENSTOCK_ISA
}  // namespace penstock
