"""What the trie is built over: items of any kind, as sequences of letters in one order."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Sequence
from itertools import compress, islice, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

from genlm.core.errors import VocabularyError
from genlm.core.tokenization.token import Token

Ints = npt.NDArray[np.int64]


@frozen(eq=False)
class Words:
    """The items of a trie as words over an alphabet, sorted.

    Attributes:
        order: ``[n]``: the position, in the order given, of the word with each rank.
        lengths: ``[n]``: letters of the word with each rank.
        letters: all words by rank, joined: letter codes, uint8 or big-endian uint32.
        alphabet: The letter of each code; codes below 256 are the values of bytes.
    """

    order: Ints
    lengths: Ints
    letters: npt.NDArray[Any]
    alphabet: Sequence[Hashable]

    @classmethod
    def of(cls, items: Sequence[Any]) -> Words:
        """Read and sort the items.

        :raises VocabularyError: there is no item, one occurs twice, or one is no sequence of
            hashable letters.
        """
        if not items:
            raise VocabularyError("a trie needs at least one item; the vocabulary given is empty")
        alphabet, spelled, dtype = _spell(items)
        order = sorted(range(len(spelled)), key=spelled.__getitem__)
        in_order = [spelled[position] for position in order]
        _refuse_duplicates(items, in_order, order)
        positions = np.array(order, np.int64)
        positions.flags.writeable = False  # users get it to read
        lengths = (
            np.fromiter(map(len, spelled), np.int64, len(spelled))[positions] // dtype.itemsize
        )
        return cls(positions, lengths, np.frombuffer(b"".join(in_order), dtype), alphabet)


def key_of(item: Any) -> Any:
    """Under what an item is found in ``word2leaf``: a token under ``(byte_string, token_id)``, all
    else under itself."""
    return (item.byte_string, item.token_id) if isinstance(item, Token) else item


def _spell(items: Sequence[Any]) -> tuple[Sequence[Hashable], list[bytes], np.dtype[Any]]:
    """Each item as bytes that sort like its letters, with the letters' alphabet and their width."""
    if all(isinstance(item, bytes) for item in items):
        return range(256), [bytes(item) for item in items], np.dtype(np.uint8)
    codes: dict[Hashable, int] = {byte: byte for byte in range(256)}
    spelled = [
        # Latin-1 and UTF-32 together widen each byte to a letter of four.
        bytes(item).decode("latin-1").encode("utf-32-be")
        if isinstance(item, bytes)
        else _spell_letters(item, codes)
        for item in items
    ]
    return list(codes), spelled, np.dtype(">u4")


def _spell_letters(item: Iterable[Hashable], codes: dict[Hashable, int]) -> bytes:
    try:
        hash(item)  # it is looked up in `word2leaf`
        return np.array([codes.setdefault(letter, len(codes)) for letter in item], ">u4").tobytes()
    except TypeError as error:
        raise VocabularyError(
            f"{item!r} cannot be a word of a trie: items must be Tokens, bytes, str or hashable "
            "iterables of hashable "
            "letters"
        ) from error


def _refuse_duplicates(
    items: Sequence[Any], in_order: Sequence[bytes], order: Sequence[int]
) -> None:
    """Different tokens may share their bytes, but the same item twice would have two masses."""
    seen: dict[Any, int] = {}
    like_the_one_before = map(operator.eq, islice(in_order, 1, None), in_order)
    for before, position in compress(pairwise(order), like_the_one_before):
        seen.setdefault(key_of(items[before]), before)
        first = seen.setdefault(key_of(items[position]), position)
        if first != position:
            raise VocabularyError(
                f"item {items[position]!r} is at positions {first} and {position}: give every item "
                "once, or make them "
                "Tokens with different ids"
            )
