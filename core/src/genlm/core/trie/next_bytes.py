"""The exact probability of the next bytes: over all tokenisations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from attrs import frozen

from genlm.core.adapters import UNSET, LoraName
from genlm.core.context import Context
from genlm.core.errors import InvalidInputError
from genlm.core.lm import AsyncLM
from genlm.core.runtime.continuations import all_of
from genlm.core.tokenization.token import Token
from genlm.core.trie.trie import TokenCharacterTrie


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

    The mass that a row has under a prefix is about the next token alone. But the model may write
    ``b" the"`` as one token, or as ``b" t"`` and ``b"he"``, or as the first bytes of ``b" these"``.
    This is the sum over all of them: over the tokens that begin with the bytes, and, for each token
    that the bytes begin with, its probability times that of the remaining bytes after it.

    Special tokens are not text, and tokens without bytes add none: neither counts. The contexts of
    all tokenisations are asked concurrently, one row each.

    Args:
        lm: The model.
        token_ids: The context.
        next_bytes: The bytes.
        lora_name: The adapter.
        trie: ``TokenCharacterTrie(lm.byte_vocab)``, if you have it; otherwise every call builds it.
        max_contexts: The most contexts to ask. Their number is that of the ways to write a proper
            prefix of the bytes as tokens, which can grow exponentially with its length.

    Returns:
        The natural logarithm of the probability; ``-inf`` if it is 0.

    Raises:
        InvalidInputError: ``next_bytes`` is not bytes, or it takes more than ``max_contexts``
            contexts.

    Examples:
        >>> import asyncio
        >>> from genlm.core import MockAsyncLM
        >>> with MockAsyncLM() as lm:
        ...     logprob = asyncio.run(next_bytes_logprob(lm, [1, 2], b""))
        >>> logprob
        0.0
    """
    import torch

    if not isinstance(next_bytes, bytes):
        raise InvalidInputError(
            f"next_bytes must be bytes; got {next_bytes!r:.80}: encode a str first, for instance "
            "with .encode()"
        )
    vocab = lm.byte_vocab
    trie = TokenCharacterTrie(vocab) if trie is None else trie
    if len(trie.decode) != len(vocab):
        raise InvalidInputError(
            f"the trie has {len(trie.decode)} items, but the model has {len(vocab)} tokens; give "
            "TokenCharacterTrie(lm.byte_vocab)"
        )
    candidates = [_candidates(trie, vocab, next_bytes[begin:]) for begin in range(len(next_bytes))]
    _check_contexts(candidates, vocab, next_bytes, max_contexts)

    async def logprob(context: Context, begin: int) -> float:
        """Of the bytes from ``begin`` on, after ``context``."""
        if begin == len(next_bytes):
            return 0.0
        row = (await lm.next_token_logprobs(context, lora_name)).double().cpu()
        shorter = [t for t in candidates[begin].shorter if row[t] > -torch.inf]
        onward = await all_of(logprob(context.extend(t), begin + len(vocab[t])) for t in shorter)
        paths = row[shorter] + torch.tensor(onward, dtype=torch.float64)
        return float(torch.cat([row[candidates[begin].longer], paths]).logsumexp(0))

    return await logprob(lm.context(token_ids), 0)


@frozen
class Candidates:
    """The tokens that write the rest of the bytes, or its beginning.

    Attributes:
        longer: The ids of the tokens that begin with the whole rest.
        shorter: The ids of the tokens that the rest begins with, and is longer than.
    """

    longer: list[int]
    shorter: list[int]


def _candidates(trie: TokenCharacterTrie, vocab: Sequence[Token], rest: bytes) -> Candidates:
    def beginning_with(prefix: bytes) -> list[int]:
        node = trie.find(prefix)
        return [] if node is None else trie.positions_under(node).tolist()

    def text(token_ids: Iterable[int]) -> list[int]:
        return [token_id for token_id in token_ids if not vocab[token_id].is_special]

    shorter: list[int] = []
    for end in range(1, len(rest)):
        # Those that are equal to the prefix come first.
        shorter += takewhile(lambda t: len(vocab[t]) == end, beginning_with(rest[:end]))  # noqa: B023
    return Candidates(text(beginning_with(rest)), text(shorter))


def _check_contexts(
    candidates: Sequence[Candidates], vocab: Sequence[Token], next_bytes: bytes, limit: int
) -> None:
    """Count the contexts of all tokenisations before any is asked.

    Raises:
        InvalidInputError: There are more than ``limit``.
    """
    ways = [1] + [0] * len(candidates)  # to write the bytes up to each place
    for begin, here in enumerate(candidates):
        for token_id in here.shorter:
            ways[begin + len(vocab[token_id])] += ways[begin]
    contexts = sum(ways[:-1])
    if contexts > limit:
        raise InvalidInputError(
            f"the {len(next_bytes)} bytes {next_bytes!r:.80} have tokenisations of {contexts} "
            f"contexts, but at most {limit} are asked; give fewer bytes or a larger max_contexts"
        )
