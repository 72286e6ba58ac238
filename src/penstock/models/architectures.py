"""The model families by architecture, as `config.json` names it."""

from collections.abc import Callable
from importlib import import_module

from penstock.dataclass import dataclass
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec

Read = Callable[[HFConfig], ModelSpec]
"""Converts a config.

Raises:
    CheckpointError: the config has a setting that is not implemented.
"""


@dataclass(frozen=True, slots=True)
class FamilyReader:
    """A function of a module in `models/families/`, imported when first called: a start needs one family of many."""

    name: str
    """As `qwen3.qwen3_spec`."""

    def load(self) -> Read:
        module, _, function = self.name.partition(".")
        read: Read = getattr(import_module(f"penstock.models.families.{module}"), function)
        return read

    def __call__(self, config: HFConfig) -> ModelSpec:
        return self.load()(config)


_DECODERS = {
    "AfmoeForCausalLM": "afmoe.afmoe_spec",
    "ApertusForCausalLM": "apertus.apertus_spec",
    "ArceeForCausalLM": "arcee.arcee_spec",
    "AudioFlamingo3ForConditionalGeneration": "audio_flamingo3.audio_flamingo3_spec",
    "BailingMoeV2ForCausalLM": "bailing_moe_v2.bailing_moe_v2_spec",
    "BambaForCausalLM": "bamba.bamba_spec",
    "BloomForCausalLM": "bloom.bloom_spec",
    "Cohere2ForCausalLM": "cohere.cohere2_spec",
    "CohereForCausalLM": "cohere.cohere_spec",
    "CwmForCausalLM": "cwm.cwm_spec",
    "DeepseekV2ForCausalLM": "deepseek.deepseek_v2_spec",
    "DeepseekV32ForCausalLM": "deepseek.deepseek_v32_spec",
    "DeepseekV3ForCausalLM": "deepseek.deepseek_v3_spec",
    "Dots1ForCausalLM": "dots1.dots1_spec",
    "Ernie4_5ForCausalLM": "ernie4_5.ernie4_5_spec",
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe.ernie4_5_moe_spec",
    "Exaone4ForCausalLM": "exaone4.exaone4_spec",
    "ExaoneMoeForCausalLM": "exaone_moe.exaone_moe_spec",
    "FalconForCausalLM": "falcon.falcon_spec",
    "FalconH1ForCausalLM": "falcon_h1.falcon_h1_spec",
    "GPT2LMHeadModel": "gpt2.gpt2_spec",
    "GPTBigCodeForCausalLM": "gpt2.gpt_bigcode_spec",
    "GPTJForCausalLM": "gptj.gptj_spec",
    "GPTNeoXForCausalLM": "gpt_neox.gpt_neox_spec",
    "Gemma2ForCausalLM": "gemma2.gemma2_spec",
    "Gemma3ForCausalLM": "gemma3.gemma3_spec",
    "Gemma3ForConditionalGeneration": "gemma3.gemma3_spec",
    "Gemma3nForCausalLM": "gemma3n.gemma3n_spec",
    "Gemma3nForConditionalGeneration": "gemma3n.gemma3n_spec",
    "Gemma4ForCausalLM": "gemma4.gemma4_spec",
    "Gemma4ForConditionalGeneration": "gemma4.gemma4_spec",
    "GemmaForCausalLM": "gemma.gemma_spec",
    "Glm4ForCausalLM": "glm4.glm4_spec",
    "Glm4MoeForCausalLM": "glm4_moe.glm4_moe_spec",
    "Glm4MoeLiteForCausalLM": "deepseek.glm4_moe_lite_spec",
    "GlmForCausalLM": "glm4.glm_spec",
    "GlmMoeDsaForCausalLM": "deepseek.glm_moe_dsa_spec",
    "GptOssForCausalLM": "gpt_oss.gpt_oss_spec",
    "GraniteForCausalLM": "granite.granite_spec",
    "GraniteMoeForCausalLM": "granite_moe.granite_moe_spec",
    "GraniteMoeHybridForCausalLM": "granite_moe_hybrid.granite_moe_hybrid_spec",
    "GraniteMoeSWAForCausalLM": "granite_swa.granite_moe_swa_spec",
    "GraniteMoeSharedForCausalLM": "granite_moe.granite_moe_shared_spec",
    "GraniteSWAForCausalLM": "granite_swa.granite_swa_spec",
    "HYV3ForCausalLM": "hy_v3.hy_v3_spec",
    "HeliumForCausalLM": "helium.helium_spec",
    "HunYuanDenseV1ForCausalLM": "hunyuan.hunyuan_dense_spec",
    "HunYuanMoEV1ForCausalLM": "hunyuan.hunyuan_moe_spec",
    "HyperCLOVAXForCausalLM": "granite.hyperclovax_spec",
    "Idefics3ForConditionalGeneration": "idefics3.idefics3_spec",
    "InternVLForConditionalGeneration": "internvl.internvl_spec",
    "Jais2ForCausalLM": "jais2.jais2_spec",
    "JambaForCausalLM": "jamba.jamba_spec",
    "KimiLinearForCausalLM": "kimi_linear.kimi_linear_spec",
    "Lfm2ForCausalLM": "lfm2.lfm2_spec",
    "Lfm2MoeForCausalLM": "lfm2_moe.lfm2_moe_spec",
    "Lfm2VlForConditionalGeneration": "lfm2_vl.lfm2_vl_spec",
    "Lfm3ForCausalLM": "lfm3.lfm3_spec",
    "Llama4ForCausalLM": "llama4.llama4_spec",
    "Llama4ForConditionalGeneration": "llama4.llama4_spec",
    "LlamaForCausalLM": "llama.llama_spec",
    "LlavaForConditionalGeneration": "llava.llava_spec",
    "MiniMaxM2ForCausalLM": "minimax_m2.minimax_m2_spec",
    "Ministral3ForCausalLM": "ministral3.ministral3_spec",
    "MinistralForCausalLM": "mistral.ministral_spec",
    "Mistral3ForConditionalGeneration": "ministral3.mistral3_spec",
    "Mistral4ForCausalLM": "mistral4.mistral4_spec",
    "MistralForCausalLM": "mistral.mistral_spec",
    "MixtralForCausalLM": "mixtral.mixtral_spec",
    "MptForCausalLM": "mpt.mpt_spec",
    "NemotronForCausalLM": "nemotron.nemotron_spec",
    "NemotronHForCausalLM": "nemotron_h.nemotron_h_spec",
    "OPTForCausalLM": "opt.opt_spec",
    "Olmo2ForCausalLM": "olmo2.olmo2_spec",
    "Olmo3ForCausalLM": "olmo2.olmo3_spec",
    "OlmoForCausalLM": "olmo.olmo_spec",
    "OlmoeForCausalLM": "olmoe.olmoe_spec",
    "Phi3ForCausalLM": "phi3.phi3_spec",
    "PhiForCausalLM": "phi.phi_spec",
    "PhimoeForCausalLM": "phimoe.phimoe_spec",
    "Qwen2AudioForConditionalGeneration": "qwen2_audio.qwen2_audio_spec",
    "Qwen2ForCausalLM": "qwen2.qwen2_spec",
    "Qwen2MoeForCausalLM": "qwen2_moe.qwen2_moe_spec",
    "Qwen2VLForConditionalGeneration": "qwen2_5_vl.qwen2_vl_spec",
    "Qwen2_5OmniForConditionalGeneration": "qwen2_5_omni.qwen2_5_omni_spec",
    "Qwen2_5OmniModel": "qwen2_5_omni.qwen2_5_omni_spec",
    "Qwen2_5OmniThinkerForConditionalGeneration": "qwen2_5_omni.qwen2_5_omni_thinker_spec",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl.qwen2_5_vl_spec",
    "Qwen3ForCausalLM": "qwen3.qwen3_spec",
    "Qwen3MoeForCausalLM": "qwen3_moe.qwen3_moe_spec",
    "Qwen3NextForCausalLM": "qwen3_next.qwen3_next_spec",
    "Qwen3OmniMoeForConditionalGeneration": "qwen3_omni.qwen3_omni_moe_spec",
    "Qwen3OmniMoeThinkerForConditionalGeneration": "qwen3_omni.qwen3_omni_moe_thinker_spec",
    "Qwen3VLForConditionalGeneration": "qwen3_vl.qwen3_vl_spec",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl.qwen3_vl_moe_spec",
    "Qwen3_5ForCausalLM": "qwen3_5.qwen3_5_spec",
    "Qwen3_5ForConditionalGeneration": "qwen3_5.qwen3_5_spec",
    "Qwen3_5MoeForCausalLM": "qwen3_5.qwen3_5_moe_spec",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5.qwen3_5_moe_spec",
    "SeedOssForCausalLM": "seed_oss.seed_oss_spec",
    "SmolLM3ForCausalLM": "smollm3.smollm3_spec",
    "SmolVLMForConditionalGeneration": "idefics3.idefics3_spec",
    "SolarOpenForCausalLM": "glm4_moe.solar_open_spec",
    "StableLmForCausalLM": "stablelm.stablelm_spec",
    "Starcoder2ForCausalLM": "starcoder2.starcoder2_spec",
    "VaultGemmaForCausalLM": "gemma2.vault_gemma_spec",
    "VoxtralForConditionalGeneration": "voxtral.voxtral_spec",
    "WhisperForConditionalGeneration": "whisper.whisper_spec",
    "YoutuForCausalLM": "deepseek.youtu_spec",
}

