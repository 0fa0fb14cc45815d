"""The trie."""

import warnings
from collections.abc import Iterable, Iterator
from typing import Any, Self

import genlm.core.trie
from genlm.core import Token as Token


class TokenCharacterTrie(genlm.core.trie.TokenCharacterTrie):
    """The core's trie, with the warning of 0.3 where it is given plain bytes."""

    # Not __init__: from here the caller is one frame away, also from a subclass.
    def __new__(cls, decode: Iterable[Any], *arguments: Any, **options: Any) -> Self:
        if not isinstance(decode, Iterator) and any(map(Token.is_plain_bytes, decode)):
            warnings.warn(
                f"{cls.__name__} over plain bytes is deprecated since genlm-backend 0.3; give it "
                "the tokens that decode_vocab(tokenizer) returns",
                DeprecationWarning,
                stacklevel=2,
            )
        return super().__new__(cls)
