"""The probability of text after a context, byte by byte, over all tokenisations."""

from __future__ import annotations

import asyncio
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from attrs import evolve, field, frozen

from genlm.core.adapters import UNSET, LoraName
from genlm.core.checks import integer, number, safe_repr
from genlm.core.context import Context
from genlm.core.errors import InvalidInputError, InvalidQueryError
from genlm.core.lm import AsyncLM
from genlm.core.runtime.askers import all_of, running_loop
from genlm.core.tokenization.token import Token
from genlm.core.trie.nodes import Nodes
from genlm.core.trie.trie import TokenCharacterTrie
from genlm.core.types import Adapter

Floats = npt.NDArray[np.float64]


async def next_bytes_logprob(
    lm: AsyncLM,
    token_ids: Iterable[int],
    next_bytes: bytes,
    lora_name: LoraName = UNSET,
    *,
    trie: TokenCharacterTrie | None = None,
    max_contexts: int = 10_000,
) -> float:
    """The log-probability that the text after a context begins with ``next_bytes``.

    A row gives the probability of the next token alone. But the model may write ``b" the"`` as one
    token, as ``b" t"`` and ``b"he"``, or as the first bytes of ``b" these"``. This function sums
    over all these tokenisations exactly: it adds the probabilities of the tokens that begin with
    the bytes, and, for each token that the bytes begin with, its probability times that of the
    remaining bytes after it. The number of tokenisations can double with every byte; use
    :class:`BytePrefix` for long texts.

    Special tokens and tokens without bytes are not text, so they are left out. One row is asked for
    each context; the rows of tokenisations that are equally long in bytes are asked for together.

    Args:
        lm: The model.
        token_ids: The context.
        next_bytes: The bytes.
        lora_name: The adapter.
        trie: ``TokenCharacterTrie(lm.byte_vocab)``, if you have it; otherwise every call builds it.
        max_contexts: The most contexts to ask for. There is one for each way to write a proper
            prefix of the bytes as tokens, which can grow exponentially with the number of bytes.

    Returns:
        The natural logarithm of the probability; ``-inf`` if it is 0.

    Raises:
        InvalidInputError: ``next_bytes`` is not bytes, or needs more than ``max_contexts``
            contexts. No row has been asked for then.
        InvalidOptionError: ``max_contexts`` is not an integer of at least 0.

    Examples:
        >>> import asyncio
        >>> from genlm.core import MockAsyncLM
        >>> with MockAsyncLM() as lm:
        ...     logprob = asyncio.run(next_bytes_logprob(lm, [1, 2], b""))
        >>> logprob
        0.0
    """
    if not isinstance(next_bytes, bytes):
        raise InvalidInputError(
            f"next_bytes must be bytes; got {next_bytes!r:.80}: encode a str first, for instance "
            "with .encode()"
        )
    integer("max_contexts", max_contexts, least=0)
    start = await BytePrefix.after(lm, token_ids, lora_name, trie=trie, min_share=0.0)
    start.check_contexts(next_bytes, max_contexts)
    return (await start.extend(next_bytes)).logprob


