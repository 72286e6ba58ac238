// One instruction set's table of operations.
#include "ops.h"

namespace penstock {
namespace PENSTOCK_ISA {

#define PENSTOCK_DECLARE(name, Args) void name(const Args&);
PENSTOCK_OPERATIONS(PENSTOCK_DECLARE)
#undef PENSTOCK_DECLARE
#define PENSTOCK_DECLARE(result, name, arguments) result name arguments;
PENSTOCK_FUNCTIONS(PENSTOCK_DECLARE)
#undef PENSTOCK_DECLARE

#define PENSTOCK_OPERATION(name, Args) name,
#define PENSTOCK_FUNCTION(result, name, arguments) name,
extern const Ops table;
const Ops table = {PENSTOCK_OPERATIONS(PENSTOCK_OPERATION) PENSTOCK_FUNCTIONS(PENSTOCK_FUNCTION)};

}  // namespace PENSTOCK_ISA
}  // namespace penstock
