"""Mirrors of the structs of `csrc/ops.h`; `penstock.native.layouts` compares them with the library's own."""

import ctypes
from ctypes import c_double, c_float, c_int32, c_int64, c_void_p


class Weight(ctypes.Structure):
    """A packed weight."""

    _fields_ = (
        ("kind", c_int32),
        ("gated", c_int32),
        ("rows", c_int64),
        ("columns", c_int64),
        ("data", c_void_p),
        ("row_scales", c_void_p),
        ("bits", c_int32),
        ("group", c_int32),
        ("scale_type", c_int32),
        ("offset", c_int32),
        ("offset_type", c_int32),
        ("super_type", c_int32),
        ("super_columns", c_int64),
        ("x_group", c_int64),
        ("x_bytes", c_int64),
    )


class LinearArgs(ctypes.Structure):
    """Arguments of `linear`."""

    _fields_ = (
        ("weight", c_void_p),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("x_dtype", c_int32),
        ("y_dtype", c_int32),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("tokens", c_int64),
        ("bias", c_void_p),
        ("scratch", c_void_p),
        ("after_gate", c_int32),
        ("activation", c_int32),
        ("added", c_void_p),
        ("added_stride", c_int64),
        ("adapters", c_void_p),
    )


class AdapterRows(ctypes.Structure):
    """The rows of a pass by their adapters."""

    _fields_ = (("num_runs", c_int64), ("slots", c_void_p), ("starts", c_void_p), ("rows", c_void_p))


class LoraMap(ctypes.Structure):
    """What an adapter adds to some columns of a map."""

    _fields_ = (
        ("a", c_void_p),
        ("b", c_void_p),
        ("first", c_int64),
        ("rows", c_int64),
        ("first_rank", c_int64),
        ("rank", c_int64),
        ("scale", c_float),
    )


class LoraMaps(ctypes.Structure):
    """The maps of an adapter."""

    _fields_ = (("maps", c_void_p), ("count", c_int64))


class LoraArgs(ctypes.Structure):
    """Arguments of `lora`."""

    _fields_ = (
        ("adapters", c_void_p),
        ("slots", c_void_p),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("dtype", c_int32),
        ("columns", c_int64),
        ("y", c_void_p),
        ("y_columns", c_int64),
        ("tokens", c_int64),
        ("scratch", c_void_p),
    )


class UnpackArgs(ctypes.Structure):
    """Arguments of `unpack`."""

    _fields_ = (
        ("weight", c_void_p),
        ("row_ids", c_void_p),
        ("num_rows", c_int64),
        ("y", c_void_p),
        ("y_dtype", c_int32),
    )


class PagedCache(ctypes.Structure):
    """One layer's packed KV cache."""

    _fields_ = (
        ("num_heads", c_int64),
        ("head_dim", c_int64),
        ("block_size", c_int64),
        ("kind", c_int64),
        ("block_stride", c_int64),
        ("data", c_void_p),
        ("latent", c_int64),
    )


class Batch(ctypes.Structure):
    """The ragged batch of a step."""

    _fields_ = (
        ("num_tokens", c_int64),
        ("num_seqs", c_int64),
        ("query_start", c_void_p),
        ("seq_lens", c_void_p),
        ("table_start", c_void_p),
        ("blocks", c_void_p),
        ("slots", c_void_p),
        ("branches", c_void_p),
    )


class AttentionArgs(ctypes.Structure):
    """Arguments of `attention`."""

    _fields_ = (
        ("cache", c_void_p),
        ("batch", c_void_p),
        ("query", c_void_p),
        ("query_stride", c_int64),
        ("query_step", c_int64),
        ("dtype", c_int32),
        ("out", c_void_p),
        ("num_heads", c_int64),
        ("window", c_int64),
        ("bidirectional", c_int32),
        ("chunk", c_int64),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("sinks", c_void_p),
        ("threads", c_int32),
        ("scratch", c_void_p),
    )


