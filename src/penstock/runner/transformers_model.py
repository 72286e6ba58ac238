"""Models of the library `transformers` over the paged cache, for `--backend transformers`.

    a step's tokens [1, num_tokens] ──> the model's layers ──> attention function ──> `PagedAttention` of the layer

A model is accepted if each layer's attention goes through the library's attention interface, once, and asks for nothing
that the paged cache lacks: a run of the model without memory (torch's device `meta`) shows it.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from penstock.config.model_facts import ActivationSizes, DType, KVSpec, LayerFacts, Matrix, ModelFacts
from penstock.config.weight_formats import FLOAT
from penstock.dataclass import dataclass
from penstock.errors import CheckpointError, shown
from penstock.kernels.attention import AttentionOptions, RopeOptions

if TYPE_CHECKING:
    from penstock.checkpoint.checkpoint import Checkpoint
    from penstock.kernels.attention import LayerCache
    from penstock.kernels.batch import Batch

logger = logging.getLogger(__name__)

INTERFACE = "penstock"
"""Our name among the attention functions of `transformers`."""
_ATTRIBUTE = "penstock_attention"
"""Attribute of an attention module: what computes its attention."""
_WITHOUT_EFFECT = frozenset({
    "dropout", "position_ids", "cache_position", "use_cache", "is_causal", "output_attentions", "output_hidden_states",
    "output_router_logits", "logits_to_keep", "return_dict",
})  # fmt: skip
"""Arguments of attention functions that the paged cache does not need."""
_LAYER_TYPES = ("full_attention", "sliding_attention")
_CHANGING_ROPES = ("dynamic", "longrope")
"""Rotary embeddings that depend on the longest text of a batch."""


def unsupported(what: str) -> CheckpointError:
    """The error for a model that cannot run this way."""
    return CheckpointError(f"backend transformers cannot run this model: {what}")


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """The attention parameters and the cache of a layer."""

    num_heads: int
    kv: KVSpec


@dataclass(frozen=True, slots=True)
class TransformersModel:
    """A model's class, config, and the attention of its layers."""

    model_class: Any
    config: Any
    layers: tuple[LayerAttention, ...]
    facts: ModelFacts


def read_transformers_model(checkpoint: Checkpoint) -> TransformersModel:
    """Find the class that `transformers` has for a checkpoint, and run it on the device `meta`.

    Raises:
        CheckpointError: there is no such class, or the paged cache cannot serve its attention.
    """
    if checkpoint.gguf is not None:
        raise unsupported("it is a GGUF file, which needs Penstock's own kernels")
    config, model_class = _class_of(checkpoint)
    _check_config(config)
    try:
        with torch.device("meta"):
            # the others do not run on `meta`; it is set in the config, which is that of the loaded model
            options = {"attn_implementation": INTERFACE, "experts_implementation": "batched_mm"}
            model = model_class._from_config(copy.deepcopy(config), **options).eval()
    except Exception as error:  # whatever the class's code raises, such as a KeyError for the interface's name
        raise unsupported(f"its class takes no other attention ({type(error).__name__}: {error})") from error
    layers = _traced(model, config)
    return TransformersModel(model_class, config, layers, _facts(checkpoint, config, model, layers))


def _class_of(checkpoint: Checkpoint) -> tuple[Any, Any]:
    """The config and the class of a checkpoint in `transformers`."""
    import transformers
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    named = [name for name in checkpoint.config.get("architectures") or [] if isinstance(name, str)]
    kind = str(checkpoint.config.get("model_type"))
    try:
        config_class = CONFIG_MAPPING[kind]
        model_class = transformers.AutoModelForCausalLM._model_mapping[config_class]
    except KeyError:
        raise unsupported(
            f"transformers {transformers.__version__} has no class for decoders of {shown(kind)}"
        ) from None
    try:
        config = config_class.from_dict(checkpoint.config)
    except Exception as error:  # whatever the class's code raises
        raise CheckpointError(f"transformers refuses {checkpoint.config_file}: {error}") from error
    if isinstance(model_class, tuple) or model_class.__name__ not in named:
        raise unsupported(f"its architecture is {', '.join(named) or 'not named'}, not that of a decoder")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    ALL_ATTENTION_FUNCTIONS.register(INTERFACE, _attention)
    return config, model_class


def _check_config(config: Any) -> None:
    """
    Raises:
        CheckpointError: it has a setting that the trace does not show.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise unsupported("its weights are quantized (quantization_config)")
    if getattr(config, "is_encoder_decoder", False):
        raise unsupported("it has an encoder")
    types = getattr(config, "layer_types", None) or ()
    if other := sorted(set(types) - set(_LAYER_TYPES)):
        raise unsupported(f"it has layers of the type {other[0]}; {' and '.join(_LAYER_TYPES)} are supported")
    for key in ("attention_chunk_size", "use_bidirectional_attention"):
        if getattr(config, key, None):
            raise unsupported(f"its config has {key}")
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(nested for nested in rope.values() if isinstance(nested, dict))):
        if part.get("rope_type") in _CHANGING_ROPES:
            raise unsupported(f"its rotary embedding ({part['rope_type']}) depends on the longest text of a batch")


def _attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """The attention function that `transformers` calls."""
    attend = cast("Callable[..., Tensor]", getattr(module, _ATTRIBUTE))
    return attend(module, *args, **kwargs), None


def _attention_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Modules of a layer that may compute attention."""
    return (module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int))


