"""Random numbers that depend on their key alone: (seed, sequence index, position), never on a call count or a batch.

The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011):
a block cipher cut down to what statistics need, so that any number of any stream can be had without those before it.

    key      [seed low, seed high]             32-bit words
    counter  [position, index, 0, 0]           one block of the stream gives one number

It runs in numpy on the host. A row needs one number, and the keys are host data, so a device would pay a hundred
kernel launches for what takes some 50 µs here.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_ROUNDS = 10


def philox(counters: Words, keys: Words) -> Words:
    """Four random words for each counter.

    Args:
        counters: [4, n] 32-bit words, each in a uint64.
        keys: [2, n], likewise.

    Returns:
        [4, n] 32-bit words, each in a uint64.
    """
    even, odd = counters[0::2], counters[1::2]  # words 0, 2 and words 1, 3
    for _ in range(_ROUNDS):
        products = even * _MULTIPLIERS
        even, odd = (products >> _SHIFT)[::-1] ^ odd ^ keys, (products & _MASK)[::-1]
        keys = (keys + _WEYL) & _MASK
    return np.stack((even[0], odd[0], even[1], odd[1]))


def uniforms(
    seeds: Sequence[int] | NDArray[np.uint64], indices: Sequence[int], positions: Sequence[int]
) -> NDArray[np.float64]:
    """One number in [0, 1), with 53 random bits, for each (seed, sequence index, position).

    Args:
        seeds: from 0 to 2**64 - 1.
        indices: of the sequence in its request, from 0 to 2**32 - 1.
        positions: of the token in its sequence, from 0 to 2**32 - 1.
    """
    seed = np.array(seeds, dtype=np.uint64)
    counters = np.zeros((4, len(seed)), dtype=np.uint64)
    counters[0], counters[1] = positions, indices
    words = philox(counters, np.stack((seed & _MASK, seed >> _SHIFT)))
    bits = (words[0] >> np.uint64(5)) << np.uint64(26) | words[1] >> np.uint64(6)
    numbers: NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return numbers
