"""The Triton kernels without a GPU: in Triton's interpreter, under a sanitizer of addresses, and compiled for GPUs.

Each kind has a process of its own, as Triton decides when a kernel is decorated whether it will be interpreted.
"""

import os
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

CASES = (
    "linear_is_the_reference",
    "linear_has_the_same_bits_in_every_tile",
    "attention_is_the_reference",
    "attention_has_the_same_bits_in_decode_prefill_and_any_batch",
    "attention_has_the_same_bits_in_any_chunks",
)


def _process(**environment: str) -> Iterator[Executor]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        with ProcessPoolExecutor(1, get_context("spawn")) as made:
            made.submit(os.getpid).result()
            yield made


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Executor]:
    yield from _process(TRITON_INTERPRET="1")


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    yield from _process(TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton")))


def known_cases() -> tuple[str, ...]:
    import tests.kernels.triton_interpreter  # noqa: F401
    from tests.kernels.triton_cases import CASES

    return tuple(CASES)


def run_case(name: str) -> None:
    import tests.kernels.triton_interpreter  # noqa: F401
    from tests.kernels.triton_cases import CASES
    from tests.kernels.triton_sanitizer import sanitized

    torch.set_num_threads(1)
    with sanitized(reverse=True):
        CASES[name](torch.device("cpu"))


def test_every_case_is_run(interpreter: Executor) -> None:
    assert interpreter.submit(known_cases).result() == CASES


@pytest.mark.parametrize("name", CASES)
def test_in_the_interpreter(interpreter: Executor, name: str) -> None:
    interpreter.submit(run_case, name).result()


def sanitize(kernel_name: str, *, reverse: bool = False) -> None:
    import tests.kernels.triton_interpreter  # noqa: F401
    from tests.kernels import triton_broken
    from tests.kernels.triton_sanitizer import sanitized

    with sanitized(reverse=reverse):
        getattr(triton_broken, kernel_name)[(2,)](torch.ones(12), torch.zeros(12), SIZE=8)


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        ("reads_beyond", "reads 4 addresses outside"),
        ("writes_beyond", "writes 4 addresses outside"),
        ("writes_where_another_did", "writes what another one wrote"),
        ("reads_what_another_wrote", "reads what another one wrote"),
        ("stores_twice", "has an address twice"),
    ],
)
def test_the_sanitizer_stops_a_kernel_that(interpreter: Executor, kernel: str, says: str) -> None:
    with pytest.raises(Exception, match=says):
        interpreter.submit(sanitize, kernel).result()


def bfloat16_like_torch() -> dict[str, Any]:
    import tests.kernels.triton_interpreter  # noqa: F401
    from tests.kernels.triton_broken import bfloat16_arithmetic

    a, b = torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    added, product = torch.empty(32, 32).bfloat16(), torch.empty(32, 32)
    bfloat16_arithmetic[(1,)](a, b, added, product)
    return {"added": torch.equal(added, a + b * 1.5), "product": (product - a.float() @ b.float()).abs().max().item()}


def test_the_interpreter_computes_with_bfloat16_as_torch_does(interpreter: Executor) -> None:
    found = interpreter.submit(bfloat16_like_torch).result()
    assert found["added"]
    assert found["product"] < 1e-5


def compiled(architecture: int) -> dict[str, Any]:
    from tests.kernels.triton_gate import ATTENTION, LINEAR, MOST_SHARED, compile_for

    made = {variant.name: compile_for(variant, architecture) for variant in (*LINEAR, *ATTENTION)}
    kinds = [{made[variant.name].matrix for variant in family} for family in (LINEAR, ATTENTION)]
    return {"made": made, "kinds": kinds, "most": MOST_SHARED[architecture]}


@pytest.mark.parametrize(("architecture", "instruction"), [(90, "wgmma"), (80, "mma.sync")])
def test_kernels_compile_and_all_variants_of_an_operation_multiply_alike(
    compiler: Executor, architecture: int, instruction: str
) -> None:
    found = compiler.submit(compiled, architecture).result()
    for name, made in found["made"].items():
        assert made.spilled == 0 or architecture < 90, name  # tiles are sm_90's; sm_80 would need smaller ones
        assert made.shared <= found["most"], name
        assert made.asynchronous, name
        assert made.matrix, name
        assert all(each.startswith(instruction) for each in made.matrix), (name, made.matrix)
    for kinds in found["kinds"]:
        assert len(kinds) == 1, f"variants of one operation sum in different orders: {kinds}"


def kinds_of_decode() -> set[frozenset[str]]:
    from penstock.kernels.attention.triton import decode_segments
    from tests.kernels.triton_gate import attention_variant, compile_for

    return {compile_for(attention_variant(decode_segments, rows), 90).matrix for rows in (16, 64)}


def test_a_decode_of_16_rows_would_multiply_by_another_instruction(compiler: Executor) -> None:
    """The reason for 64 rows, of which most models use 4 to 8."""
    assert len(compiler.submit(kinds_of_decode).result()) == 2


def kinds_of_questions() -> dict[str, frozenset[str]]:
    from tests.kernels.triton_gate import Variant, compile_for, linear_variant
    from tools.gpu.kernels import multiply_int8
    from tools.gpu.questions import TILES

    shape = {"ROWS": 64, "COLUMNS": 16, "STEP": 64}
    variants = {name: linear_variant(TILES[name]) for name in ("16 tokens", "128 tokens", "16 tokens, 32 rows")}
    variants["int8"] = Variant("int8", multiply_int8, shape, "*i32")
    return {name: compile_for(variant, 90).matrix for name, variant in variants.items()}


def test_the_tiles_that_a_gpu_will_compare_multiply_by_the_instructions_in_question(compiler: Executor) -> None:
    """See `tools/gpu/questions.py`."""
    for name, kinds in compiler.submit(kinds_of_questions).result().items():
        wanted = "mma.sync" if "32 rows" in name else "wgmma"
        assert kinds, name
        assert all(kind.startswith(wanted) for kind in kinds), (name, kinds)
