"""The alphabet in which byte-level tokenizers spell bytes: one printable character for each."""

from __future__ import annotations

from functools import cache

_NOT_IN_ALPHABET = "\uffff"


def spelled_bytes(piece: str) -> bytes:
    """The bytes that ``piece`` spells; its UTF-8 if a character of it is not in the alphabet.

    So does the ByteLevel decoder of ``tokenizers`` read a piece.
    """
    try:
        return piece.translate(_byte_of_character()).encode("latin-1")
    except UnicodeEncodeError:
        return piece.encode()


@cache
def _byte_of_character() -> dict[int, int | str]:
    """For :meth:`str.translate`: the alphabet's characters to U+0000..U+00FF, all others out of Latin-1.

    The alphabet is that of GPT-2 (``bytes_to_unicode`` in its ``encoder.py``): printable Latin-1 stands for itself, and the
    other bytes, in order, for the characters from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    spelled: dict[int, int | str] = {0x100 + i: byte for i, byte in enumerate(others)}
    return spelled | {byte: byte for byte in printable} | dict.fromkeys(others, _NOT_IN_ALPHABET)
