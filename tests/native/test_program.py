import pytest
import torch

from penstock.config.weight_formats import FLOAT
from penstock.kernels.arrays import array_of
from penstock.native.program import CannotRecordError, Program, RecordedTensor
from penstock.native.structs import Segment
from tests.kernels.versions import LIBRARY, native_table, needs_native

pytestmark = needs_native

WIDTH = 40


def run(*segments: Segment) -> None:
    assert LIBRARY is not None
    LIBRARY.run(*segments)


class Block:
    """What a layer is to a program: a norm, two maps, a norm with the residual."""

    def __init__(self) -> None:
        self.ops, cpu = native_table(), torch.device("cpu")
        self.up = self.ops.new_weight(96, WIDTH, FLOAT, gated=True, dtype=torch.float32, device=cpu)
        self.down = self.ops.new_weight(WIDTH, 48, FLOAT, gated=False, dtype=torch.float32, device=cpu)
        self.up.load(0, array_of(torch.randn(96, WIDTH)))
        self.down.load(0, array_of(torch.randn(WIDTH, 48)))
        self.norm = torch.rand(WIDTH) + 0.5

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up.linear(self.ops.rms_norm(x, self.norm, 1e-5), None, torch.float32)
        return self.ops.add_rms_norm(self.down.linear(hidden, None, torch.float32), x, self.norm, 1e-5, 0.5)[0]


def test_a_program_computes_what_the_calls_do_one_by_one_for_any_number_of_rows() -> None:
    blocks, program = [Block() for _ in range(3)], Program(9)
    first = y = program.tensor((WIDTH,), torch.float32)
    for block in blocks:
        y = block(y)
    for count in (9, 1, 4):
        x = torch.randn(count, WIDTH)
        first.memory[:count] = x
        run(program.segment(count))
        for block in blocks:
            x = block(x)
        assert isinstance(y, RecordedTensor)
        assert torch.equal(y.memory[:count], x)


def test_sections_run_one_after_another_each_over_its_own_rows() -> None:
    block, first, second = Block(), Program(9), Program(3)
    x = first.tensor((WIDTH,), torch.float32)
    hidden = block(x)
    assert isinstance(hidden, RecordedTensor)
    chosen = second.tensor((), torch.int64)
    y = block(block.ops.gather(hidden.memory, chosen))
    assert isinstance(y, RecordedTensor)
    content = torch.randn(9, WIDTH)
    x.memory[:] = content
    chosen.fill([8, 2], 2)
    run(first.segment(9), second.segment(2))
    assert torch.equal(y.memory[:2], block(block(content)[[8, 2]]))


def test_nothing_is_computed_while_a_program_is_recorded() -> None:
    program, weight = Program(2), torch.ones(WIDTH)
    x = program.tensor((WIDTH,), torch.float32)
    x.memory.fill_(3.0)
    y = native_table().rms_norm(x, weight, 0.0)
    assert isinstance(y, RecordedTensor)
    y.memory.fill_(7.0)
    assert (y.memory == 7.0).all()
    run(program.segment(1))
    assert (y.memory == torch.tensor([[1.0], [7.0]])).all()


def test_memory_is_used_again_only_when_nobody_refers_to_what_was_in_it() -> None:
    program = Program(2)
    kept, dropped = program.tensor((4,), torch.float32), program.tensor((4,), torch.float32)
    place = dropped.memory.data_ptr()
    del dropped
    assert program.tensor((4,), torch.bfloat16).memory.data_ptr() != place
    again, more = program.tensor((4,), torch.float32), program.tensor((4,), torch.float32)
    assert again.memory.data_ptr() == place
    assert len({rows.memory.data_ptr() for rows in (kept, again, more)}) == 3


def test_what_is_no_native_kernel_cannot_be_recorded() -> None:
    x = Program(2).tensor((4,), torch.float32)
    with pytest.raises(CannotRecordError, match="softmax"):
        x.softmax(-1)