class RopeArgs(ctypes.Structure):
    """Arguments of `rope_and_cache`."""

    _fields_ = (
        ("cache", c_void_p),
        ("batch", c_void_p),
        ("qkv", c_void_p),
        ("dtype", c_int32),
        ("parts", c_int32),
        ("value_norm", c_int32),
        ("num_heads", c_int64),
        ("query_step", c_int64),
        ("angles", c_void_p),
        ("num_angles", c_int64),
        ("interleaved", c_int32),
        ("query_factors", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("norm_dtype", c_int32),
        ("eps", c_float),
    )


class NormArgs(ctypes.Structure):
    """Arguments of `rms_norm`."""

    _fields_ = (
        ("x", c_void_p),
        ("residual", c_void_p),
        ("y", c_void_p),
        ("stride", c_int64),
        ("weight", c_void_p),
        ("weight_dtype", c_int32),
        ("dtype", c_int32),
        ("rows", c_int64),
        ("columns", c_int64),
        ("eps", c_float),
        ("factor", c_float),
        ("groups", c_int64),
        ("bias", c_void_p),
        ("after", c_void_p),
        ("after_dtype", c_int32),
        ("after_eps", c_float),
        ("total", c_void_p),
    )


class GatherArgs(ctypes.Structure):
    """Arguments of `gather`."""

    _fields_ = (
        ("table", c_void_p),
        ("row_bytes", c_int64),
        ("row_ids", c_void_p),
        ("num_rows", c_int64),
        ("y", c_void_p),
    )


class ScaleArgs(ctypes.Structure):
    """Arguments of `scale`."""

    _fields_ = (
        ("x", c_void_p),
        ("dtype", c_int32),
        ("rows", c_int64),
        ("columns", c_int64),
        ("factor", c_float),
    )


class ColumnsArgs(ctypes.Structure):
    """Arguments of `copy_columns`."""

    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("dtype", c_int32),
        ("paired", c_int32),
        ("rows", c_int64),
        ("first", c_int64),
        ("to", c_int64),
        ("count", c_int64),
        ("heads", c_int64),
        ("step", c_int64),
        ("to_step", c_int64),
    )


class AddArgs(ctypes.Structure):
    """Arguments of `add_rows`."""

    _fields_ = (
        ("x", c_void_p),
        ("residual", c_void_p),
        ("dtype", c_int32),
        ("rows", c_int64),
        ("columns", c_int64),
        ("factor", c_float),
        ("total", c_void_p),
    )


class GateArgs(ctypes.Structure):
    """Arguments of `gate`."""

    _fields_ = (
        ("x", c_void_p),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("dtype", c_int32),
        ("activation", c_int32),
        ("rows", c_int64),
        ("columns", c_int64),
    )


class HeadGatesArgs(ctypes.Structure):
    """Arguments of `head_gates`."""

    _fields_ = (
        ("x", c_void_p),
        ("gate", c_void_p),
        ("gate_stride", c_int64),
        ("gate_step", c_int64),
        ("dtype", c_int32),
        ("rows", c_int64),
        ("num_heads", c_int64),
        ("head_dim", c_int64),
    )


class StatePart(ctypes.Structure):
    """A part of one layer's states."""

    _fields_ = (("data", c_void_p), ("block_stride", c_int64), ("block_size", c_int64))


