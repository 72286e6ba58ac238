"""Compiles the Triton kernels for GPUs that are not here, and reads what the compiler made: no GPU, driver or nvcc is
needed, as Triton's wheel has the assembler.
"""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from penstock.kernels import tree
from penstock.kernels.attention import triton as attention
from penstock.kernels.linear import triton as linear

MATRIX = re.compile(r"(wgmma\.mma_async\S*?\.m\d+n\d+k\d+|mma\.sync\S*?\.m\d+n\d+k\d+)")
MOST_SHARED = {80: 166912, 90: 232448}
"""Bytes of shared memory that a program may have, by architecture."""
TYPES = dict.fromkeys(("x", "weight", "queries", "key", "value"), "*bf16") | {"scale": "fp32", "a": "*i8", "b": "*i8"}
NUMBERS = ("num_tokens", "num_rows", "num_columns", "K")
LISTS = ("query_start", "seq_lens", "table_start", "blocks", "items", "num_items", "tiles", "decodes", "first_item")


@dataclass(frozen=True)
class Variant:
    """A kernel with its constants."""

    name: str
    kernel: Any
    constants: Mapping[str, int | bool]
    out: str
    warps: int = 4


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a variant."""

    spilled: int
    """Bytes of registers that went to memory."""
    shared: int
    """Bytes of shared memory."""
    matrix: frozenset[str]
    """Matrix instructions, without their type and with the N of wgmma left out: what decides the order of sums."""
    asynchronous: bool
    """Whether loads overlap with arithmetic."""


def linear_variant(tile: linear.Tile) -> Variant:
    constants = {
        "SPLIT": tile.split,
        "ALIGNED": True,
        "SEGMENT": tree.LINEAR_SEGMENT,
        "STEP": tree.LINEAR_STEP,
        "TOKENS": tile.tokens,
        "ROWS": tile.rows,
        "STAGES": tile.stages,
    }
    name = f"linear of {tile.tokens} tokens{', split' if tile.split else ''}"
    return Variant(name, linear.multiply, constants, "*fp32" if tile.split else "*bf16", tile.warps)


def attention_variant(kernel: Any, rows: int, warps: int = 4) -> Variant:
    """8 KV heads of 128 with 4 query heads each, as in an 8B model."""
    constants = {
        "WINDOW": 0,
        "GROUP": 4,
        "KV_HEADS": 8,
        "DIM": 128,
        "BLOCK": 16,
        "SEGMENT": tree.ATTENTION_SEGMENT,
        "STEP": tree.ATTENTION_STEP,
        "ROWS": rows,
        "STAGES": 2,
    }
    return Variant(f"{kernel.__name__} of {rows} rows", kernel, constants, "*bf16", warps)


LINEAR = [linear_variant(tile) for tile in (linear.FEW, linear.SOME, linear.MANY)]
ATTENTION = [attention_variant(attention.decode_segments, 64), attention_variant(attention.prefill_tiles, 64)]


def _type_of(variant: Variant, name: str) -> str:
    if name in variant.constants:
        return "constexpr"
    if name == "out":
        return variant.out
    if name in NUMBERS:
        return "i32"
    return TYPES.get(name, "*i32" if name in LISTS else "*fp32")


def compile_for(variant: Variant, architecture: int) -> Compiled:
    kernel = variant.kernel
    signature = {name: _type_of(variant, name) for name in kernel.arg_names}
    aligned = [name for name in kernel.arg_names if signature[name].startswith("*") or name in NUMBERS[1:]]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=dict(variant.constants), attrs=attributes)
    options = {"num_warps": variant.warps, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    assembly = compiled.asm["ptx"]
    found = {re.sub(r"\.aligned|n\d+(?=k)", "", each) for each in MATRIX.findall(assembly)}
    return Compiled(_spilled(compiled.asm["cubin"]), compiled.metadata.shared, frozenset(found), "cp.async" in assembly)


def _spilled(binary: bytes) -> int:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        listing = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    return 4 * len(re.findall(r"\bSTL\b", listing))
