"""The model as a function of caches and tokens: forward passes, in chunks, over a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import ceil
from typing import Any

import numpy as np
from mlx_lm.models.cache import make_prompt_cache

import mlx.core as mx
from genlm.core import Query
from genlm.mlx.adapters import Adapters, Versions

Key = tuple[int, ...]  # the version of an adapter, then tokens
Cache = list[Any]  # one mlx-lm cache per layer

#: The most bytes of logits that are computed together for a score, and the number of rows before
#: the size of the vocabulary is known.
LOGITS_BYTES = 128 << 20
FIRST_READ_ROWS = 64

#: The most tokens of a forward pass that gives rows, since logits are computed for all its tokens.
#: A forward pass may have more if each context has at most the second number.
MAX_READ_TOKENS, MIN_READ_TOKENS = 128, 5


def version_of(query: Query) -> int:
    """The version of a query's adapter; 0 is the base model."""
    return 0 if query.adapter is None else query.adapter.version


def key_of(query: Query) -> Key:
    """The key of a query's sequence."""
    return (version_of(query), *query.token_ids)


class Runner:
    """Runs the model over the sequences of a cache.

    A sequence is named by its key: the version of its adapter (0 is the base model), then its
    tokens.

    Args:
        model: The mlx-lm model.
        adapters: The LoRA weights, applied by sequence.
        step_size: The most tokens in one forward pass, over all sequences.
    """

    def __init__(self, model: Any, adapters: Adapters, step_size: int) -> None:
        self.model = model
        self.adapters = adapters
        self.step_size = step_size

    def empty_cache(self) -> Cache:
        """The model's cache of one sequence, without tokens."""
        return make_prompt_cache(self.model)  # type: ignore[no-any-return]

    def feed(self, cache: Cache, versions: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        """Append ``tokens[i]``, one or more, to sequence ``i``. During the call, sequences of
        unequal length are padded on the right."""
        for _ in self._chunks_of(cache, versions, tokens, self.step_size // len(tokens)):
            mx.eval([layer.state for layer in cache])

    def read(
        self,
        cache: Cache,
        versions: Sequence[int],
        tokens: Sequence[Sequence[int]],
        wanted: Sequence[tuple[int, int]],
    ) -> mx.array:
        """Append tokens as :meth:`feed` does, and return the logits after the ``wanted`` tokens,
        ``[len(wanted), vocab_size]`` float32. Each wanted token is given by its sequence and its
        index in ``tokens``."""
        most = min(
            max(MAX_READ_TOKENS // len(tokens), MIN_READ_TOKENS), self.step_size // len(tokens)
        )
        order: list[int] = []
        parts: list[mx.array] = []
        for start, logits in self._chunks_of(cache, versions, tokens, most):
            stop = start + logits.shape[1]
            some = [n for n, (_, at) in enumerate(wanted) if start <= at < stop]
            if some:
                places = [(number, at - start) for number, at in map(wanted.__getitem__, some)]
                numbers, columns = mx.array(places, mx.int32).T
                parts.append(logits[numbers, columns].astype(mx.float32))
            order += some
            mx.eval(parts[-1:], [layer.state for layer in cache])
        return in_order([(order, mx.concatenate(parts))])

    def _chunks_of(
        self, cache: Cache, versions: Sequence[int], tokens: Sequence[Sequence[int]], most: int
    ) -> Iterator[tuple[int, mx.array]]:
        """Append tokens, about ``most`` columns at a time. Yields the first column of each chunk,
        and the logits of all its tokens, which are computed only if they are read."""
        lengths = [len(some) for some in tokens]
        width = max(lengths)
        block = mx.array([[*some, *[0] * (width - len(some))] for some in tokens], mx.int32)
        self.adapters.select(versions)
        for start, stop in _chunks(width, most):
            # Each chunk has lengths of its own, because mlx-lm takes the lengths of recurrent
            # sequences as places in the chunk.
            own = [min(max(length, start), stop) - start for length in lengths]
            ragged = min(own) < stop - start
            if ragged:
                padding = [stop - start - length for length in own]
                for layer in cache:
                    layer.prepare(lengths=own, right_padding=padding)
            logits = self.model(block[:, start:stop], cache=cache)
            if ragged:
                for layer in cache:
                    layer.finalize()
            yield start, logits

    def step(self, cache: Cache, versions: Sequence[int], tokens: Sequence[int]) -> mx.array:
        """Append one token to each sequence, and return the logits of the next one, ``[len(tokens),
        vocab_size]`` float32."""
        logits = self.one_by_one(cache, versions, tokens).astype(mx.float32)
        mx.eval(logits, [layer.state for layer in cache])
        return logits

    def one_by_one(self, cache: Cache, versions: Versions, tokens: Sequence[int]) -> mx.array:
        """The logits after tokens that are each a sequence of their own, ``[len(tokens),
        vocab_size]``. They are computed only if they are read."""
        self.adapters.select(versions)
        logits: mx.array = self.model(mx.array(tokens, mx.int32)[:, None], cache=cache)[:, -1, :]
        return logits

    def following(self, cache: Cache, version: int, tokens: Key, last: int) -> Iterator[mx.array]:
        """Append ``tokens`` to a cache of one sequence.

        Yields:
            The logits after each of the ``last`` tokens, ``[n, vocab_size]`` float32, a few at a
            time, because those of a long text may not fit into memory.
        """
        if head := tokens[:-last]:
            self.feed(cache, [version], [head])
        width, start = FIRST_READ_ROWS, len(tokens) - last
        while start < len(tokens):
            chunk = mx.array([tokens[start : start + width]], mx.int32)
            self.adapters.select([version])
            logits = self.model(chunk, cache=cache)[0].astype(mx.float32)
            mx.eval(logits, [layer.state for layer in cache])
            yield logits
            start += width
            width = max(1, min(self.step_size, LOGITS_BYTES // (4 * logits.shape[-1])))

    def cold(self, key: Key) -> mx.array:
        """The logits after ``key``, ``[1, vocab_size]`` float32, without a batch and without kept
        state."""
        version, *tokens = key
        cache = self.empty_cache()
        if len(tokens) > 1:
            self.feed(cache, [version], [tokens[:-1]])
        return self.step(cache, [version], tokens[-1:])


def _chunks(width: int, most: int) -> Iterator[tuple[int, int]]:
    """Divide ``width`` columns into chunks of about the same length, at most ``most`` if possible.
    If there are several, none has a single column, because rotating caches do not accept such a
    chunk for sequences of unequal length."""
    count = max(1, min(ceil(width / max(most, 2)), width // 2))
    return pairwise(width * at // count for at in range(count + 1))


def in_order(parts: Sequence[tuple[Sequence[int], mx.array]]) -> mx.array:
    """All rows of some parts, ordered by the numbers that each part gives to its rows."""
    order = np.argsort([number for numbers, _ in parts for number in numbers], kind="stable")
    rows = parts[0][1] if len(parts) == 1 else mx.concatenate([part for _, part in parts])
    return ordered(rows, order)


def ordered(rows: mx.array, order: np.ndarray) -> mx.array:
    """Rows in another order. If the order is the same, the rows themselves are returned."""
    same = np.array_equal(order, np.arange(len(rows)))
    return rows if same else rows[mx.array(order, mx.int32)]
