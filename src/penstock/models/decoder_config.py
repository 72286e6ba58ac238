"""What a dense decoder is made of: plain data, no torch. Each family turns its `config.json` into one of these."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from penstock.layers.rope import RopeConfig
from penstock.memory import DType, Matrix
from penstock.quantization.scheme import StoredScheme
from penstock.weight_formats import FLOAT

if TYPE_CHECKING:
    from penstock.models.model import Model
    from penstock.quantization.base import WeightFactory


@dataclass(frozen=True, slots=True)
class WeightNames:
    """A family's names in its checkpoints, without `.weight` and `.bias`. The defaults are Llama's.

    `qkv` and `gate_up` hold one name a matrix, or a single one where the checkpoint has them as one.
    """

    embedding: str = "model.embed_tokens"
    layer: str = "model.layers.{index}"
    input_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    attention_output: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    final_norm: str = "model.norm"
    output: str = "lm_head"
    ignored: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)
    """Patterns of full tensor names that a checkpoint may hold and we compute ourselves."""


def build_decoder(config: "DecoderConfig", max_positions: int, factory: "WeightFactory") -> "Model":
    """The dense decoder, for texts of up to `max_positions` tokens; its weights are without content."""
    from penstock.models.decoder import Decoder  # here, not above: the server process reads configs without torch

    return Decoder(config, max_positions, factory)


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A dense decoder: pre-norm layers of grouped-query attention and a gated MLP, rotary positions."""

    dtype: DType
    """The checkpoint's own."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    """Tokens of the longest text it was made for."""
    norm_eps: float
    rope: RopeConfig
    sliding_windows: tuple[int | None, ...]
    """One a layer: how many keys a query sees, its own included; None: all."""
    tie_embeddings: bool = False
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_scale: float | None = None
    """On the scores; None: `head_dim ** -0.5`."""
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    """On what attention and the MLP add to the residual stream."""
    logits_divisor: float = 1.0
    names: WeightNames = field(default_factory=WeightNames)
    quantization: StoredScheme | None = None
    """How the layers' matrices are stored; None: in the model's dtype."""
    build: "Callable[[DecoderConfig, int, WeightFactory], Model]" = build_decoder
    """Makes the model; a family with layers of its own has one of its own."""

    @property
    def num_layers(self) -> int:
        return len(self.sliding_windows)

    def matrices(self) -> list[Matrix]:
        """The layers' matrices, then the embedding and, if it is not the same, the output projection."""
        found = []
        for index in range(self.num_layers):
            layer = self.names.layer.format(index=index)
            found += [self._matrix(f"{layer}.{name}", *size) for name, size in self._layer_sizes()]
        table = (self.vocab_size, self.hidden_size)
        if not self.tie_embeddings:
            found.append(self._matrix(self.names.output, *table))
        return [*found, replace(self._matrix(self.names.embedding, *table), multiplied=self.tie_embeddings)]

    def _matrix(self, name: str, rows: int, columns: int) -> Matrix:
        return Matrix(name, rows, columns, self.quantization.format_of(name) if self.quantization else FLOAT)

    def _layer_sizes(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """The name within a layer of each matrix, with its rows and columns."""
        names, hidden, inner = self.names, self.hidden_size, self.intermediate_size
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        yield from _stacked(names.qkv, (query, key, key), hidden)
        yield names.attention_output, (hidden, query)
        yield from _stacked(names.gate_up, (inner, inner), hidden)
        yield names.down, (hidden, inner)

    @property
    def num_parameters(self) -> int:
        """Elements of all weights; a tied embedding counts once."""
        hidden, heads = self.hidden_size, self.num_heads + 2 * self.num_kv_heads
        attention_biases = heads * self.head_dim * self.qkv_bias + hidden * self.attention_output_bias
        mlp_biases = self.mlp_bias * (2 * self.intermediate_size + hidden)
        norms = 2 * hidden + 2 * self.head_dim * self.qk_norm
        small = self.num_layers * (attention_biases + mlp_biases + norms) + hidden
        return sum(matrix.rows * matrix.columns for matrix in self.matrices()) + small


def _stacked(names: tuple[str, ...], rows: tuple[int, ...], columns: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Matrices of their own, or a single one of all rows where there is one name."""
    for name, count in zip(names, rows if len(names) > 1 else (sum(rows),), strict=True):
        yield name, (count, columns)
