"""A sequence of tokens to run through the model, and the rows wanted of it."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import field, frozen

from genlm.core.engines.prefixes import key_of
from genlm.core.types import Adapter


@frozen(eq=False)
class TokenSequence:
    """Tokens whose last ``keep`` positions are wanted as rows.

    Attributes:
        tokens: The whole context; at least one token.
        adapter: The LoRA adapter; ``None`` is the base model.
        keep: For how many of the last positions logits are wanted.
        key: See :func:`~genlm.core.engines.prefixes.key_of`.
    """

    tokens: Sequence[int]
    adapter: Adapter | None = None
    keep: int = 1
    key: bytes = field(init=False, repr=False)

    @key.default
    def _make_key(self) -> bytes:
        return key_of(_version(self.adapter), self.tokens)

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
    return key_of(_version(adapter), ())


def _version(adapter: Adapter | None) -> int:
    return 0 if adapter is None else adapter.version
