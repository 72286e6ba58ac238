// The layouts of the structs in `ops.h` that `native/structs.py` mirrors; Python compares them when it loads the
// library.
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

// Whether T has N fields: it can be initialised from N values, but not from more.
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
    FIELD(Weight, x_group),
    FIELD(Weight, x_bytes),
};
constexpr Field kLinearArgs[] = {
    FIELD(LinearArgs, weight), FIELD(LinearArgs, x), FIELD(LinearArgs, x_stride), FIELD(LinearArgs, x_dtype),
    FIELD(LinearArgs, y_dtype), FIELD(LinearArgs, y), FIELD(LinearArgs, y_stride), FIELD(LinearArgs, tokens),
    FIELD(LinearArgs, bias), FIELD(LinearArgs, scratch),
    FIELD(LinearArgs, after_gate), FIELD(LinearArgs, activation), FIELD(LinearArgs, added),
    FIELD(LinearArgs, added_stride), FIELD(LinearArgs, adapters),
};
constexpr Field kAdapterRows[] = {
    FIELD(AdapterRows, num_runs), FIELD(AdapterRows, slots), FIELD(AdapterRows, starts), FIELD(AdapterRows, rows),
};
constexpr Field kLoraMap[] = {
    FIELD(LoraMap, a), FIELD(LoraMap, b), FIELD(LoraMap, first), FIELD(LoraMap, rows), FIELD(LoraMap, first_rank),
    FIELD(LoraMap, rank), FIELD(LoraMap, scale),
};
constexpr Field kLoraMaps[] = {
    FIELD(LoraMaps, maps), FIELD(LoraMaps, count),
};
constexpr Field kLoraArgs[] = {
    FIELD(LoraArgs, adapters), FIELD(LoraArgs, slots), FIELD(LoraArgs, x), FIELD(LoraArgs, x_stride),
    FIELD(LoraArgs, dtype), FIELD(LoraArgs, columns), FIELD(LoraArgs, y), FIELD(LoraArgs, y_columns),
    FIELD(LoraArgs, tokens), FIELD(LoraArgs, scratch),
};
constexpr Field kUnpackArgs[] = {
    FIELD(UnpackArgs, weight), FIELD(UnpackArgs, row_ids), FIELD(UnpackArgs, num_rows), FIELD(UnpackArgs, y),
    FIELD(UnpackArgs, y_dtype),
};
constexpr Field kPagedCache[] = {
    FIELD(PagedCache, num_heads), FIELD(PagedCache, head_dim), FIELD(PagedCache, block_size), FIELD(PagedCache, kind),
    FIELD(PagedCache, block_stride), FIELD(PagedCache, data), FIELD(PagedCache, latent),
};
constexpr Field kBatch[] = {
    FIELD(Batch, num_tokens), FIELD(Batch, num_seqs), FIELD(Batch, query_start), FIELD(Batch, seq_lens),
    FIELD(Batch, table_start), FIELD(Batch, blocks), FIELD(Batch, slots), FIELD(Batch, branches),
};
constexpr Field kAttentionArgs[] = {
    FIELD(AttentionArgs, cache), FIELD(AttentionArgs, batch), FIELD(AttentionArgs, query),
    FIELD(AttentionArgs, query_stride), FIELD(AttentionArgs, query_step), FIELD(AttentionArgs, dtype),
    FIELD(AttentionArgs, out),
    FIELD(AttentionArgs, num_heads), FIELD(AttentionArgs, window),
    FIELD(AttentionArgs, bidirectional), FIELD(AttentionArgs, chunk), FIELD(AttentionArgs, scale),
    FIELD(AttentionArgs, soft_cap), FIELD(AttentionArgs, sinks), FIELD(AttentionArgs, threads), FIELD(AttentionArgs, scratch),
};
constexpr Field kRopeArgs[] = {
    FIELD(RopeArgs, cache), FIELD(RopeArgs, batch), FIELD(RopeArgs, qkv), FIELD(RopeArgs, dtype),
    FIELD(RopeArgs, parts), FIELD(RopeArgs, value_norm), FIELD(RopeArgs, num_heads), FIELD(RopeArgs, query_step), FIELD(RopeArgs, angles), FIELD(RopeArgs, num_angles),
    FIELD(RopeArgs, interleaved), FIELD(RopeArgs, query_factors), FIELD(RopeArgs, query_norm),
    FIELD(RopeArgs, key_norm), FIELD(RopeArgs, norm_dtype), FIELD(RopeArgs, eps),
};
constexpr Field kNormArgs[] = {
    FIELD(NormArgs, x), FIELD(NormArgs, residual), FIELD(NormArgs, y), FIELD(NormArgs, stride),
    FIELD(NormArgs, weight), FIELD(NormArgs, weight_dtype), FIELD(NormArgs, dtype), FIELD(NormArgs, rows),
    FIELD(NormArgs, columns), FIELD(NormArgs, eps), FIELD(NormArgs, factor), FIELD(NormArgs, groups),
    FIELD(NormArgs, bias), FIELD(NormArgs, after), FIELD(NormArgs, after_dtype), FIELD(NormArgs, after_eps),
    FIELD(NormArgs, total),
};
constexpr Field kGatherArgs[] = {
    FIELD(GatherArgs, table), FIELD(GatherArgs, row_bytes), FIELD(GatherArgs, row_ids), FIELD(GatherArgs, num_rows),
    FIELD(GatherArgs, y),
};
constexpr Field kScaleArgs[] = {
    FIELD(ScaleArgs, x), FIELD(ScaleArgs, dtype), FIELD(ScaleArgs, rows), FIELD(ScaleArgs, columns),
    FIELD(ScaleArgs, factor),
};
constexpr Field kColumnsArgs[] = {
    FIELD(ColumnsArgs, x), FIELD(ColumnsArgs, x_stride), FIELD(ColumnsArgs, y), FIELD(ColumnsArgs, y_stride),
    FIELD(ColumnsArgs, dtype), FIELD(ColumnsArgs, paired), FIELD(ColumnsArgs, rows), FIELD(ColumnsArgs, first),
    FIELD(ColumnsArgs, to), FIELD(ColumnsArgs, count), FIELD(ColumnsArgs, heads), FIELD(ColumnsArgs, step),
    FIELD(ColumnsArgs, to_step),
};
constexpr Field kAddArgs[] = {
    FIELD(AddArgs, x), FIELD(AddArgs, residual), FIELD(AddArgs, dtype), FIELD(AddArgs, rows),
    FIELD(AddArgs, columns), FIELD(AddArgs, factor), FIELD(AddArgs, total),
};
constexpr Field kGateArgs[] = {
    FIELD(GateArgs, x), FIELD(GateArgs, y), FIELD(GateArgs, y_stride), FIELD(GateArgs, dtype),
    FIELD(GateArgs, activation), FIELD(GateArgs, rows), FIELD(GateArgs, columns),
};
constexpr Field kHeadGatesArgs[] = {
    FIELD(HeadGatesArgs, x), FIELD(HeadGatesArgs, gate), FIELD(HeadGatesArgs, gate_stride),
    FIELD(HeadGatesArgs, gate_step), FIELD(HeadGatesArgs, dtype), FIELD(HeadGatesArgs, rows),
    FIELD(HeadGatesArgs, num_heads), FIELD(HeadGatesArgs, head_dim),
};
constexpr Field kStatePart[] = {
    FIELD(StatePart, data), FIELD(StatePart, block_stride), FIELD(StatePart, block_size),
};
constexpr Field kConvArgs[] = {
    FIELD(ConvArgs, state), FIELD(ConvArgs, batch), FIELD(ConvArgs, x), FIELD(ConvArgs, x_stride),
    FIELD(ConvArgs, dtype), FIELD(ConvArgs, silu), FIELD(ConvArgs, values), FIELD(ConvArgs, before),
    FIELD(ConvArgs, after), FIELD(ConvArgs, kernel), FIELD(ConvArgs, channels), FIELD(ConvArgs, taps),
    FIELD(ConvArgs, bias), FIELD(ConvArgs, out),
};
constexpr Field kDeltaArgs[] = {
    FIELD(DeltaArgs, state), FIELD(DeltaArgs, batch), FIELD(DeltaArgs, qkv), FIELD(DeltaArgs, qkv_stride),
    FIELD(DeltaArgs, gates), FIELD(DeltaArgs, gates_stride), FIELD(DeltaArgs, dtype), FIELD(DeltaArgs, key_heads),
    FIELD(DeltaArgs, value_heads), FIELD(DeltaArgs, key_dim), FIELD(DeltaArgs, value_dim),
    FIELD(DeltaArgs, in_turn), FIELD(DeltaArgs, log_decay), FIELD(DeltaArgs, step_bias), FIELD(DeltaArgs, out),
};
constexpr Field kScanArgs[] = {
    FIELD(ScanArgs, state), FIELD(ScanArgs, batch), FIELD(ScanArgs, xbc), FIELD(ScanArgs, xbc_stride),
    FIELD(ScanArgs, steps), FIELD(ScanArgs, steps_stride), FIELD(ScanArgs, dtype), FIELD(ScanArgs, heads),
    FIELD(ScanArgs, head_dim), FIELD(ScanArgs, groups), FIELD(ScanArgs, state_size), FIELD(ScanArgs, shortest_step),
    FIELD(ScanArgs, longest_step), FIELD(ScanArgs, log_decay), FIELD(ScanArgs, step_bias), FIELD(ScanArgs, skip),
    FIELD(ScanArgs, out),
};
constexpr Field kGatedNormArgs[] = {
    FIELD(GatedNormArgs, x), FIELD(GatedNormArgs, gate), FIELD(GatedNormArgs, gate_stride),
    FIELD(GatedNormArgs, weight), FIELD(GatedNormArgs, weights), FIELD(GatedNormArgs, dtype),
    FIELD(GatedNormArgs, gate_first), FIELD(GatedNormArgs, rows), FIELD(GatedNormArgs, columns),
    FIELD(GatedNormArgs, group), FIELD(GatedNormArgs, eps),
};
constexpr Field kRouteArgs[] = {
    FIELD(RouteArgs, logits), FIELD(RouteArgs, correction), FIELD(RouteArgs, ids), FIELD(RouteArgs, weights),
    FIELD(RouteArgs, tokens), FIELD(RouteArgs, experts), FIELD(RouteArgs, top_k), FIELD(RouteArgs, groups),
    FIELD(RouteArgs, top_groups), FIELD(RouteArgs, score), FIELD(RouteArgs, group_tops),
    FIELD(RouteArgs, renormalize), FIELD(RouteArgs, epsilon), FIELD(RouteArgs, scaling), FIELD(RouteArgs, jitter),
    FIELD(RouteArgs, expert_scales),
};
constexpr Field kExpertsArgs[] = {
    FIELD(ExpertsArgs, gate), FIELD(ExpertsArgs, gate_up), FIELD(ExpertsArgs, down),
    FIELD(ExpertsArgs, gate_up_bias), FIELD(ExpertsArgs, down_bias), FIELD(ExpertsArgs, experts),
    FIELD(ExpertsArgs, top_k), FIELD(ExpertsArgs, tokens), FIELD(ExpertsArgs, ids), FIELD(ExpertsArgs, weights),
    FIELD(ExpertsArgs, x), FIELD(ExpertsArgs, shared), FIELD(ExpertsArgs, shared_stride),
    FIELD(ExpertsArgs, shared_gate), FIELD(ExpertsArgs, y), FIELD(ExpertsArgs, dtype), FIELD(ExpertsArgs, activation),
    FIELD(ExpertsArgs, scale_x), FIELD(ExpertsArgs, scratch), FIELD(ExpertsArgs, ranks),
};
constexpr Field kRanks[] = {
    FIELD(Ranks, rank), FIELD(Ranks, size), FIELD(Ranks, shared), FIELD(Ranks, slot_bytes), FIELD(Ranks, count),
    FIELD(Ranks, lost),
};
constexpr Field kExchangeArgs[] = {
    FIELD(ExchangeArgs, ranks), FIELD(ExchangeArgs, x), FIELD(ExchangeArgs, x_stride), FIELD(ExchangeArgs, y),
    FIELD(ExchangeArgs, rows), FIELD(ExchangeArgs, columns), FIELD(ExchangeArgs, element_bytes),
    FIELD(ExchangeArgs, row_ids), FIELD(ExchangeArgs, num_ids), FIELD(ExchangeArgs, first_only),
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
    layout_of<AdapterRows>("AdapterRows", kAdapterRows),
    layout_of<LoraMap>("LoraMap", kLoraMap),
    layout_of<LoraMaps>("LoraMaps", kLoraMaps),
    layout_of<LoraArgs>("LoraArgs", kLoraArgs),
    layout_of<UnpackArgs>("UnpackArgs", kUnpackArgs),
    layout_of<PagedCache>("PagedCache", kPagedCache),
    layout_of<Batch>("Batch", kBatch),
    layout_of<AttentionArgs>("AttentionArgs", kAttentionArgs),
    layout_of<RopeArgs>("RopeArgs", kRopeArgs),
    layout_of<NormArgs>("NormArgs", kNormArgs),
    layout_of<GatherArgs>("GatherArgs", kGatherArgs),
    layout_of<ScaleArgs>("ScaleArgs", kScaleArgs),
    layout_of<ColumnsArgs>("ColumnsArgs", kColumnsArgs),
    layout_of<AddArgs>("AddArgs", kAddArgs),
    layout_of<GateArgs>("GateArgs", kGateArgs),
    layout_of<HeadGatesArgs>("HeadGatesArgs", kHeadGatesArgs),
    layout_of<StatePart>("StatePart", kStatePart),
    layout_of<ConvArgs>("ConvArgs", kConvArgs),
    layout_of<DeltaArgs>("DeltaArgs", kDeltaArgs),
    layout_of<ScanArgs>("ScanArgs", kScanArgs),
    layout_of<GatedNormArgs>("GatedNormArgs", kGatedNormArgs),
    layout_of<RouteArgs>("RouteArgs", kRouteArgs),
    layout_of<ExpertsArgs>("ExpertsArgs", kExpertsArgs),
    layout_of<Ranks>("Ranks", kRanks),
    layout_of<ExchangeArgs>("ExchangeArgs", kExchangeArgs),
    layout_of<Call>("Call", kCall),
    layout_of<Segment>("Segment", kSegment),
    layout_of<SampleControls>("SampleControls", kSampleControls),
};

}  // namespace

// Returns the layouts, and their number in `count`.
extern "C" __attribute__((visibility("default"))) const Layout* penstock_layouts(int64_t* count) {
    *count = static_cast<int64_t>(sizeof(kLayouts) / sizeof(Layout));
    return kLayouts;
}

}  // namespace penstock
