"""A sequence of tokens to run through a model, and the wanted rows."""

from __future__ import annotations

from attrs import define, field, setters

from genlm.core.context import Context, as_context
from genlm.core.types import Adapter
from genlm.kit.prefixes import bytes_of, key_of, prefix_of


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
    """

    tokens: Context = field(converter=as_context)
    adapter: Adapter | None = None
    keep: int = 1
    version: int = field(init=False)
    length: int = field(init=False)
    latest_start: int = field(init=False)
    _key: bytes | None = field(init=False, default=None, repr=False)

    def __attrs_post_init__(self) -> None:
        self.version = 0 if self.adapter is None else self.adapter.version
        self.length = len(self.tokens)
        self.latest_start = self.length - self.keep

    @property
    def key(self) -> bytes:
        """See :func:`~genlm.kit.prefixes.key_of`; made when it is first asked for."""
        if self._key is None:
            self._key = key_of(self.version, self.tokens.since(0))
        return self._key

    def begins_like(self, key: bytes, shared: int) -> None:
        """Note that the first ``shared`` tokens are those of a key: so the own one is made of it,
        and of what follows."""
        if self._key is None:
            self._key = prefix_of(key, shared) + bytes_of(self.tokens.since(shared))
