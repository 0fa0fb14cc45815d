"""Contexts: token ids that are checked, hashed, and extended at the cost of the new tokens."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, overload

from genlm.core.checks import describe_error, safe_repr, unawaited
from genlm.core.errors import InvalidQueryError

TokenIds = tuple[int, ...]

#: The most tokens of a context if the model has no limit, and the most contexts of a batch. They
#: end iterables that never end.
MAX_TOKENS, MAX_CONTEXTS = 1 << 24, 1 << 20

#: Token ids are hashed in blocks of this many, which contexts that extend one another share.
BLOCK_TOKENS = 128

#: The explanation in an error if an id is itself a list.
NESTED = ", a list in place of an id; methods that begin with batch_ take several contexts"


class Block(NamedTuple):
    """The last full block of a context's ids, and the blocks before it.

    Attributes:
        previous: The block before; ``None`` for the first.
        token_ids: The ids of this block, ``BLOCK_TOKENS`` of them.
        end: How many ids there are up to the end of this block.
        value: The hash of all of those: this block's ids with the hash of the blocks before it.
    """

    previous: Block | None
    token_ids: TokenIds
    end: int
    value: int


def blocks_of(last: Block | None, token_ids: TokenIds) -> tuple[Block | None, TokenIds]:
    """The blocks that ``token_ids`` fill after ``last``, and the ids left over."""
    full = len(token_ids) - len(token_ids) % BLOCK_TOKENS
    end, value = (0, 0) if last is None else (last.end, last.value)
    for start in range(0, full, BLOCK_TOKENS):
        ids = token_ids[start : start + BLOCK_TOKENS]
        end, value = end + BLOCK_TOKENS, hash((value, ids))
        last = Block(last, ids, end, value)
    return last, token_ids[full:]


def same_blocks(one: Block | None, other: Block | None) -> bool:
    """Whether two chains of blocks hold the same ids. Blocks that both share are not compared."""
    while one is not other:
        if one is None or other is None or one.token_ids != other.token_ids:
            return False
        one, other = one.previous, other.previous
    return True


class Context(Sequence[int]):
    """Immutable, checked token ids, which every method that takes a context accepts. Make one with
    :meth:`AsyncLM.context`.

    A list of token ids is checked and hashed as a whole for every request. A context is checked and
    hashed once. Its extension shares its ids, and checks and hashes only the new tokens, so
    extending costs the same at any length. An extension records only the length and hash of the
    context that it extends, so it does not keep that context in memory.

    Args:
        tail: The ids after the blocks; without blocks, all ids.
        vocab_size: See the attribute.
        blocks: The leading ids, as blocks that are shared with another context.

    Attributes:
        length: How many ids there are.
        vocab_size: All ids are in ``range(vocab_size)``. 0 means that it is not known: the context
            then cannot be extended, and each request checks it.
        hash_value: The hash of the ids.
        grown: The number of tokens by which it extends another context; 0 if none is known.
        parent_hash: The hash of the context that it extends.
    """

    __slots__ = (
        "__weakref__", "_blocks", "_ids", "_tail", "grown", "hash_value", "length", "parent_hash",
        "vocab_size",
    )  # fmt: skip

    _blocks: Block | None  # the full blocks of the ids
    _tail: TokenIds  # the ids after the full blocks, fewer than BLOCK_TOKENS
    _ids: TokenIds | None  # all ids, once they have been requested
    length: int
    vocab_size: int
    hash_value: int
    grown: int
    parent_hash: int

    def __init__(self, tail: TokenIds, vocab_size: int = 0, blocks: Block | None = None) -> None:
        if len(tail) >= BLOCK_TOKENS:
            blocks, tail = blocks_of(blocks, tail)
        self._blocks, self._tail, self.vocab_size = blocks, tail, vocab_size
        self._ids = tail if blocks is None else None
        end, value = (0, 0) if blocks is None else (blocks.end, blocks.value)
        self.length, self.hash_value = end + len(tail), hash((value, tail))
        self.grown = self.parent_hash = 0

    def extend(self, *token_ids: int) -> Context:
        """This context followed by at least one token.

        Args:
            *token_ids: The tokens.

        Raises:
            InvalidQueryError: there is no token, or one is not a token id of the model.
        """
        return self.followed_by(token_ids_of("extension", token_ids, self.vocab_size))

    def followed_by(self, token_ids: TokenIds) -> Context:
        """This context followed by tokens that the caller has checked."""
        longer = Context(self._tail + token_ids, self.vocab_size, self._blocks)
        longer.grown, longer.parent_hash = len(token_ids), self.hash_value
        return longer

    def first(self, length: int) -> Context:
        """The context of the first ``length`` tokens, which shares their ids.

        Args:
            length: Counts as in a slice: a negative number leaves out the last tokens.
        """
        blocks, tail = self._cut(len(range(len(self))[:length]))
        return Context(tail, self.vocab_size, blocks)

    def hash_without_last(self) -> int:
        """The hash of the context without its last token. It finds the context that this one may
        extend."""
        if not self._tail:
            return self.first(-1).hash_value
        value = 0 if self._blocks is None else self._blocks.value
        return hash((value, self._tail[:-1]))

    def starts_with(self, other: Context) -> bool:
        """Whether another context is a prefix of this one. If this context was made by extending
        the other, the cost does not depend on the length."""
        if self._blocks is other._blocks:  # as when one extends the other by a few tokens
            return self._tail[: len(other._tail)] == other._tail
        blocks, tail = self._cut(len(other))
        return tail == other._tail and same_blocks(blocks, other._blocks)

    def holds(self, token_ids: TokenIds) -> bool:
        """Whether the context has exactly these ids."""
        block, tail = self._blocks, self._tail
        if len(token_ids) != len(self) or token_ids[len(self) - len(tail) :] != tail:
            return False
        while block is not None:
            if token_ids[block.end - BLOCK_TOKENS : block.end] != block.token_ids:
                return False
            block = block.previous
        return True

    def since(self, start: int) -> TokenIds:
        """The ids from position ``start`` on. The cost grows with the number of ids returned."""
        if self._ids is not None:
            return self._ids[start:]
        block, parts = self._blocks, [self._tail]
        while block is not None and block.end > start:
            parts.append(block.token_ids)
            block = block.previous
        begin = 0 if block is None else block.end
        if len(parts) == 1:  # the tokens by which a context has grown
            return self._tail[start - begin :]
        return tuple(itertools.chain(*reversed(parts)))[start - begin :]

    def parts(self) -> tuple[TokenIds, ...]:
        """The ids in parts. A context and its extensions share all parts but the last, so a pickle
        of several contexts stores the shared parts once."""
        if self._blocks is None:
            return (self._tail,)
        block: Block | None = self._blocks
        parts = [self._tail]
        while block is not None:
            parts.append(block.token_ids)
            block = block.previous
        return tuple(reversed(parts))

    def _cut(self, length: int) -> tuple[Block | None, TokenIds]:
        """The full blocks of the first ``length`` ids, and the ids after the last full block."""
        block, tail = self._blocks, self._tail
        while block is not None and block.end > length:
            tail = block.token_ids
            block = block.previous
        return block, tail[: length - (0 if block is None else block.end)]

    @property
    def token_ids(self) -> TokenIds:
        """The ids as a tuple, made when it is first needed, and then kept."""
        if self._ids is None:
            self._ids = self.since(0)
        return self._ids

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> TokenIds: ...

    def __getitem__(self, index: int | slice) -> int | TokenIds:
        if isinstance(index, slice) and index.step is None and index.stop in (None, len(self)):
            return self.since(range(len(self))[index].start)
        return self.token_ids[index]

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(self.token_ids)

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, Context):
            return NotImplemented
        if self.hash_value != other.hash_value:
            return False
        if self._ids is not None and other._ids is not None:
            return self._ids == other._ids
        return self._tail == other._tail and same_blocks(self._blocks, other._blocks)

    def __hash__(self) -> int:
        return self.hash_value

    def __reduce__(self) -> tuple[type[Context], tuple[TokenIds, int]]:
        """Pickle the ids, because a long chain of blocks would be nested too deeply."""
        return Context, (self.token_ids, self.vocab_size)

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self[:8])) + (", ..." if len(self) > 8 else "")
        return f"Context([{shown}], {len(self)} tokens)"


def as_context(token_ids: Sequence[int]) -> Context:
    """Token ids that have been checked, as a context."""
    # The type is compared, because isinstance() with an abstract class is slow if it is false.
    return token_ids if type(token_ids) is Context else Context(tuple(token_ids))


def token_ids_of(
    what: str, token_ids: Any, vocab_size: int, most: int | None = None, least: int = 1
) -> TokenIds:
    """The token ids as a tuple of plain ints in ``range(vocab_size)``.

    Args:
        what: What they are, for messages: ``"context"``.
        token_ids: Any iterable of integers; a NumPy array or tensor of integers too.
        vocab_size: The number of ids that the model has.
        most: The most ids that can be of use. An iterator is read no further than that.
        least: How many there must be: 0 or 1.

    Raises:
        InvalidQueryError: there are too few or too many, or one is not an integer or out of range.
    """
    ids = _as_ints(what, token_ids, MAX_TOKENS if most is None else min(most, MAX_TOKENS))
    if len(ids) < least:
        remedy = " (a beginning-of-sequence token, say)" if what == "context" else ""
        raise InvalidQueryError(f"the {what} is empty; give at least one token id{remedy}")
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        position, bad = next((i, t) for i, t in enumerate(ids) if not 0 <= t < vocab_size)
        raise InvalidQueryError(
            f"token id {safe_repr(bad)} at position {position} of the {what} is out of range; "
            f"the model has ids 0 to {vocab_size - 1}"
        )
    return ids


def contexts_of(contexts: Any) -> list[Any]:
    """The contexts of a batch. They themselves are not checked.

    Raises:
        InvalidQueryError: they are not a list of contexts, or too many.
    """
    if isinstance(contexts, str | bytes | bytearray | Mapping):
        raise InvalidQueryError(
            f"a list of contexts must be given; got a {type(contexts).__name__}"
        )
    try:
        given = list(itertools.islice(contexts, MAX_CONTEXTS + 1))
    except TypeError as error:
        raise InvalidQueryError(
            f"a list of contexts must be given; got {safe_repr(contexts)}"
        ) from error
    if len(given) > MAX_CONTEXTS:
        raise InvalidQueryError(f"a batch may have at most {MAX_CONTEXTS} contexts; ask for fewer")
    if given and (isinstance(given[0], int) or getattr(given[0], "ndim", 1) == 0):
        raise InvalidQueryError(
            f"a list of contexts must be given, each a list of token ids; its first element is "
            f"{safe_repr(given[0])}; for one context give [context], or call the method for one"
        )
    return given


def are_ints(ids: Sequence[Any]) -> bool:
    """Whether all of these are plain ints."""
    return [*map(type, ids)].count(int) == len(ids)


def _as_ints(what: str, token_ids: Any, most: int) -> TokenIds:
    if type(token_ids) in (list, tuple) and len(token_ids) <= most:  # the usual case
        ids = tuple(token_ids)
    else:
        ids = _read(what, token_ids, most)
    if are_ints(ids):
        return ids
    return tuple(_as_int(what, token_id, position) for position, token_id in enumerate(ids))


def _read(what: str, token_ids: Any, most: int) -> tuple[Any, ...]:
    """The items of any iterable, up to the most that are accepted."""
    _refuse_unreadable(what, token_ids)
    sized = hasattr(token_ids, "__len__")
    if sized and len(token_ids) > most:
        raise InvalidQueryError(
            f"the {what} of {len(token_ids)} tokens exceeds the {most} tokens that the model "
            "takes; shorten it"
        )
    if hasattr(token_ids, "tolist"):
        token_ids = _listed(what, token_ids)
    try:
        ids = tuple(token_ids if sized else itertools.islice(token_ids, most + 1))
    except TypeError as error:  # chained, because it may come from the caller's own generator
        raise InvalidQueryError(
            f"the {what} must be a sequence of token ids; got {safe_repr(token_ids)}"
            f"{unawaited(token_ids)}"
        ) from error
    if len(ids) > most:
        raise InvalidQueryError(
            f"the {what} has more than the {most} tokens that the model takes; shorten it"
        )
    return ids


def _listed(what: str, token_ids: Any) -> Any:
    """An array as a list: one call instead of one for each id."""
    try:
        return token_ids.tolist()
    except Exception as error:  # a sparse tensor, or one without data
        raise InvalidQueryError(
            f"the {what} cannot be read as a list; give integers, or an array that has them: "
            f"{describe_error(error)}"
        ) from error


def _refuse_unreadable(what: str, token_ids: Any) -> None:
    """Reject a value that has no order, or that cannot be a list of token ids."""
    if isinstance(token_ids, str | bytes | bytearray):
        raise InvalidQueryError(
            f"the {what} is text ({token_ids!r:.40}); give token ids, as lm.tokenizer.encode(text) "
            "does"
        )
    dimensions = getattr(token_ids, "ndim", 1)
    if dimensions != 1:
        ways = {0: "; give [x] for one id", 2: "; give x[0] for its first row"}
        raise InvalidQueryError(
            f"the {what} must be 1-dimensional; it is {dimensions}-dimensional"
            f"{ways.get(dimensions, '')}"
        )
    if isinstance(token_ids, Set | Mapping):
        remedy = (
            "its 'input_ids'"
            if isinstance(token_ids, Mapping) and "input_ids" in token_ids
            else "a sequence of token ids, which has an order"
        )
        raise InvalidQueryError(f"the {what} is a {type(token_ids).__name__}; give {remedy}")


def _as_int(what: str, token_id: Any, position: int) -> int:
    try:
        if isinstance(token_id, bool):
            raise TypeError
        return operator.index(token_id)
    except TypeError:
        nested = ", a list: write extend(*ids)" if what == "extension" else NESTED
        raise InvalidQueryError(
            f"token ids must be integers; position {position} of the {what} is "
            f"{safe_repr(token_id)}{nested if isinstance(token_id, list) else ''}"
        ) from None
