// y = x Wᵀ + b with packed weights; `linear_kind.h` and the kinds' headers describe their layouts.
#include "linear.h"

#include "linear_map.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

const LinearFunctions& integers(const Weight& weight) {
    const bool halves = weight.group == 16;
    switch (weight.bits) {
        case 4: return halves ? kinds::int4_by_16 : kinds::int4;
        case 5: return kinds::int5;
        case 6: return halves ? kinds::int6_by_16 : kinds::int6;
        default: return halves ? kinds::int8_by_16 : kinds::int8;
    }
}

const LinearFunctions& functions_of(const Weight& weight) {
    switch (weight.kind) {
        case kWeightFloat32: return kinds::float32;
        case kWeightFloat16: return kinds::float16;
        case kWeightBfp16: return kinds::bfp16;
#if defined(PENSTOCK_MULTIPLIES_BFLOAT16)
        case kWeightBFloat16: return kinds::bfloat16;
        case kWeightBFloat12: return kinds::bfloat12;
        case kWeightFloat8By16: return kinds::float8_by_16;
#endif
        case kWeightFloat8: return kinds::float8_by_32;
        default: return integers(weight);
    }
}

}  // namespace

int64_t weight_bytes(const Weight& weight) { return num_panels(weight) * functions_of(weight).panel_bytes(weight); }

int64_t linear_scratch_bytes(const Weight& weight, int64_t tokens) {
    return tokens * weight.x_bytes * functions_of(weight).bytes_per_token(weight.columns);
}

bool pack(const PackArgs& args) { return functions_of(*args.weight).pack(args); }

void unpack(const UnpackArgs& args) { functions_of(*args.weight).unpack(args); }

void linear(const LinearArgs& given) {
    LinearArgs args = given;
    if (args.adapters && !args.adapters->num_runs) args.added = nullptr, args.lora = nullptr;
    if (args.lora) args.row_slots = args.adapters->row_slots;
    functions_of(*args.weight).run(args);
}

int64_t linear_panels(const Weight& weight) { return num_panels(weight); }

int64_t linear_most_rows(const Weight& weight) {
    return std_max(1, kChunkBytes / functions_of(weight).bytes_per_token(weight.columns));
}

const uint8_t* linear_panel_data(const Weight& weight, int64_t panel) {
    return weight.data + panel * functions_of(weight).panel_bytes(weight);
}

void linear_prepare(const LinearArgs& args, int64_t from, int64_t token) {
    functions_of(*args.weight).prepare(args, from, token);
}

void linear_panel(const LinearArgs& args, int64_t panel, const uint8_t* next) {
    functions_of(*args.weight).multiply_panel(args, panel, next);
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
