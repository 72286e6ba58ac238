"""Tensors of a checkpoint as llama.cpp's converter writes them: names, order of rows, and values, for tests."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

Config = Mapping[str, Any]
Tensors = Iterator[tuple[str, Tensor]]
Convert = Callable[[str, Tensor, Config], Tensors]


def converted(tensors: Tensors, config: Config, convert: Convert | None) -> Tensors:
    for name, tensor in tensors:
        yield from ((name, tensor),) if convert is None else convert(name, tensor, config)


def _block(name: str) -> str:
    """What the names of a layer's tensors begin with in the file."""
    layer = re.search(r"\.layers\.(\d+)\.", name)
    return "" if layer is None else f"blk.{layer[1]}."


def norms_plus_one(name: str, tensor: Tensor, config: Config) -> Tensors:
    if name == "lm_head.weight" and "gemma" in config["model_type"]:
        return
    yield name, tensor + 1 if name.endswith("norm.weight") else tensor


def gemma4_tensors(name: str, tensor: Tensor, config: Config) -> Tensors:
    if name == "lm_head.weight" and config["tie_word_embeddings"]:
        return
    block = _block(name)
    others = {
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "layer_scalar": "layer_output_scale.weight",
    }
    for end, stored in others.items():
        if name.endswith(end):
            yield f"{block}{stored}", tensor
            return
    yield f"{name}.weight" if ".experts." in name else name, tensor


_ENDS: dict[str, list[Tensor]] = {}
"""Gemma 3n's maps of streams so far, by their stacked tensor."""


def gemma3n_tensors(name: str, tensor: Tensor, config: Config) -> Tensors:
    """With the maps of all streams in one tensor."""
    end = re.fullmatch(r"model\.altup_(unembed_)?projections\.(\d)\.weight", name)
    if name.endswith("correct_output_scale"):
        yield f"{name}.weight", tensor
    elif end is None:
        yield name, tensor
    else:
        maps = _ENDS.setdefault(f"model.altup_{end[1] or ''}projections.weight", [])
        assert len(maps) == int(end[2]), "in order"
        maps.append(tensor)
        if len(maps) == config["altup_num_inputs"] - 1:
            stacked_name = f"model.altup_{end[1] or ''}projections.weight"
            yield stacked_name, torch.stack(_ENDS.pop(stacked_name))


def gpt_oss_tensors(name: str, tensor: Tensor, config: Config) -> Tensors:
    if "sinks" in name:
        yield f"{name}.weight", tensor
    elif "experts" in name:
        stem, bias = name.removesuffix("_bias"), name.endswith("_bias")
        kind, rows = ".bias" if bias else ".weight", tensor if bias else tensor.transpose(1, 2)
        if "gate_up" in name:
            yield stem.replace("gate_up_proj", "gate_proj") + kind, rows[:, ::2].contiguous()
            yield stem.replace("gate_up_proj", "up_proj") + kind, rows[:, 1::2].contiguous()
        else:
            yield stem + kind, rows.contiguous()
    else:
        yield name, tensor


def correction_biases(name: str, tensor: Tensor, config: Config) -> Tensors:
    if name.endswith(("e_score_correction_bias", ".expert_bias")):
        yield f"{_block(name)}exp_probs_b.bias", tensor
    else:
        yield name, tensor


def lfm2_tensors(name: str, tensor: Tensor, config: Config) -> Tensors:
    tensor = tensor[:, 0] if "conv.conv" in name else tensor
    yield from correction_biases(name.replace("model.", "") if ".experts." in name else name, tensor, config)


