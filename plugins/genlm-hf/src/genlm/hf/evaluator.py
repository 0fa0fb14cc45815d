"""The evaluator: from sequences to logits, in the order and the size that memory allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from attrs import evolve

from genlm.core.errors import EngineError
from genlm.hf.adapters import AdapterSet
from genlm.hf.sequence import TokenSequence, shared_tokens
from genlm.hf.strategies import Result, Strategy

#: Sequences that would share at least this many tokens with another one, not computed yet, wait for
#: it and start from its state.
WORTH_WAITING = 16


class Evaluator:
    """Computes sequences with as few and as small forwards as the model allows.

    Args:
        strategy: How they are computed.
        adapters: Says which sequences may share a forward.
        reuse_limit: The longest context whose state may be kept; ``None`` is no limit.
    """

    def __init__(
        self, strategy: Strategy, adapters: AdapterSet, reuse_limit: int | None = None
    ) -> None:
        self._strategy = strategy
        self._adapters = adapters
        self._reuse_limit = reuse_limit

    def run(self, sequences: Sequence[TokenSequence]) -> Iterator[Result]:
        """Compute ``sequences``; every wanted row comes exactly once, those of one sequence
        together and in order.

        Where memory runs out, state is dropped; then forwards become smaller.

        Raises:
            EngineError: one sequence alone is more than memory holds.
        """
        for group in self._adapters.groups([sequence.adapter for sequence in sequences]):
            kept = [at for at in group if self.keeps(sequences[at])]
            yield from self._spared(sequences, sorted({*group} - {*kept}), kept=False)
            while kept:
                now, kept, shared = self._leaders(sequences, kept)
                yield from self._spared(sequences, now, kept=True, shared=shared)

    def keeps(self, sequence: TokenSequence) -> bool:
        """Whether a sequence's state is kept."""
        if self._reuse_limit is not None and sequence.length > self._reuse_limit:
            return False
        return self._strategy.fits(sequence.length)

    def cold(self, sequence: TokenSequence) -> Result:
        """Compute one sequence from its tokens only."""
        (result,) = self._strategy.plain([sequence], [0])
        return result

    def _leaders(
        self, sequences: Sequence[TokenSequence], indices: list[int]
    ) -> tuple[list[int], list[int], dict[int, int]]:
        """Separate the sequences that should wait, because another one computes much of what they
        need.

        Returns:
            Those to compute now, those that wait, and for some of the first how many leading tokens
            others share with it.
        """
        if len(indices) == 1 or not self._strategy.shares_prefixes:
            return indices, [], {}
        later = set()
        shared_by = {}
        ordered = sorted(indices, key=lambda at: sequences[at].key)
        for before, at in pairwise(ordered):
            one = sequences[at]
            shared = min(shared_tokens(sequences[before].key, one.key), one.latest_start)
            if shared >= WORTH_WAITING and shared - self._strategy.known(one) >= WORTH_WAITING:
                later.add(at)
                shared_by[before] = shared
        now = [at for at in indices if at not in later]
        return now, [at for at in indices if at in later], shared_by

    def _spared(
        self,
        sequences: Sequence[TokenSequence],
        indices: list[int],
        kept: bool,
        shared: Mapping[int, int] | None = None,
    ) -> Iterator[Result]:
        """Compute sequences; where memory runs out, drop state and try again in halves, one alone
        without keeping its state."""
        if not indices:
            return
        if kept:
            results = self._strategy.compute(sequences, indices, shared or {})
        else:
            results = self._strategy.plain(sequences, indices)
        given: Counter[int] = Counter()
        try:
            for result in results:
                yield result
                given.update(result.owners)
        except torch.OutOfMemoryError as error:
            self._strategy.drop_unpinned()
            left = [at for at in indices if given[at] < sequences[at].keep]
            if len(left) == 1 and not kept:
                raise EngineError(
                    f"a context of {sequences[left[0]].length} tokens does not fit into the "
                    "device's memory; lower max_batch_tokens (now "
                    f"{self._strategy.max_tokens}), kv_cache_bytes, or the precision of the weights"
                ) from error
        else:
            return
        rest = list(sequences)
        for at in left:  # what it has rows of already is not wanted again
            rest[at] = evolve(sequences[at], keep=sequences[at].keep - given[at])
        for half in (left[: len(left) // 2], left[len(left) // 2 :]):
            yield from self._spared(rest, half, kept and len(left) > 1)
