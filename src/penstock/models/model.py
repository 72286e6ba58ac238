"""What the runner needs of a model, and what a decoder needs of a feed-forward part."""

import re
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from penstock.kernels.attention import LayerCache
from penstock.kernels.batch import Batch
from penstock.models.decoder_config import DecoderConfig


class FeedForward(Protocol):
    """The part of a layer that concerns each token alone."""

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [num_tokens, hidden_size] -> the same shape."""
        ...


class Model(Protocol):
    """Token ids in, logits out, over a paged KV cache.

    `forward` and `lm_head` are called once with recorded tensors, too, which have no content: neither may branch on
    what a tensor holds, or on how many rows it has.
    """

    config: DecoderConfig

    def forward(
        self, token_ids: Tensor, positions: Tensor, batch: Batch, caches: Sequence[LayerCache]
    ) -> Sequence[Tensor]:
        """Compute a step's tokens and store their keys and values.

        `token_ids` and `positions` [num_tokens] int64; `caches` one a layer. Returns what `lm_head` needs of each
        token, as tensors of num_tokens rows.
        """
        ...

    def lm_head(self, hidden: Sequence[Tensor], rows: Tensor) -> Tensor:
        """The projection to the vocabulary, [len(rows), vocab_size] float32, of what `forward` returned.

        `rows` int64, of the step, in any order and repeated at will.
        """
        ...

    def scale_logits(self, logits: Tensor) -> Tensor:
        """The logits of what `lm_head` gives, in place."""
        ...

    def compute_logits(self, hidden: Sequence[Tensor], rows: Tensor) -> Tensor:
        """`lm_head`, then `scale_logits`."""
        ...

    def ignored_tensors(self) -> "re.Pattern[str]":
        """Names that a checkpoint may hold beside the parameters."""
        ...
