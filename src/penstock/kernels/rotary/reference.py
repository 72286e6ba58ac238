"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864) in plain torch, in the layout of Hugging Face weights.

head    x0 x1 .. | xh xh+1 ..  | rest        h = number of angles; pairs are (x0, xh), (x1, xh+1), ...
                                             `rest` is not rotated
"""

from torch import Tensor


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the heads of `x` [num_tokens, num_heads, head_dim] in place, in float32.

    `cos` and `sin` [num_tokens, angles], float32, belong to the tokens' positions; 2 * angles <= head_dim.
    """
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = first * cos - second * sin
    second.copy_(second * cos + first * sin)
    first.copy_(rotated)
