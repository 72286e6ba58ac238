import pytest
import torch

from penstock import native
from penstock.kernels.gather import gather
from penstock.kernels.linear import new_weight
from penstock.kernels.rms_norm import add_rms_norm, rms_norm
from penstock.native.program import Program, Rows, run

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native kernels were not built")

WIDTH = 40


class Block:
    """What a layer is to a program: a norm, two maps, a norm with the residual."""

    def __init__(self) -> None:
        cpu = torch.device("cpu")
        self.up = new_weight(96, WIDTH, "float", gated=True, dtype=torch.float32, device=cpu)
        self.down = new_weight(WIDTH, 48, "float", gated=False, dtype=torch.float32, device=cpu)
        self.up.load(0, torch.randn(96, WIDTH))
        self.down.load(0, torch.randn(WIDTH, 48))
        self.norm = torch.rand(WIDTH) + 0.5

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up.linear(rms_norm(x, self.norm, 1e-5), None, torch.float32)
        return add_rms_norm(self.down.linear(hidden, None, torch.float32), x, self.norm, 1e-5, 0.5)[0]


def test_a_program_computes_what_the_calls_do_one_by_one_for_any_number_of_rows() -> None:
    blocks, program = [Block() for _ in range(3)], Program(9)
    first = y = program.rows((WIDTH,), torch.float32)
    for block in blocks:
        y = block(y)
    for count in (9, 1, 4):
        x = torch.randn(count, WIDTH)
        first.memory[:count] = x
        run(program.section(count))
        for block in blocks:
            x = block(x)
        assert isinstance(y, Rows)
        assert torch.equal(y.memory[:count], x)


def test_sections_run_one_after_another_each_over_its_own_rows() -> None:
    block, first, second = Block(), Program(9), Program(3)
    x = first.rows((WIDTH,), torch.float32)
    hidden = block(x)
    assert isinstance(hidden, Rows)
    chosen = second.rows((), torch.int64)
    y = block(gather(hidden.memory, chosen))
    assert isinstance(y, Rows)
    content = torch.randn(9, WIDTH)
    x.memory[:] = content
    chosen.fill([8, 2], 2)
    run(first.section(9), second.section(2))
    assert torch.equal(y.memory[:2], block(block(content)[[8, 2]]))


def test_nothing_is_computed_while_a_program_is_recorded() -> None:
    program, weight = Program(2), torch.ones(WIDTH)
    x = program.rows((WIDTH,), torch.float32)
    x.memory.fill_(3.0)
    y = rms_norm(x, weight, 0.0)
    assert isinstance(y, Rows)
    y.memory.fill_(7.0)
    assert (y.memory == 7.0).all()
    run(program.section(1))
    assert (y.memory == torch.tensor([[1.0], [7.0]])).all()


def test_memory_is_used_again_only_when_nobody_refers_to_what_was_in_it() -> None:
    program = Program(2)
    kept, dropped = program.rows((4,), torch.float32), program.rows((4,), torch.float32)
    place = dropped.memory.data_ptr()
    del dropped
    assert program.rows((4,), torch.bfloat16).memory.data_ptr() != place
    again, more = program.rows((4,), torch.float32), program.rows((4,), torch.float32)
    assert again.memory.data_ptr() == place
    assert len({rows.memory.data_ptr() for rows in (kept, again, more)}) == 3


def test_what_is_no_native_kernel_cannot_be_recorded() -> None:
    x = Program(2).rows((4,), torch.float32)
    with pytest.raises(TypeError, match="softmax is not a native kernel"):
        x.softmax(-1)
