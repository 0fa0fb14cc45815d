"""Token: the bytes of one vocabulary entry, and its id."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any

from genlm.core.collector import COLLECTOR

# Few tokens are special, so only those have an item for it.
_SPECIAL = "is special"


class _Fields(dict[str, Any]):
    """The ``__dict__`` of a token: empty, with room for the id.

    An instance of a ``bytes`` subclass can have no slots itself. An id among the dictionary's items
    would take another 200 bytes.
    """

    __slots__ = ("token_id",)

    token_id: int


def _compared(compare: Callable[[Any, Any], Any]) -> Any:
    """A comparison operator: two tokens are compared by id, a token and another object by bytes."""
    as_bytes = getattr(bytes, f"__{compare.__name__}__")

    def method(self: Token, other: object) -> Any:
        if isinstance(other, Token):
            # Written out for speed, because programs look up hundreds of thousands of tokens.
            return compare(self.__dict__.token_id, other.__dict__.token_id)
        return as_bytes(self, other)

    return method


class Token(bytes):
    """One entry of a vocabulary: bytes that know their id.

    Several tokens of a vocabulary may have the same bytes. So tokens are compared, ordered and
    hashed by ``token_id``. With plain bytes a token is compared by content. Its hash is that of its
    id, so a set or a dictionary does not find it by its bytes.

    Args:
        token_id: The token's id in its vocabulary.
        byte_string: The token's bytes.
        is_special: Whether it is a special token, such as the end of the sequence: its bytes are
            its name and not text that the model has written.

    Raises:
        TypeError: ``token_id`` is not an int, or ``byte_string`` is not bytes.
    """

    __dict__: _Fields

    def __new__(cls, token_id: int, byte_string: bytes, is_special: bool = False) -> Token:
        if not isinstance(token_id, int):
            raise TypeError(
                f"token_id must be an int, not {type(token_id).__name__}: pass int({token_id!r})"
            )
        if not isinstance(byte_string, bytes):
            raise TypeError(
                f"byte_string must be bytes, not {type(byte_string).__name__}: encode "
                f"{byte_string!r} first"
            )
        token = super().__new__(cls, byte_string)
        fields = _Fields()
        fields.token_id = token_id
        if is_special:
            fields[_SPECIAL] = True
        token.__dict__ = fields
        return token

    @classmethod
    def vocabulary(cls, byte_strings: Sequence[bytes], special: Iterable[int] = ()) -> list[Token]:
        """The tokens of a whole vocabulary: element ``i`` has id ``i`` and the bytes
        ``byte_strings[i]``. The ids ``special`` are those of special tokens."""
        with COLLECTOR.rarely():
            tokens = list(map(bytes.__new__, repeat(cls), byte_strings))
            for token_id, token in enumerate(tokens):
                fields = token.__dict__ = _Fields()
                fields.token_id = token_id
        for token_id in special:
            tokens[token_id].__dict__[_SPECIAL] = True
        return tokens

    @property
    def token_id(self) -> int:
        """The token's id."""
        return self.__dict__.token_id

    @property
    def is_special(self) -> bool:
        """Whether the token is special, such as the end of the sequence."""
        return _SPECIAL in self.__dict__

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
        return hash(self.__dict__.token_id)

    __eq__ = _compared(operator.eq)
    __ne__ = _compared(operator.ne)
    __lt__ = _compared(operator.lt)
    __le__ = _compared(operator.le)
    __gt__ = _compared(operator.gt)
    __ge__ = _compared(operator.ge)

    def __reduce__(self) -> tuple[type[Token], tuple[int, bytes, bool]]:
        return type(self), (self.token_id, bytes(self), self.is_special)
