"""A sequence of tokens to run through the model, and the rows wanted of it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from attrs import field, frozen

from genlm.core.prefixes import common_length
from genlm.core.types import Adapter

#: Bytes before the first token of a key: the adapter's version, so that no state crosses adapters
#: or versions of one.
HEADER = 8
WIDTH = array("I").itemsize


@frozen(eq=False)
class TokenSequence:
    """Tokens whose last ``keep`` positions are wanted as rows.

    Attributes:
        tokens: The whole context; at least one token.
        adapter: The LoRA adapter; ``None`` is the base model.
        keep: For how many of the last positions logits are wanted.
        key: Adapter version and tokens as bytes: a context extends another exactly if its key does.
    """

    tokens: Sequence[int]
    adapter: Adapter | None = None
    keep: int = 1
    key: bytes = field(init=False, repr=False)

    @key.default
    def _make_key(self) -> bytes:
        return key_prefix(self.adapter) + array("I", self.tokens).tobytes()

    @property
    def length(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    @property
    def latest_start(self) -> int:
        """The first position that must be computed even if its key/value state is known."""
        return len(self.tokens) - self.keep


def key_prefix(adapter: Adapter | None) -> bytes:
    """What the keys of an adapter's sequences begin with."""
    return (0 if adapter is None else adapter.version).to_bytes(HEADER, "big")


def key_of_prefix(key: bytes, length: int) -> bytes:
    """The key of the first ``length`` tokens of ``key``."""
    return key[: HEADER + WIDTH * length]


def shared_tokens(left: bytes, right: bytes) -> int:
    """How many leading tokens two keys share; 0 for different adapters."""
    return tokens_in(common_length(left, right))


def length_of(key: bytes) -> int:
    """The number of tokens of a key."""
    return (len(key) - HEADER) // WIDTH


def tokens_in(shared: int) -> int:
    """How many whole tokens lie in the first ``shared`` bytes of a key."""
    return max(shared - HEADER, 0) // WIDTH
