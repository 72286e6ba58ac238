// One instruction set's table of operations.
#include "ops.h"

namespace penstock {
namespace PENSTOCK_ISA {

int64_t weight_bytes(const Weight&);
int64_t linear_scratch_bytes(const Weight&, int64_t tokens);
void linear(const LinearArgs&);
bool pack(const PackArgs&);
void unpack(const UnpackArgs&);
bool quantize(const QuantizeArgs&);
int64_t attention_scratch_bytes(const AttentionArgs&);
void attention(const AttentionArgs&);
void rope_and_cache(const RopeArgs&);
void rms_norm(const NormArgs&);
void gather(const GatherArgs&);
void scale(const ScaleArgs&);
void copy_columns(const ColumnsArgs&);
void add_rows(const AddArgs&);
void head_gates(const HeadGatesArgs&);
void gate(const GateArgs&);
void causal_conv(const ConvArgs&);
void gated_delta_rule(const DeltaArgs&);
void state_space_scan(const ScanArgs&);
void gated_rms_norm(const GatedNormArgs&);
void route(const RouteArgs&);
int64_t experts_scratch_bytes(const ExpertsArgs&);
void experts(const ExpertsArgs&);
int64_t lora_scratch_bytes(const LoraArgs&);
void lora(const LoraArgs&);
void argmax(const float* x, int64_t rows, int64_t columns, int64_t* places);
int64_t sample_scratch_bytes(int64_t vocab);
void sample(const SampleArgs&);
void topk_logprobs(const TopkLogprobsArgs&);
void apply_bitmask(float* logits, int64_t vocab, const int64_t* rows, int64_t num_rows, const uint32_t* bits);

extern const Ops table;
const Ops table = {weight_bytes,
                   linear_scratch_bytes,
                   linear,
                   pack,
                   unpack,
                   quantize,
                   attention_scratch_bytes,
                   attention,
                   rope_and_cache,
                   rms_norm,
                   gather,
                   scale,
                   copy_columns,
                   add_rows,
                   head_gates,
                   gate,
                   causal_conv,
                   gated_delta_rule,
                   state_space_scan,
                   gated_rms_norm,
                   route,
                   experts_scratch_bytes,
                   experts,
                   lora_scratch_bytes,
                   lora,
                   argmax,
                   sample_scratch_bytes,
                   sample,
                   topk_logprobs,
                   apply_bitmask};

}  // namespace PENSTOCK_ISA
}  // namespace penstock
