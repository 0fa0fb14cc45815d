"""A sequence of tokens to run through a model, and the wanted rows."""

from __future__ import annotations

from typing import Any

from attrs import define, field, setters

from genlm.core.context import Context, as_context
from genlm.core.types import Adapter
from genlm.kit.prefixes import key_of


@define(eq=False, on_setattr=setters.NO_OP)
class TokenSequence:
    """Tokens whose last ``keep`` positions are wanted as rows.

    Attributes:
        tokens: The whole context; at least one token.
        adapter: The LoRA adapter; ``None`` is the base model.
        keep: How many of the last positions need logits.
        version: The adapter's version; 0 is the base model.
        length: The number of tokens.
        latest_start: The first position that must be computed even if its key/value state is known.
        known_key: The key, once it has been asked for; else empty.
        looked_up: What a planner has found for it, after the state of the tree in which it did.
    """

    tokens: Context = field(converter=as_context)
    adapter: Adapter | None = None
    keep: int = 1
    version: int = field(init=False)
    length: int = field(init=False)
    latest_start: int = field(init=False)
    known_key: bytes = field(init=False, default=b"", repr=False)
    looked_up: tuple[Any, Any] = field(init=False, default=(None, None), repr=False)

    def __attrs_post_init__(self) -> None:
        self.version = 0 if self.adapter is None else self.adapter.version
        self.length = len(self.tokens)
        self.latest_start = self.length - self.keep

    @property
    def key(self) -> bytes:
        """See :func:`~genlm.kit.prefixes.key_of`; made when it is first asked for."""
        if not self.known_key:
            self.known_key = key_of(self.version, self.tokens.since(0))
        return self.known_key
