"""Reads the `config.json` keys that dense families share."""

from penstock.config.feed_forward import Activation
from penstock.dataclass import dataclass
from penstock.errors import CheckpointError
from penstock.layers.attention import AttentionSpec
from penstock.layers.mlp import GatedMLPSpec
from penstock.layers.rope import RopeConfig
from penstock.layers.spec import FeedForwardSpec, MixerSpec, NormSpec
from penstock.models.hf_config import HFConfig
from penstock.models.spec import LayerSpec, ModelSpec, MTPSpec, SubLayer


@dataclass(frozen=True, slots=True)
class Dense:
    """Llama's parts with the sizes of a config; a family replaces what differs, with `dataclasses.replace`."""

    num_layers: int
    norm_eps: float
    attention: AttentionSpec
    mlp: GatedMLPSpec
    model: ModelSpec
    """The `ModelSpec` without its layers."""
    norm_offset: float = 0.0
    """`NormSpec.offset` of the norms of the hidden states."""
    norm_bias: bool = False
    """Whether the norms of the hidden states are layer norms with biases."""

    def norm(self, name: str, offset: float | None = None) -> NormSpec:
        """A norm of the hidden states; `offset` replaces `norm_offset`."""
        offset = self.norm_offset if offset is None else offset
        return NormSpec(name, self.model.hidden_size, self.norm_eps, offset, bias=self.norm_bias)

    def layer(
        self, index: int, mixer: MixerSpec | None = None, feed_forward: FeedForwardSpec | None = None
    ) -> LayerSpec:
        """A pre-norm layer with Llama's names; its parts default to `attention` and `mlp`."""
        return LayerSpec(
            name=f"model.layers.{index}",
            mixer=SubLayer(mixer or self.attention, self.norm("input_layernorm")),
            feed_forward=SubLayer(feed_forward or self.mlp, self.norm("post_attention_layernorm")),
        )


def read_dense(
    config: HFConfig,
    *,
    max_position: int,
    head_dim: int | None = None,
    num_layers: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    vocab_size: int | None = None,
    intermediate_size: int | None = None,
    norm_eps: float = 1e-6,
    norm_eps_key: str = "rms_norm_eps",
    norm_offset: float = 0.0,
    norm_bias: bool = False,
    theta: float = 10000.0,
    partial_rotary: float = 1.0,
    tied: bool = False,
    activation: Activation | None = "silu",
    reads_rope: bool = True,
    reads_mlp: bool = True,
) -> Dense:
    """Read sizes, norm epsilon, RoPE and tying of embeddings.

    The arguments are the family's defaults for absent keys. Where they are None, `head_dim` is hidden_size / num_heads,
    `num_kv_heads` is `num_heads`, and other keys are required; with the `activation` None, the family reads it itself.
    Without `reads_rope`, the attention has no RoPE yet; without `reads_mlp`, the MLP has the given size. `norm_offset`
    and `norm_bias` are those of `Dense`.

    Raises:
        CheckpointError: a key is missing, has the wrong type or an unsupported value.
    """
    _expect_kind(config, activation)
    hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads", num_heads)
    head_dim = config.size("head_dim", head_dim or hidden_size // num_heads)
    max_position = config.size("max_position_embeddings", max_position)
    rope = None
    if reads_rope:
        rope = config.rope(head_dim, max_position, theta=theta, partial_rotary=partial_rotary)
        check_rotation(rope, head_dim, config)
    norm_eps = config.positive(norm_eps_key, norm_eps, or_zero=True)
    attention = AttentionSpec(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=config.size("num_key_value_heads", num_kv_heads or num_heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope,
        bidirectional=not config.get("is_causal", True),  # gte-Qwen2 and the like
    )
    check_heads(attention.num_heads, attention.num_kv_heads, config)
    model = ModelSpec(
        dtype=config.dtype(),
        vocab_size=config.size("vocab_size", vocab_size),
        hidden_size=hidden_size,
        max_position=max_position if rope is None else rope.context(max_position),
        layers=(),
        final_norm=NormSpec("model.norm", hidden_size, norm_eps, norm_offset, bias=norm_bias),
        tie_embeddings=config.get("tie_word_embeddings", tied),
    )
    inner = config.size("intermediate_size", intermediate_size) if reads_mlp else intermediate_size or hidden_size
    mlp = GatedMLPSpec(hidden_size, inner, activation=activation or "silu")
    num_layers = config.size("num_hidden_layers", num_layers)
    return Dense(num_layers, norm_eps, attention, mlp, model, norm_offset, norm_bias)


ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}
"""Activations by their names in configs."""


def read_activation(config: HFConfig, key: str, default: str) -> Activation:
    """The activation of an MLP without a gate.

    Raises:
        CheckpointError: it is unsupported.
    """
    config.expect(key, default, *ACTIVATIONS)
    return ACTIVATIONS[config.get(key, default)]


def _expect_kind(config: HFConfig, activation: Activation | None) -> None:
    if activation == "silu":
        config.expect("hidden_act", "silu")
    elif activation is not None:
        config.expect("hidden_activation", "gelu_pytorch_tanh", None)
        config.expect("hidden_act", "gelu_pytorch_tanh", "gelu")  # which `transformers` does not read
    expect_decoder(config)


def expect_decoder(config: HFConfig) -> None:
    """
    Raises:
        CheckpointError: the model is more than a decoder, or has other heads.
    """
    config.expect("is_encoder_decoder", False)
    config.expect("add_cross_attention", False)
    config.expect("pruned_heads", {})


def nextn_head(layer: LayerSpec, hidden_size: int, norm_eps: float) -> MTPSpec:
    """The multi-token prediction head of DeepSeek V3, GLM 4.5 and others, stored as one more layer."""

    def norm(name: str) -> NormSpec:
        return NormSpec(f"{layer.name}.{name}", hidden_size, norm_eps)

    return MTPSpec(layer, norm("enorm"), norm("hnorm"), f"{layer.name}.eh_proj", norm("shared_head.norm"))


def check_heads(num_heads: int, num_kv_heads: int, config: HFConfig) -> None:
    """
    Raises:
        CheckpointError: `num_heads` is not a multiple of `num_kv_heads`.
    """
    if num_heads % num_kv_heads:
        raise CheckpointError(f"{config.file}: {num_heads} query heads cannot share {num_kv_heads} key heads evenly")


def check_rotation(rope: RopeConfig, head_dim: int, config: HFConfig) -> None:
    """
    Raises:
        CheckpointError: the rotary dimension is odd or larger than a head.
    """
    if rope.dim < 2 or rope.dim % 2 or rope.dim > head_dim:
        raise CheckpointError(
            f"{config.file}: the rotary dimension, head_dim times partial_rotary_factor, must be an even number from 2 "
            f"to {head_dim}, not {rope.dim}"
        )