@frozen(eq=False)
class BytePrefix:
    """The beginning of the text after a context: its probability, and that of each next byte.

    For texts that grow: :meth:`extend` asks only for the contexts that end within the new bytes, in
    one batch for each byte. So ``n`` more bytes cost about ``n`` batches, however long the text is.
    A prefix is immutable, so several texts may continue the same one.

    Almost all tokenisations of a text have a negligible probability. Of the tokenisations that end
    at a byte, those with at least ``min_share`` times the probability of the likeliest one are
    continued.

    Make one with :meth:`after`. Make a new one if the name of its adapter is bound again.

    Attributes:
        lm: The model.
        text: The bytes so far.
        logprob: The log-probability that the text after the context begins with them.

    Examples:
        >>> import asyncio
        >>> from genlm.core import MockAsyncLM
        >>> async def complete(lm, count):
        ...     prefix = await BytePrefix.after(lm, [72])
        ...     for _ in range(count):
        ...         logprobs = await prefix.next_byte_logprobs()
        ...         prefix = await prefix.extend(bytes([int(logprobs[:256].argmax())]))
        ...     return prefix.text
        >>> with MockAsyncLM() as lm:
        ...     len(asyncio.run(complete(lm, 5)))
        5
    """

    lm: AsyncLM
    _adapter: Adapter | None
    _trie: TokenCharacterTrie
    # Of each item by rank: whether it is neither special nor without bytes.
    _is_text: npt.NDArray[np.bool_]
    _min_share: float
    _first: Reading
    _readings: tuple[Reading, ...]
    _cut: bool = False  # whether a tokenisation has been left out
    text: bytes = b""
    logprob: float = 0.0
    # The readings, once all their rows are known.
    _asked: list[list[Reading]] = field(init=False, factory=list)

    @classmethod
    async def after(
        cls,
        lm: AsyncLM,
        token_ids: Iterable[int],
        lora_name: LoraName = UNSET,
        *,
        trie: TokenCharacterTrie | None = None,
        min_share: float = 1e-3,
    ) -> Self:
        """The empty text after a context.

        Args:
            lm: The model.
            token_ids: The context.
            lora_name: The adapter.
            trie: ``TokenCharacterTrie(lm.byte_vocab)``, if you have it; otherwise it is built.
            min_share: Tokenisations that end at a byte are continued if they have at least this
                share of the probability of the likeliest one that ends there. 0 continues all,
                which is exact, but doubles the time with almost every byte.

        Raises:
            InvalidInputError: The context is not valid, or the trie is over another vocabulary.
            InvalidOptionError: ``min_share`` is not from 0 to 1.
        """
        number("min_share", min_share, "from 0 to 1", lambda share: 0 <= share <= 1)
        if not (hasattr(lm, "byte_vocab") and isinstance(trie, TokenCharacterTrie | None)):
            wanted = "a model, a context and, if you have it, a TokenCharacterTrie"
            raise InvalidInputError(f"give {wanted}; got {safe_repr(lm)}, trie={safe_repr(trie)}")
        # Read now, because the list and the default adapter may change later.
        context, adapter = lm.context(token_ids), lm._adapters.resolve(lora_name)
        vocab = lm.byte_vocab
        if trie is None:
            running_loop()
            trie = await asyncio.to_thread(TokenCharacterTrie, vocab)
        if not _same_tokens(trie.decode, vocab):
            raise InvalidInputError(
                f"the trie of {len(trie.decode)} items is not one of this model's {len(vocab)} "
                "tokens; give TokenCharacterTrie(lm.byte_vocab)"
            )
        first = Reading(context, 0.0, trie.root)
        is_text = ~trie.is_special[trie.positions]
        is_text[: trie.nodes.ending(trie.root)] = False
        return cls(lm, adapter, trie, is_text, min_share, first, (first,))

    async def next_byte_logprobs(self) -> Floats:
        """The distribution of the next byte, given the context and the text so far.

        Returns:
            ``[257]`` float64 log-probabilities of the bytes 0 to 255, and at index 256 of no
            further byte, because a special token follows, such as the end of the sequence, or a
            token without bytes.

        Raises:
            InvalidInputError: The text so far has probability 0, or no continuation of it has a
                positive probability.
        """
        readings = await self._with_rows()
        if not readings and self._cut:
            readings = await (await self._with_all(self.text))._with_rows()
        if not readings:
            raise InvalidInputError(
                f"no byte can follow the text {self.text!r:.80}: the text or every continuation of "
                "it has probability 0 after this context; extend by bytes that have a positive "
                "probability"
            )
        heaviest = max(reading.logprob for reading in readings)
        with np.errstate(divide="ignore", under="ignore"):
            masses = sum(
                math.exp(reading.logprob - heaviest) * reading.next_bytes(self._trie.nodes)
                for reading in readings
            )
            logprobs: Floats = np.log(masses / np.sum(masses))
        return logprobs

    async def extend(self, more: bytes) -> BytePrefix:
        """The text so far followed by more bytes. This prefix does not change.

        Args:
            more: The bytes.

        Raises:
            InvalidInputError: ``more`` is not bytes.
        """
        if not isinstance(more, bytes):
            raise InvalidInputError(f"more must be bytes, such as bytes([65]); got {more!r:.80}")
        longer = self
        for byte in more:
            longer = longer._with_byte(byte, await longer._with_rows())
        if longer.logprob == -math.inf and longer._cut:
            return evolve(await self._with_all(longer.text), min_share=self._min_share)
        return longer

    async def _with_all(self, text: bytes) -> BytePrefix:
        """The text with all its tokenisations, if perhaps only the omitted ones can be
        continued."""
        start = evolve(
            self, min_share=0.0, readings=(self._first,), cut=False, text=b"", logprob=0.0
        )
        start.check_contexts(text, 10_000)
        return await start.extend(text)

    def check_contexts(self, more: bytes, limit: int) -> None:
        """Check the number of contexts that all tokenisations of more bytes need. Asks for no row.

        Args:
            more: The bytes.
            limit: The most contexts.

        Raises:
            InvalidInputError: There are more than ``limit``.
        """
        trie, nodes = self._trie, self._trie.nodes
        ways = [1] + [0] * len(more)  # the number of ways to write the bytes up to each place
        contexts = 0
        for begin in range(len(more)):
            contexts += ways[begin]
            if contexts > limit:
                raise InvalidInputError(
                    f"the tokenisations of the {len(more)} bytes {more!r:.80} need at least "
                    f"{contexts} contexts, but at most {limit} are asked for; give fewer bytes or "
                    "a larger max_contexts, or follow the likely tokenisations with BytePrefix"
                )
            node = trie.find(more[begin : begin + 1]) if ways[begin] else None
            for end in range(begin + 1, len(more)):
                if node is None:
                    break
                rank = nodes.begin[node]
                tokens = np.count_nonzero(self._is_text[rank : rank + nodes.ending(node)])
                ways[end] += ways[begin] * int(tokens)
                node = nodes.child(node, more[end])

    async def _with_rows(self) -> list[Reading]:
        """The readings, after requesting the rows of those that begin a token here."""
        if not self._asked:
            inside = [reading for reading in self._readings if reading.masses is not None]
            begun = [reading for reading in self._readings if reading.masses is None]
            name = self._adapter.name if self._adapter else None
            try:
                rows = await all_of(
                    self.lm.next_token_logprobs(each.context, name) for each in begun
                )
            except InvalidQueryError as error:
                if not self.text:
                    raise
                raise InvalidQueryError(
                    f"{error}; the bytes after the context need room, too"
                ) from None
            if begun and (outdated := self.lm._adapters.outdated(self._adapter)) is not None:
                raise outdated  # the earlier rows belong to another adapter
            for reading, row in zip(begun, rows, strict=True):
                masses = row.detach().cpu().double().exp().numpy()[self._trie.positions]
                if masses.any():  # otherwise nothing can come next, as if a wrapper bans all tokens
                    no_byte = float(masses[~self._is_text].sum())
                    masses[~self._is_text] = 0.0
                    inside.append(evolve(reading, masses=masses, no_byte=no_byte))
            self._asked.append(inside)
        return self._asked[0]

    def _with_byte(self, byte: int, readings: Iterable[Reading]) -> BytePrefix:
        """The text with one more byte, with its likely tokenisations."""
        nodes = self._trie.nodes
        grown = [longer for reading in readings if (longer := reading.into(nodes, byte))]
        with np.errstate(under="ignore"):
            logprob = float(np.logaddexp.reduce([r.mass for r in grown], initial=-math.inf))
        inside = [going for reading in grown if (going := reading.going_on(nodes))]
        ended = [end for reading in grown for end in reading.endings(self._trie)]
        # The share is relative to the tokenisations that end here, so that a byte which is unlikely
        # inside all tokens can be followed too.
        least = max((each.mass for each in ended or inside), default=logprob)
        least += math.log(self._min_share) if self._min_share else -math.inf
        likely = tuple(reading for reading in (*inside, *ended) if reading.mass >= least)
        return evolve(
            self,
            readings=likely,
            cut=self._cut or len(likely) < len(inside) + len(ended),
            text=self.text + bytes([byte]),
            logprob=logprob,
        )


