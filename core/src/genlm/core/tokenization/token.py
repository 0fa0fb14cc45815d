"""Token: the bytes of one vocabulary entry, and its id."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any


class _Fields:
    """Lends tokens its ``__dict__``, which shares its keys with all others of its kind.

    An instance of a ``bytes`` subclass can have no slots, and the dictionary it would make for itself is twice as large.
    """

    def __init__(self, token_id: int) -> None:
        self.token_id = token_id


class Token(bytes):
    """One entry of a vocabulary: bytes that know their id.

    Several tokens of a vocabulary may have the same bytes, so two tokens are equal, ordered and hashed by ``token_id``.
    With plain bytes a token is compared by content; but since its hash is that of its id, it is not found under its bytes
    in a set or a dictionary.

    :param token_id: the token's id in its vocabulary.
    :param byte_string: the token's bytes.
    :raises TypeError: ``token_id`` is not an int, or ``byte_string`` is not bytes.
    """

    token_id: int

    def __new__(cls, token_id: int, byte_string: bytes) -> Token:
        if not isinstance(token_id, int):
            raise TypeError(f"token_id must be an int, not {type(token_id).__name__}: pass int({token_id!r})")
        if not isinstance(byte_string, bytes):
            raise TypeError(f"byte_string must be bytes, not {type(byte_string).__name__}: encode {byte_string!r} first")
        token = super().__new__(cls, byte_string)
        token.__dict__ = vars(_Fields(token_id))
        return token

    @classmethod
    def vocabulary(cls, byte_strings: Sequence[bytes]) -> list[Token]:
        """The tokens of a whole vocabulary: element ``i`` has id ``i`` and the bytes ``byte_strings[i]``."""
        tokens = list(map(bytes.__new__, repeat(cls), byte_strings))
        fields_of_another = vars(_Fields(-1)).copy  # a copy shares its keys too, and is made faster
        for token_id, token in enumerate(tokens):
            fields = fields_of_another()
            fields["token_id"] = token_id
            token.__dict__ = fields
        return tokens

    @property
    def byte_string(self) -> bytes:
        """The token's content as plain bytes."""
        return bytes(self)

    @staticmethod
    def as_bytes(item: Any) -> Any:
        """The plain bytes of a token; anything else as it is."""
        return bytes(item) if isinstance(item, Token) else item

    @staticmethod
    def is_plain_bytes(item: object) -> bool:
        """Whether ``item`` is bytes without being a token."""
        return isinstance(item, bytes) and not isinstance(item, Token)

    def __repr__(self) -> str:
        return f"Token(token_id={self.token_id}, byte_string={bytes(self)!r})"

    def __hash__(self) -> int:
        return hash(self.token_id)

    def __eq__(self, other: object) -> bool:
        return self.token_id == other.token_id if isinstance(other, Token) else super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return self.token_id != other.token_id if isinstance(other, Token) else super().__ne__(other)

    def __lt__(self, other: bytes) -> bool:
        return self.token_id < other.token_id if isinstance(other, Token) else super().__lt__(other)

    def __le__(self, other: bytes) -> bool:
        return self.token_id <= other.token_id if isinstance(other, Token) else super().__le__(other)

    def __gt__(self, other: bytes) -> bool:
        return self.token_id > other.token_id if isinstance(other, Token) else super().__gt__(other)

    def __ge__(self, other: bytes) -> bool:
        return self.token_id >= other.token_id if isinstance(other, Token) else super().__ge__(other)

    def __reduce__(self) -> tuple[type[Token], tuple[int, bytes]]:
        return type(self), (self.token_id, bytes(self))
