// The layout of those structs of `ops.h` that Python has mirrors of (`native/structs.py`), for it to compare at load.
#include <cstddef>
#include <utility>

#include "ops.h"

namespace penstock {
namespace {

struct Field {
    const char* name;
    int64_t offset;
    int64_t bytes;
};

struct Layout {
    const char* name;
    int64_t bytes;
    const Field* fields;
    int64_t num_fields;
};

// Whether T is made of N fields: N values initialise it, and no more do.
struct AnyValue {
    template <class T>
    operator T() const;
};
template <class T, size_t... I>
constexpr auto takes(std::index_sequence<I...>, int) -> decltype(T{(void(I), AnyValue())...}, true) {
    return true;
}
template <class T, size_t... I>
constexpr bool takes(std::index_sequence<I...>, long) {
    return false;
}
template <class T, size_t N>
constexpr bool has_fields() {
    return takes<T>(std::make_index_sequence<N>(), 0) && !takes<T>(std::make_index_sequence<N + 1>(), 0);
}

template <class T, size_t N>
constexpr Layout layout_of(const char* name, const Field (&fields)[N]) {
    static_assert(has_fields<T, N>(), "a field of ops.h is missing here");
    return {name, sizeof(T), fields, N};
}

#define FIELD(type, name) {#name, offsetof(type, name), sizeof(type::name)}

constexpr Field kWeight[] = {
    FIELD(Weight, kind), FIELD(Weight, gated), FIELD(Weight, rows), FIELD(Weight, columns), FIELD(Weight, data),
    FIELD(Weight, row_scales), FIELD(Weight, bits), FIELD(Weight, group), FIELD(Weight, scale_type),
    FIELD(Weight, offset), FIELD(Weight, offset_type), FIELD(Weight, super_type), FIELD(Weight, super_columns),
    FIELD(Weight, x_bytes),
};
constexpr Field kLinearArgs[] = {
    FIELD(LinearArgs, weight), FIELD(LinearArgs, x), FIELD(LinearArgs, x_stride), FIELD(LinearArgs, x_dtype),
    FIELD(LinearArgs, y_dtype), FIELD(LinearArgs, y), FIELD(LinearArgs, y_stride), FIELD(LinearArgs, tokens),
    FIELD(LinearArgs, bias), FIELD(LinearArgs, scratch),
    FIELD(LinearArgs, after_gate),
};
constexpr Field kUnpackArgs[] = {
    FIELD(UnpackArgs, weight), FIELD(UnpackArgs, row_ids), FIELD(UnpackArgs, num_rows), FIELD(UnpackArgs, y),
    FIELD(UnpackArgs, y_dtype),
};
constexpr Field kPagedCache[] = {
    FIELD(PagedCache, num_heads), FIELD(PagedCache, head_dim), FIELD(PagedCache, block_size), FIELD(PagedCache, kind),
    FIELD(PagedCache, block_stride), FIELD(PagedCache, data),
};
constexpr Field kBatch[] = {
    FIELD(Batch, num_tokens), FIELD(Batch, num_seqs), FIELD(Batch, query_start), FIELD(Batch, seq_lens),
    FIELD(Batch, table_start), FIELD(Batch, blocks), FIELD(Batch, slots),
};
constexpr Field kAttentionArgs[] = {
    FIELD(AttentionArgs, cache), FIELD(AttentionArgs, batch), FIELD(AttentionArgs, query),
    FIELD(AttentionArgs, query_stride), FIELD(AttentionArgs, dtype), FIELD(AttentionArgs, out),
    FIELD(AttentionArgs, num_heads), FIELD(AttentionArgs, window), FIELD(AttentionArgs, scale),
    FIELD(AttentionArgs, soft_cap), FIELD(AttentionArgs, threads), FIELD(AttentionArgs, scratch),
};
constexpr Field kRopeArgs[] = {
    FIELD(RopeArgs, cache), FIELD(RopeArgs, batch), FIELD(RopeArgs, qkv), FIELD(RopeArgs, dtype),
    FIELD(RopeArgs, num_heads), FIELD(RopeArgs, angles), FIELD(RopeArgs, num_angles), FIELD(RopeArgs, query_norm),
    FIELD(RopeArgs, key_norm), FIELD(RopeArgs, eps),
};
constexpr Field kNormArgs[] = {
    FIELD(NormArgs, x), FIELD(NormArgs, residual), FIELD(NormArgs, y), FIELD(NormArgs, weight),
    FIELD(NormArgs, dtype), FIELD(NormArgs, rows), FIELD(NormArgs, columns), FIELD(NormArgs, eps),
    FIELD(NormArgs, factor),
};
constexpr Field kGatherArgs[] = {
    FIELD(GatherArgs, table), FIELD(GatherArgs, row_bytes), FIELD(GatherArgs, row_ids), FIELD(GatherArgs, num_rows),
    FIELD(GatherArgs, y),
};
constexpr Field kScaleArgs[] = {
    FIELD(ScaleArgs, x), FIELD(ScaleArgs, dtype), FIELD(ScaleArgs, rows), FIELD(ScaleArgs, columns),
    FIELD(ScaleArgs, factor),
};
constexpr Field kCall[] = {
    FIELD(Call, operation), FIELD(Call, arguments),
};
constexpr Field kSegment[] = {
    FIELD(Segment, calls), FIELD(Segment, count), FIELD(Segment, rows),
};
constexpr Field kSampleControls[] = {
    FIELD(SampleControls, temperature), FIELD(SampleControls, top_k), FIELD(SampleControls, top_p),
    FIELD(SampleControls, min_p), FIELD(SampleControls, typical_p), FIELD(SampleControls, uniform),
};

#undef FIELD

constexpr Layout kLayouts[] = {
    layout_of<Weight>("Weight", kWeight),
    layout_of<LinearArgs>("LinearArgs", kLinearArgs),
    layout_of<UnpackArgs>("UnpackArgs", kUnpackArgs),
    layout_of<PagedCache>("PagedCache", kPagedCache),
    layout_of<Batch>("Batch", kBatch),
    layout_of<AttentionArgs>("AttentionArgs", kAttentionArgs),
    layout_of<RopeArgs>("RopeArgs", kRopeArgs),
    layout_of<NormArgs>("NormArgs", kNormArgs),
    layout_of<GatherArgs>("GatherArgs", kGatherArgs),
    layout_of<ScaleArgs>("ScaleArgs", kScaleArgs),
    layout_of<Call>("Call", kCall),
    layout_of<Segment>("Segment", kSegment),
    layout_of<SampleControls>("SampleControls", kSampleControls),
};

}  // namespace

// The layouts; `count` becomes how many there are.
extern "C" __attribute__((visibility("default"))) const Layout* penstock_layouts(int64_t* count) {
    *count = static_cast<int64_t>(sizeof(kLayouts) / sizeof(Layout));
    return kLayouts;
}

}  // namespace penstock
