// Linear maps that multiply bfloat16s.
#include "linear_bfloat16.h"
#include "linear_float8.h"
#include "linear_run.h"
#if defined(PENSTOCK_TILES)
#include "linear_tiles.h"
#endif

namespace penstock {
namespace PENSTOCK_ISA {
namespace kinds {

#if defined(PENSTOCK_TILES)
const LinearFunctions bfloat16 = functions<BFloat16, TiledBFloat16>, bfloat12 = functions<BFloat12, TiledBFloat12>;
#elif defined(PENSTOCK_MULTIPLIES_BFLOAT16)
const LinearFunctions bfloat16 = functions<BFloat16>, bfloat12 = functions<BFloat12>;
#endif
#if defined(PENSTOCK_MULTIPLIES_BFLOAT16)
const LinearFunctions float8_by_16 = functions<Float8By16>;
#endif

}  // namespace kinds
}  // namespace PENSTOCK_ISA
}  // namespace penstock