_ENCODERS = {
    "BertForMaskedLM": "bert.bert_spec",
    "BertForSequenceClassification": "bert.bert_spec",
    "BertModel": "bert.bert_spec",
    "CamembertForMaskedLM": "bert.xlm_roberta_spec",
    "CamembertForSequenceClassification": "bert.xlm_roberta_spec",
    "CamembertModel": "bert.xlm_roberta_spec",
    "DebertaV2ForMaskedLM": "deberta.deberta_v2_spec",
    "DebertaV2ForSequenceClassification": "deberta.deberta_v2_spec",
    "DebertaV2Model": "deberta.deberta_v2_spec",
    "DistilBertForMaskedLM": "distilbert.distilbert_spec",
    "DistilBertForSequenceClassification": "distilbert.distilbert_spec",
    "DistilBertModel": "distilbert.distilbert_spec",
    "ElectraForMaskedLM": "bert.electra_spec",
    "ElectraForPreTraining": "bert.electra_spec",
    "ElectraForSequenceClassification": "bert.electra_spec",
    "ElectraModel": "bert.electra_spec",
    "Gemma2Model": "gemma2.gemma2_spec",
    "Gemma3TextModel": "gemma3.gemma3_spec",
    "GraniteModel": "granite.granite_spec",
    "JinaBertForMaskedLM": "jina_bert.jina_bert_spec",
    "JinaBertForSequenceClassification": "jina_bert.jina_bert_spec",
    "JinaBertModel": "jina_bert.jina_bert_spec",
    "LlamaModel": "llama.llama_spec",
    "MPNetForMaskedLM": "mpnet.mpnet_spec",
    "MPNetForSequenceClassification": "mpnet.mpnet_spec",
    "MPNetModel": "mpnet.mpnet_spec",
    "MistralModel": "mistral.mistral_spec",
    "ModernBertForMaskedLM": "modernbert.modernbert_spec",
    "ModernBertForSequenceClassification": "modernbert.modernbert_spec",
    "ModernBertModel": "modernbert.modernbert_spec",
    "NomicBertModel": "nomic_bert.nomic_bert_spec",
    "Olmo2Model": "olmo2.olmo2_spec",
    "Phi3Model": "phi3.phi3_spec",
    "Qwen2ForSequenceClassification": "qwen2.qwen2_spec",
    "Qwen2Model": "qwen2.qwen2_spec",
    "Qwen3ForSequenceClassification": "qwen3.qwen3_spec",
    "Qwen3Model": "qwen3.qwen3_spec",
    "RobertaForMaskedLM": "bert.xlm_roberta_spec",
    "RobertaForSequenceClassification": "bert.xlm_roberta_spec",
    "RobertaModel": "bert.xlm_roberta_spec",
    "XLMRobertaForMaskedLM": "bert.xlm_roberta_spec",
    "XLMRobertaForSequenceClassification": "bert.xlm_roberta_spec",
    "XLMRobertaModel": "bert.xlm_roberta_spec",
}

ARCHITECTURES: dict[str, Read] = {name: FamilyReader(reader) for name, reader in _DECODERS.items()}
"""Architectures that generate text."""

ENCODERS: dict[str, Read] = {name: FamilyReader(reader) for name, reader in _ENCODERS.items()}
"""Architectures that do not generate text."""