def delta_tensors(name: str, tensor: Tensor, config: Config) -> Tensors:
    """Of Qwen3.5 the heads of values are put so that those of keys come in turn."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    first, size = 2 * keys * config["linear_key_head_dim"], config["linear_value_head_dim"]

    def turned(rows: Tensor, dim: int = 0) -> Tensor:
        if config["model_type"] == "qwen3_next":
            return rows
        shape = list(rows.shape)
        shape[dim : dim + 1] = [keys, values // keys, shape[dim] // values]
        return rows.view(shape).transpose(dim, dim + 1).reshape(rows.shape)

    part, block = name.partition("linear_attn.")[2], _block(name)
    if name.endswith("experts.gate_up_proj"):
        for kind, rows in zip(("gate", "up"), tensor.chunk(2, 1), strict=True):
            yield name.replace("gate_up_proj", f"{kind}_proj.weight"), rows.contiguous()
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", tensor
    elif not part:
        yield from norms_plus_one(name, tensor, config)
    elif part == "A_log":
        yield f"{block}ssm_a", turned(-tensor.exp())
    elif part == "dt_bias":
        yield f"{block}ssm_dt.bias", turned(tensor)
    elif part in ("in_proj_qkv.weight", "conv1d.weight"):
        tensor = tensor[:, 0] if "conv" in part else tensor
        yield name, torch.cat((tensor[:first], turned(tensor[first:])))
    elif part in ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight"):
        yield name, turned(tensor)
    elif part == "out_proj.weight":
        yield name, turned(tensor, 1)
    elif part == "in_proj_qkvz.weight":
        key, share = config["linear_key_head_dim"], values // keys * size
        parts = tensor.view(keys, -1, tensor.shape[1]).split((key, key, share, share), 1)
        yield f"{block}attn_qkv.weight", torch.cat([each.flatten(0, 1) for each in parts[:3]])
        yield f"{block}attn_gate.weight", parts[3].flatten(0, 1)
    else:
        yield name, tensor


def interleaved(name: str, tensor: Tensor, config: Config) -> Tensors:
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is None:
        yield name, tensor
    else:
        yield name, tensor.view(config[heads], 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _mamba(name: str, tensor: Tensor, config: Config) -> Tensors:
    layer, _, part = name.rpartition(".")
    block = _block(name)
    groups = config.get("mamba_n_groups", config.get("n_groups"))
    if part == "A_log":
        yield f"{block}ssm_a", -tensor.exp()[:, None]
    elif part == "D":
        yield f"{block}ssm_d", tensor[:, None]
    elif part == "dt_bias":
        yield f"{block}ssm_dt.bias", tensor
    elif layer.endswith("conv1d") and part == "weight":
        yield name, tensor[:, 0]
    elif layer.endswith(("mamba.norm", "mixer.norm")):
        yield name, tensor.view(groups, -1)
    else:
        yield from correction_biases(name, tensor, config)


def neox_tensors(name: str, tensor: Tensor, config: Config) -> Tensors:
    """With all queries, keys and values together."""
    if "query_key_value" in name:
        by_head = tensor.view(config["num_attention_heads"], 3, -1, *tensor.shape[1:])
        yield name, by_head.transpose(0, 1).reshape(tensor.shape)
    else:
        yield name, tensor


def bloom_tensors(name: str, tensor: Tensor, config: Config) -> Tensors:
    """As GPT-NeoX, without the prefix of names."""
    yield from neox_tensors(name.removeprefix("transformer."), tensor, config)


def gpt2_tensors(name: str, tensor: Tensor, config: Config) -> Tensors:
    transposed = re.search(r"(c_attn|c_proj|c_fc)\.weight$", name)
    yield name, tensor.T.contiguous() if transposed else tensor


def granite_hybrid_tensors(name: str, tensor: Tensor, config: Config) -> Tensors:
    kinds = "_exps" if "block_sparse_moe" in name else "_shexp" if config["num_local_experts"] else ""
    block = _block(name)
    if "input_linear" in name:
        gate, up = tensor.chunk(2, -2)
        yield f"{block}ffn_gate{kinds}.weight", gate.contiguous()
        yield f"{block}ffn_up{kinds}.weight", up.contiguous()
    elif "output_linear" in name:
        yield f"{block}ffn_down{kinds}.weight", tensor
    elif "self_attn" in name:
        yield from interleaved(name, tensor, config)
    else:
        yield from _mamba(name, tensor, config)


def bamba_tensors(name: str, tensor: Tensor, config: Config) -> Tensors:
    yield from (interleaved if "self_attn" in name else _mamba)(name, tensor, config)


def falcon_tensors(name: str, tensor: Tensor, config: Config) -> Tensors:
    """With all queries, keys and values together."""
    if "query_key_value" in name and config["new_decoder_architecture"]:
        share = config["num_attention_heads"] // config["num_kv_heads"]
        grouped = tensor.view(config["num_kv_heads"], share + 2, -1, *tensor.shape[1:])
        parts = (grouped[:, :share], grouped[:, share : share + 1], grouped[:, share + 1 :])
        tensor = torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in parts])
    if name != "lm_head.weight" or not config["tie_word_embeddings"]:
        yield name, tensor


def falcon_h1_tensors(name: str, tensor: Tensor, config: Config) -> Tensors:
    """With the factors in the matrices."""
    of_gate, of_down = config["mlp_multipliers"]
    attention = config["attention_in_multiplier"]
    factors = {
        "gate_proj": of_gate,
        "down_proj": of_down,
        "q_proj": attention,
        "k_proj": attention * config["key_multiplier"],
        "v_proj": attention,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    part = name.split(".")[-2]
    if part == "in_proj":
        inner, states = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = (inner, inner, states, states, config["mamba_n_heads"])
        each = [torch.full((size,), factor) for size, factor in zip(sizes, config["ssm_multipliers"], strict=True)]
        tensor = tensor * config["ssm_in_multiplier"] * torch.cat(each)[:, None]
    yield from _mamba(name, tensor * factors.get(part, 1.0), config)


def jamba_tensors(name: str, tensor: Tensor, config: Config) -> Tensors:
    if name.endswith("A_log"):
        yield f"{_block(name)}ssm_a", -tensor.exp()
    elif name.endswith(".D"):
        yield f"{_block(name)}ssm_d", tensor
    else:
        yield name.replace("feed_forward.experts", "mlp.experts"), tensor[:, 0] if "conv1d.weight" in name else tensor


def nemotron_h_tensors(name: str, tensor: Tensor, config: Config) -> Tensors:
    name = re.sub("^model", "backbone", name)
    if ".experts." in name:
        name = name.replace("backbone", "model").replace("mixer", "mlp")
    yield from _mamba(name, tensor, config)


def latent_tensors(name: str, tensor: Tensor, config: Config) -> Tensors:
    block = _block(name)
    if "kv_b_proj" in name:
        by_head = tensor.view(config["num_attention_heads"], -1, tensor.shape[1])
        keys, values = by_head.split((config["qk_nope_head_dim"], config["v_head_dim"]), 1)
        yield f"{block}attn_k_b.weight", keys.transpose(1, 2).contiguous()
        yield f"{block}attn_v_b.weight", values.contiguous()
    else:
        yield from correction_biases(name, tensor, config)


def mistral4_tensors(name: str, tensor: Tensor, config: Config) -> Tensors:
    """With gate and up of the experts in one tensor."""
    yield from latent_tensors(f"{name}.weight" if re.search(r"experts\.\w+$", name) else name, tensor, config)


def granite_swa_tensors(name: str, tensor: Tensor, config: Config) -> Tensors:
    others = {
        "sinks": "attn_sinks",
        "block_sparse_moe.router.weight": "ffn_gate_inp",
        "experts.gate_up_proj": "ffn_gate_up_exps",
        "experts.down_proj": "ffn_down_exps",
        "shared_mlp.input_linear.weight": "ffn_up_shexp",
        "shared_mlp.output_linear.weight": "ffn_down_shexp",
    }
    stored = next((other for end, other in others.items() if name.endswith(end)), None)
    if stored is not None:
        yield f"{_block(name)}{stored}.weight", tensor
    else:
        yield from interleaved(name, tensor, config)


def hy_v3_tensors(name: str, tensor: Tensor, config: Config) -> Tensors:
    yield f"{_block(name)}exp_probs_b" if name.endswith(".expert_bias") else name, tensor


def kimi_tensors(name: str, tensor: Tensor, config: Config) -> Tensors:
    if name.endswith("A_log"):
        yield f"{_block(name)}ssm_a", -tensor.exp()
    elif name.endswith("dt_bias"):
        yield f"{_block(name)}ssm_dt.bias", tensor
    elif name.endswith("_conv1d.weight"):
        yield name, tensor.reshape(1, len(tensor), 1, -1)
    else:  # transformers saves the first layer's MLP as if it had experts
        name = re.sub(r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj", name)
        yield from latent_tensors(name, tensor, config)


def llama4_tensors(name: str, tensor: Tensor, config: Config) -> Tensors:
    if "experts.gate_up_proj" in name:
        for part, rows in zip(("gate", "up"), tensor.transpose(1, 2).chunk(2, 1), strict=True):
            yield name.replace("gate_up_proj", f"{part}_proj.weight"), rows.contiguous()
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", tensor.transpose(1, 2).contiguous()
    else:
        yield name, tensor


def stacked(tensors: Tensors) -> Tensors:
    """With the experts of a layer in one tensor."""
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors:
        match = re.fullmatch(r"(.*\.experts)\.(\d+)(\..*)", name)
        if match is None:
            yield name, tensor
        else:
            experts.setdefault(match[1] + match[3], {})[int(match[2])] = tensor
    for name, parts in experts.items():
        yield name, torch.stack([parts[index] for index in range(len(parts))])