class ConvArgs(ctypes.Structure):
    """Arguments of `causal_conv`."""

    _fields_ = (
        ("state", StatePart),
        ("batch", c_void_p),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("dtype", c_int32),
        ("silu", c_int32),
        ("values", c_int64),
        ("before", c_int64),
        ("after", c_int64),
        ("kernel", c_int64),
        ("channels", c_int64),
        ("taps", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
    )


class DeltaArgs(ctypes.Structure):
    """Arguments of `gated_delta_rule`."""

    _fields_ = (
        ("state", StatePart),
        ("batch", c_void_p),
        ("qkv", c_void_p),
        ("qkv_stride", c_int64),
        ("gates", c_void_p),
        ("gates_stride", c_int64),
        ("dtype", c_int32),
        ("key_heads", c_int64),
        ("value_heads", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("in_turn", c_int32),
        ("log_decay", c_void_p),
        ("step_bias", c_void_p),
        ("out", c_void_p),
    )


class ScanArgs(ctypes.Structure):
    """Arguments of `state_space_scan`."""

    _fields_ = (
        ("state", StatePart),
        ("batch", c_void_p),
        ("xbc", c_void_p),
        ("xbc_stride", c_int64),
        ("steps", c_void_p),
        ("steps_stride", c_int64),
        ("dtype", c_int32),
        ("heads", c_int64),
        ("head_dim", c_int64),
        ("groups", c_int64),
        ("state_size", c_int64),
        ("shortest_step", c_float),
        ("longest_step", c_float),
        ("log_decay", c_void_p),
        ("step_bias", c_void_p),
        ("skip", c_void_p),
        ("out", c_void_p),
    )


class GatedNormArgs(ctypes.Structure):
    """Arguments of `gated_rms_norm`."""

    _fields_ = (
        ("x", c_void_p),
        ("gate", c_void_p),
        ("gate_stride", c_int64),
        ("weight", c_void_p),
        ("weights", c_int64),
        ("dtype", c_int32),
        ("gate_first", c_int32),
        ("rows", c_int64),
        ("columns", c_int64),
        ("group", c_int64),
        ("eps", c_float),
    )


class RouteArgs(ctypes.Structure):
    """Arguments of `route`."""

    _fields_ = (
        ("logits", c_void_p),
        ("correction", c_void_p),
        ("ids", c_void_p),
        ("weights", c_void_p),
        ("tokens", c_int64),
        ("experts", c_int64),
        ("top_k", c_int64),
        ("groups", c_int64),
        ("top_groups", c_int64),
        ("score", c_int32),
        ("group_tops", c_int32),
        ("renormalize", c_int32),
        ("epsilon", c_float),
        ("scaling", c_float),
        ("jitter", c_float),
        ("expert_scales", c_void_p),
    )


class ExpertsArgs(ctypes.Structure):
    """Arguments of `experts`."""

    _fields_ = (
        ("gate", c_void_p),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("gate_up_bias", c_void_p),
        ("down_bias", c_void_p),
        ("experts", c_int64),
        ("top_k", c_int64),
        ("tokens", c_int64),
        ("ids", c_void_p),
        ("weights", c_void_p),
        ("x", c_void_p),
        ("shared", c_void_p),
        ("shared_stride", c_int64),
        ("shared_gate", c_void_p),
        ("y", c_void_p),
        ("dtype", c_int32),
        ("activation", c_int32),
        ("scale_x", c_int32),
        ("scratch", c_void_p),
        ("ranks", c_void_p),
    )


class Ranks(ctypes.Structure):
    """A rank's view of the ranks' shared memory."""

    _fields_ = (
        ("rank", c_int32),
        ("size", c_int32),
        ("shared", c_void_p),
        ("slot_bytes", c_int64),
        ("count", c_int64),
        ("lost", c_int64),
    )


class ExchangeArgs(ctypes.Structure):
    """Arguments of `exchange`."""

    _fields_ = (
        ("ranks", c_void_p),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("y", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("element_bytes", c_int64),
        ("row_ids", c_void_p),
        ("num_ids", c_int64),
        ("first_only", c_int32),
    )


class Call(ctypes.Structure):
    """An operation, by its number, and the address of its arguments."""

    _fields_ = (("operation", c_int64), ("arguments", c_void_p))


class Segment(ctypes.Structure):
    """Calls that run one after another over this many rows."""

    _fields_ = (("calls", c_void_p), ("count", c_int64), ("rows", c_int64))


class SampleControls(ctypes.Structure):
    """A row of the table of controls that `sample` takes."""

    _fields_ = tuple((name, c_double) for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "uniform"))


MIRRORS = tuple(one for one in list(globals().values()) if isinstance(one, type) and issubclass(one, ctypes.Structure))
"""All of them."""
