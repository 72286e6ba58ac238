"""A model's forward pass over a step."""

from collections.abc import Sequence

from torch import Tensor

from penstock.kernels.kv_store import LayerCache
from penstock.models.decoder import Decoder
from penstock.runner.inputs import StepInputs


class Forward:
    """A decoder over its caches, computed call by call."""

    def __init__(self, model: Decoder, caches: Sequence[LayerCache]) -> None:
        self._model, self._caches = model, caches
        self._attended: tuple[Tensor, Tensor] | None = None

    def __call__(self, inputs: StepInputs) -> Tensor:
        """Compute a step's tokens and store their keys and values; the `logits` of the rows that are sampled."""
        self._attended = self._model.attend(inputs.token_ids, inputs.positions, inputs.batch, self._caches)
        return self.logits(inputs.sampled_rows)

    def logits(self, rows: Tensor) -> Tensor:
        """[len(rows), vocab_size] float32 of rows of the last step, in any order and repeated at will."""
        assert self._attended is not None
        return self._model.logits(*self._attended, rows)
