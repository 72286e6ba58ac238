import numpy as np
import pytest

from penstock.config.weight_formats import FLOAT
from penstock.kernels.ops import native_ops
from penstock.native.array import INT64, Array, CannotRecordError, dtype_of
from penstock.native.program import Program
from penstock.native.structs import Segment
from tests.support.needs import LIBRARY, needs_native

pytestmark = needs_native

WIDTH = 40
FLOAT32 = dtype_of("float32")
RANDOM = np.random.default_rng(0)


def numbers(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape, np.float32)


def run(*segments: Segment) -> None:
    assert LIBRARY is not None
    LIBRARY.run(*segments)


class Block:
    """What a layer is to a program: a norm, two maps, a norm with the residual."""

    def __init__(self) -> None:
        assert LIBRARY is not None
        self.ops = native_ops(LIBRARY)
        self.up = self.ops.new_weight(96, WIDTH, FLOAT, gated=True, dtype=FLOAT32, device="cpu")
        self.down = self.ops.new_weight(WIDTH, 48, FLOAT, gated=False, dtype=FLOAT32, device="cpu")
        self.up.load(0, numbers(96, WIDTH))
        self.down.load(0, numbers(WIDTH, 48))
        self.norm = Array(numbers(WIDTH))

    def __call__(self, x: Array) -> Array:
        hidden = self.up.linear(self.ops.rms_norm(x, self.norm, 1e-5), None, FLOAT32)
        return self.ops.add_rms_norm(self.down.linear(hidden, None, FLOAT32), x, self.norm, 1e-5, 0.5)[0]


def content(result: Array) -> np.ndarray:
    return result.memory.numpy()


def test_a_program_computes_what_the_calls_do_one_by_one_for_any_number_of_rows() -> None:
    blocks, program = [Block() for _ in range(3)], Program(9)
    first = y = program.array((WIDTH,), FLOAT32)
    for block in blocks:
        y = block(y)
    for count in (9, 1, 4):
        rows = numbers(count, WIDTH)
        first.fill(rows, count)
        run(program.segment(count))
        x = Array(rows)
        for block in blocks:
            x = block(x)
        assert y.program is program
        assert (content(y)[:count] == x.numpy()).all()


def test_sections_run_one_after_another_each_over_its_own_rows() -> None:
    block, first, second = Block(), Program(9), Program(3)
    x = first.array((WIDTH,), FLOAT32)
    hidden = block(x)
    chosen = second.array((), INT64)
    y = block(block.ops.gather(hidden.memory, chosen))
    rows = numbers(9, WIDTH)
    x.fill(rows, 9)
    chosen.fill([8, 2], 2)
    run(first.segment(9), second.segment(2))
    wanted = block(Array(block(Array(rows)).numpy()[[8, 2]]))
    assert (content(y)[:2] == wanted.numpy()).all()


def test_nothing_is_computed_while_a_program_is_recorded() -> None:
    program, block = Program(2), Block()
    x = program.array((WIDTH,), FLOAT32)
    x.fill(3.0, 2)
    y = block.ops.rms_norm(x, Array(np.ones(WIDTH, np.float32)), 0.0)
    y.fill(7.0, 2)
    assert (content(y) == 7.0).all()
    run(program.segment(1))
    assert (content(y) == [[1.0], [7.0]]).all()


def test_memory_is_used_again_only_when_nobody_refers_to_what_was_in_it() -> None:
    program = Program(2)
    kept, dropped = program.array((4,), FLOAT32), program.array((4,), FLOAT32)
    place = dropped.data_ptr()
    del dropped
    assert program.array((4,), dtype_of("bfloat16")).data_ptr() != place
    again, more = program.array((4,), FLOAT32), program.array((4,), FLOAT32)
    assert again.data_ptr() == place
    assert len({rows.data_ptr() for rows in (kept, again, more)}) == 3


def test_what_a_step_computes_cannot_be_read_while_it_is_recorded() -> None:
    x = Program(2).array((4,), FLOAT32)
    for read in (x.numpy, lambda: x[:1], lambda: x.view(8)):
        with pytest.raises(CannotRecordError, match="the content"):
            read()
