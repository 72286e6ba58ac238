// Linear maps by integers of 5 bits.
#include "linear_integers.h"
#include "linear_run.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace kinds {

const LinearFunctions int5 = functions<Integers<5, false>>;

}  // namespace kinds
}  // namespace PENSTOCK_ISA
}  // namespace penstock