def _traced(model: nn.Module, config: Any) -> tuple[LayerAttention, ...]:
    """The attention parameters of each layer, from one traced call."""
    found: dict[int, LayerAttention] = {}

    def note(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **kwargs: Any
    ) -> Tensor:
        layer = cast("int", module.layer_idx)
        if layer in found:
            raise unsupported(f"layer {layer} computes attention twice")
        found[layer] = _asked(module, query, key, value, attention_mask, kwargs)
        return query.transpose(1, 2)

    for module in _attention_modules(model):
        setattr(module, _ATTRIBUTE, note)
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise unsupported("its class takes no positions (position_ids)")
    ids = torch.zeros(1, 3, dtype=torch.int64, device="meta")
    try:
        with torch.inference_mode():
            model(input_ids=ids, position_ids=ids, use_cache=False)
    except CheckpointError:
        raise
    except Exception as error:  # whatever the class's code raises
        raise unsupported(f"a trace of it failed ({type(error).__name__}: {error})") from error
    count = config.num_hidden_layers
    if sorted(found) != list(range(count)):
        raise unsupported(
            f"{len(found)} of its {count} layers attend through transformers' attention interface: the others keep "
            "something else than keys and values, or their class does not use the interface"
        )
    layers = tuple(found[layer] for layer in range(count))
    for layer, kind in zip(layers, getattr(config, "layer_types", None) or (), strict=False):
        if (kind == "sliding_attention") != (layer.kv.window is not None):
            raise unsupported("its class does not tell the attention function which layers have a window")
    return layers


def _asked(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: object, kwargs: dict[str, Any]
) -> LayerAttention:
    known = _WITHOUT_EFFECT | {"scaling", "sliding_window", "softcap", "s_aux"}
    if other := [name for name, given in kwargs.items() if name not in known and given is not None]:
        raise unsupported(f"its attention takes {other[0]}")
    if mask is not None:
        raise unsupported("it makes an attention mask of its own")
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise unsupported("its attention is not causal")
    if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
        raise unsupported("its keys and values differ in size")
    window = kwargs.get("sliding_window")
    return LayerAttention(query.shape[1], KVSpec(key.shape[1], key.shape[3], window))


def _facts(checkpoint: Checkpoint, config: Any, model: nn.Module, layers: Sequence[LayerAttention]) -> ModelFacts:
    most = getattr(config, "max_position_embeddings", None)
    if not isinstance(most, int):
        raise unsupported("its config does not tell the longest text (max_position_embeddings)")
    dtype = str(config.dtype or torch.float32).removeprefix("torch.")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise unsupported(f"its weights are of the type {dtype}")
    shapes = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    matrices = [Matrix(name.removesuffix(".weight"), *shape, FLOAT) for name, shape in shapes if len(shape) == 2]
    widest = max(max(matrix.rows, matrix.columns) for matrix in matrices if matrix.rows != config.vocab_size)
    working = 4 * widest + 4 * sum(part.num_heads * part.kv.head_dim for part in layers[:1])
    parts = (ActivationSizes(working, working, widest),)
    return ModelFacts(
        name=checkpoint.name,
        dtype=cast("DType", dtype),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        max_position=most,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=tuple(LayerFacts(layer.kv, parts) for layer in layers),
        rotary_dim=0,
        matrices=tuple(matrices),
    )


class PagedAttention:
    """Computes a layer's attention over its paged cache."""

    def __init__(self, cache: LayerCache[Tensor], layer: LayerAttention) -> None:
        self._cache, self._layer = cache, layer
        self.batch: Batch | None = None
        """The step's."""

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: object,
    ) -> Tensor:
        """`query` [1, num_heads, num_tokens, head_dim] -> [1, num_tokens, num_heads, head_dim]."""
        assert self.batch is not None
        heads, tokens, size = query.shape[1:]
        rows = [part[0].transpose(0, 1).reshape(tokens, -1) for part in (query, key, value)]
        stored = self._cache.rope_and_cache(torch.cat(rows, 1), RopeOptions(heads), None, self.batch)
        options = AttentionOptions(
            heads,
            size**-0.5 if scaling is None else scaling,
            self._layer.kv.window,
            soft_cap=softcap,
            sinks=None if s_aux is None else s_aux.float(),
        )
        mixed: Tensor = self._cache.attend(stored, options, self.batch)
        return mixed.to(query.dtype).view(1, tokens, heads, size)


def load_transformers_model(checkpoint: Checkpoint, found: TransformersModel, dtype: DType, device: str) -> Any:
    """Load a model's weights.

    Raises:
        CheckpointError: weights are missing or damaged.
    """
    try:
        model, info = found.model_class.from_pretrained(
            checkpoint.path,
            config=found.config,
            dtype=getattr(torch, dtype),
            attn_implementation=INTERFACE,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{checkpoint.path} cannot be loaded by transformers: {error}") from error
    for kind in ("missing_keys", "mismatched_keys"):
        if info[kind]:
            raise CheckpointError(f"{checkpoint.path}: {kind.partition('_')[0]} weights, as {sorted(info[kind])[0]}")
    return model.eval().to(device)


def attach(model: nn.Module, attention: Sequence[PagedAttention]) -> None:
    """Have the model's layers compute attention by these."""
    for module in _attention_modules(model):
        setattr(module, _ATTRIBUTE, attention[cast("int", module.layer_idx)])
