"""Checks the normalization rules of a SentencePiece model before `tokenizers` follows them without bounds.

A `precompiled_charsmap` is the size of a trie in bytes, the trie, and the texts that it leads to, each ended by a NUL.
The trie is a double array (Aoe 1989; units as in Darts-clone): the byte `c` leads from the unit `i` to the unit
`i ^ offset ^ c`. If it has the has-leaf bit, the unit `i ^ offset` is the place of a text, whose leaf bit is ignored.
"""

import struct

import numpy as np

_SIZE = struct.Struct("<I")
_LEAF, _WIDE, _HAS_LEAF = np.uint32(1 << 31), np.uint32(1 << 9), np.uint32(1 << 8)


def check_charsmap(charsmap: bytes) -> None:
    """
    Raises:
        ValueError: it is damaged: a step or a text of the trie lies outside of it.
    """
    if len(charsmap) < _SIZE.size:
        raise ValueError(f"its normalization rules have {len(charsmap)} bytes")
    size = _SIZE.unpack_from(charsmap)[0]
    if size % 1024 or not 0 < size <= len(charsmap) - _SIZE.size:
        raise ValueError(f"the trie of its normalization rules has {size} bytes, of {len(charsmap)} in all")
    units = np.frombuffer(charsmap, "<u4", size // 4, _SIZE.size)
    texts = charsmap[_SIZE.size + size :]
    texts.decode()  # a UnicodeDecodeError is a ValueError
    offsets = units >> 10 << np.where(units & _WIDE, np.uint32(8), np.uint32(0))
    is_leaf = (units & _LEAF) != 0
    if is_leaf[0]:
        raise ValueError("the trie of its normalization rules has no root")
    steps = np.arange(len(units), dtype=np.uint32) ^ offsets
    if ((steps[~is_leaf] | np.uint32(255)) >= len(units)).any():
        raise ValueError("the trie of its normalization rules leads outside of itself")
    leads = ~is_leaf & ((units & _HAS_LEAF) != 0)
    places = np.unique(units[steps[leads]] & ~_LEAF)
    if not all(place < len(texts) and (not place or texts[place - 1] == 0) for place in places.tolist()):
        raise ValueError("its normalization rules lead to no text")
