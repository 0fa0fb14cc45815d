"""The alphabet in which byte-level tokenizers spell bytes: one printable character for each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

_NO_BYTE = 256


def spelled_bytes(pieces: Sequence[str]) -> list[bytes]:
    """The bytes that each piece spells; its UTF-8 if any character of it is not in the alphabet.

    So does the ByteLevel decoder of ``tokenizers`` read a piece. All pieces are read in one pass.
    """
    characters = np.frombuffer("".join(pieces).encode("utf-32-le"), np.uint32)
    values = _byte_of_character()[np.minimum(characters, 0x144)]
    text = values.astype(np.uint8).tobytes()
    ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
    spelled = [text[start:end] for start, end in pairwise([0, *ends.tolist()])]
    for i in np.unique(
        np.searchsorted(ends, np.flatnonzero(values == _NO_BYTE), side="right")
    ).tolist():
        spelled[i] = pieces[i].encode()
    return spelled


def _byte_of_character() -> npt.NDArray[np.uint16]:
    """By code point, the byte that a character stands for.

    The alphabet is that of GPT-2 (``bytes_to_unicode`` in its ``encoder.py``): printable Latin-1
    stands for itself, and the characters from U+0100 to U+0143 for the other bytes in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = np.full(0x145, _NO_BYTE, np.uint16)
    table[printable] = printable
    table[0x100:0x144] = sorted(set(range(256)) - set(printable))
    return table
