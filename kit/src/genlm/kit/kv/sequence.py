"""A sequence of tokens to run through a model, and the wanted rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from genlm.core.context import Context, as_context
from genlm.core.types import Adapter
from genlm.kit.prefixes import bytes_of, key_of


class TokenSequence:
    """Tokens whose last ``keep`` positions are wanted as rows.

    Attributes:
        tokens: The whole context; at least one token.
        adapter: The LoRA adapter; ``None`` is the base model.
        keep: How many of the last positions need logits.
        version: The adapter's version; 0 is the base model.
        length: The number of tokens.
        latest_start: The first position that must be computed even if its keys and values are
            known, because its row is wanted.
        known_key: The key, if it has been asked for; otherwise empty.
        looked_up: The last lookup: the version of the tree, the segment that was found, and how
            many leading tokens it shares with the sequence.
    """

    __slots__ = (
        "adapter", "keep", "known_key", "latest_start", "length", "looked_up", "tokens", "version"
    )  # fmt: skip

    def __init__(
        self, tokens: Sequence[int], adapter: Adapter | None = None, keep: int = 1
    ) -> None:
        self.tokens: Context = as_context(tokens)
        self.adapter, self.keep = adapter, keep
        self.version = 0 if adapter is None else adapter.version
        self.length = len(self.tokens)
        self.latest_start = self.length - keep
        self.known_key = b""
        self.looked_up: tuple[Any, Any, int] = None, None, 0

    @property
    def key(self) -> bytes:
        """The sequence as bytes (:func:`~genlm.kit.prefixes.key_of`), made when first asked for."""
        if not self.known_key:
            self.known_key = key_of(self.version, self.tokens.since(0))
        return self.known_key

    def continue_key(self, key: bytes, length: int) -> None:
        """Make the key from the key of the first ``length`` tokens."""
        self.known_key = key + bytes_of(self.tokens.since(length))
