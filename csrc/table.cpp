// One instruction set's table of operations.
#include "ops.h"

namespace penstock {
namespace PENSTOCK_ISA {

int64_t weight_bytes(const Weight&);
int64_t linear_scratch_bytes(const Weight&, int64_t tokens);
void linear(const LinearArgs&);
void pack(const PackArgs&);
void unpack(const UnpackArgs&);
int64_t quantize(const QuantizeArgs&);

extern const Ops table;
const Ops table = {weight_bytes, linear_scratch_bytes, linear, pack, unpack, quantize};

}  // namespace PENSTOCK_ISA
}  // namespace penstock