def _same_tokens(items: Sequence[Any], vocab: Sequence[Token]) -> bool:
    """Whether the items of a trie are the tokens of a vocabulary."""
    if len(items) != len(vocab):
        return False
    return all(map(operator.is_, items, vocab)) or all(
        isinstance(item, Token)
        and (item.token_id, bytes(item), item.is_special)
        == (token.token_id, bytes(token), token.is_special)
        for item, token in zip(items, vocab, strict=True)
    )


@frozen(eq=False)
class Reading:
    """A tokenisation whose last token has begun, or is about to.

    Attributes:
        context: The tokens before the last.
        logprob: Their log-probability.
        node: The node of the trie for the bytes of the last token so far.
        masses: The probabilities of the items below the node, by rank. ``None`` if the last token
            is about to begin, and its row was not requested yet.
        no_byte: The probability that the last token is not text; 0 once the token has begun.
    """

    context: Context
    logprob: float
    node: int
    masses: Any = None
    no_byte: float = 0.0

    @property
    def mass(self) -> float:
        """The log-probability of this reading, summed over all tokens that the last one may
        become."""
        return self.logprob + (0.0 if self.masses is None else math.log(self.masses.sum()))

    def into(self, nodes: Nodes, byte: int) -> Reading | None:
        """The reading with one more byte in its last token; ``None`` if no such token has any
        probability."""
        child = nodes.child(self.node, byte)
        if child is None:
            return None
        first = nodes.begin[self.node]
        below = slice(nodes.begin[child] - first, nodes.end[child] - first)
        masses = self.masses[below].copy()
        return Reading(self.context, self.logprob, child, masses) if masses.any() else None

    def endings(self, trie: TokenCharacterTrie) -> Iterator[Reading]:
        """The readings in which the last token is complete, and the next is about to begin."""
        masses = self.masses[: trie.nodes.ending(self.node)]
        for token_id, mass in zip(trie.positions_under(self.node).tolist(), masses, strict=False):
            if mass > 0:
                longer = self.context.extend(token_id)
                yield Reading(longer, self.logprob + math.log(mass), trie.root)

    def going_on(self, nodes: Nodes) -> Reading | None:
        """The reading without the tokens that are complete here; ``None`` if the others have no
        probability."""
        masses = self.masses.copy()
        masses[: nodes.ending(self.node)] = 0.0
        return evolve(self, masses=masses) if masses.any() else None

    def next_bytes(self, nodes: Nodes) -> Floats:
        """``[257]`` The probability of each next byte in the last token, and of no further byte."""
        found = np.zeros(257)
        found[256] = self.no_byte
        below = nodes.children(self.node)
        starts = nodes.begin[below] - nodes.begin[self.node]
        if len(starts):
            found[nodes.symbol[below]] = np.add.reduceat(self.masses, starts)
        return found
