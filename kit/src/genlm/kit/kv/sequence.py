"""A sequence of tokens to run through a model, and the wanted rows."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import field, frozen

from genlm.core.types import Adapter
from genlm.kit.prefixes import key_of


@frozen(eq=False)
class TokenSequence:
    """Tokens whose last ``keep`` positions are wanted as rows.

    Attributes:
        tokens: The whole context; at least one token.
        adapter: The LoRA adapter; ``None`` is the base model.
        keep: How many of the last positions need logits.
        key: See :func:`~genlm.kit.prefixes.key_of`.
    """

    tokens: Sequence[int]
    adapter: Adapter | None = None
    keep: int = 1
    key: bytes = field(init=False, repr=False)

    @key.default
    def _make_key(self) -> bytes:
        return key_of(self.version, self.tokens)

    @property
    def version(self) -> int:
        """The adapter's version; 0 is the base model."""
        return 0 if self.adapter is None else self.adapter.version

    @property
    def length(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    @property
    def latest_start(self) -> int:
        """The first position that must be computed even if its key/value state is known."""
        return len(self.tokens) - self.keep
