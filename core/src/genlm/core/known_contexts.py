"""Known contexts: lists of token ids that continue a list of an earlier request."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

from genlm.core.context import BLOCK_TOKENS, Context, TokenIds, are_ints

#: A known context is found by its length and this many of its last token ids.
ENDING_TOKENS = 16


class KnownContexts:
    """The long contexts that were requested as lists, as long as the library keeps them.

    Programs often request the list of an earlier request again, or that list and one token more.
    Such a list is compared with the known one, which is a quarter of the work of checking and
    hashing it. An extension is found by its parent, as one made by :meth:`Context.extend` is.
    """

    def __init__(self) -> None:
        # A weak dictionary can be used from several threads.
        self._by_ending: WeakValueDictionary[tuple[int, TokenIds], Context] = WeakValueDictionary()

    def find(self, token_ids: Any, vocab_size: int) -> Context | None:
        """The context of a list that is known, or has one token more than a known one.

        Args:
            token_ids: Whatever was given in place of a context.
            vocab_size: The number of ids that the model has.
        """
        if type(token_ids) not in (list, tuple) or len(token_ids) <= BLOCK_TOKENS:
            return None  # checking the ids costs no more
        ids = tuple(token_ids)
        if not are_ints(ids[-ENDING_TOKENS:]) or not 0 <= ids[-1] < vocab_size:
            return None
        if (same := self._look_up(ids)) is not None:
            return same
        if (parent := self._look_up(ids[:-1])) is None:
            return None
        longer = parent.followed_by(ids[-1:])
        self.add(longer)
        return longer

    def add(self, context: Context) -> None:
        """Remember a context, if it is long."""
        length = context.length
        if length > BLOCK_TOKENS:
            self._by_ending[length, context.since(length - ENDING_TOKENS)] = context

    def _look_up(self, ids: TokenIds) -> Context | None:
        try:
            context = self._by_ending.get((len(ids), ids[-ENDING_TOKENS:]))
        except TypeError:  # a value that is not an id may be unhashable
            return None
        # The types are checked because 1.0 and True equal an id, and an array has no truth value.
        return context if context and are_ints(ids) and context.holds(ids) else None
