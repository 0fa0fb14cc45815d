"""The evaluator: from sequences to logits, in the order and the size that memory allows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from genlm.core.errors import EngineError
from genlm.core.logs import get_logger
from genlm.hf.adapters import AdapterSet
from genlm.hf.strategies import Result, Strategy
from genlm.kit.kv.sequence import TokenSequence
from genlm.kit.kv.sharing import BatchCost
from genlm.kit.memory import is_out_of_memory

logger = get_logger()

#: The indices of sequences that are computed together, and whether their state is kept.
Part = tuple[list[int], bool]


class Evaluator:
    """Computes sequences with as few and as small forwards as the model allows.

    The evaluator decides

    * which sequences may share a call of the strategy: only those with equal adapters, if adapters
      cannot be mixed;
    * whether a context's state is kept: not beyond the longest length for which reuse was proven;
    * which row is next compared with a cold one;
    * what is tried again when memory runs out.

    The schedule decides what a step computes, the strategy how a sequence is computed, and the
    planner where its state lies.

    Args:
        strategy: Computes the sequences.
        adapters: Says which sequences may share a forward.
        reuse_limit: The longest context whose state may be kept; ``None`` means no limit.
        rows_apart: Whether every row beyond that limit needs a forward of its own.
    """

    #: The length of the first context whose row is compared with a cold one. The next lengths are
    #: the powers of two above it.
    FIRST_CHECK = 16

    def __init__(
        self,
        strategy: Strategy,
        adapters: AdapterSet,
        reuse_limit: int | None,
        rows_apart: bool,
    ) -> None:
        self._strategy = strategy
        self._adapters = adapters
        self._reuse_limit = reuse_limit
        self._rows_apart = rows_apart
        self._next_check = self.FIRST_CHECK
        #: Whether every row needs a forward over its whole context.
        self.whole = False

    def unproven(self, sequences: Sequence[TokenSequence]) -> int | None:
        """The index of the sequence to compare with a cold forward: the longest one, if no context
        as long has been compared yet. ``None`` if no comparison is due.

        A model may change its attention beyond a length that its configuration does not mention.
        The first context beyond each power of two is compared, so all comparisons together cost no
        more than twice the longest of them.
        """
        lengths = [sequence.length for sequence in sequences]
        at = lengths.index(max(lengths))
        due = lengths[at] >= self._next_check and self.keeps(lengths[at])
        return at if due else None

    def compared_part(self, sequence: TokenSequence) -> TokenSequence:
        """The beginning of a sequence, up to the length that has been compared. The compared row is
        then computed from the state of this beginning, because a forward over the whole context
        would agree with itself."""
        return TokenSequence(sequence.tokens.first(self._next_check - 1), sequence.adapter)

    def prove(self, length: int, right: bool) -> None:
        """Take the result of comparing a context of ``length`` tokens. If the row was wrong, state
        is no longer kept for contexts longer than half of the length at which comparison was
        due."""
        if right:
            self._next_check = 1 << length.bit_length()
            return
        self._reuse_limit = max(self._next_check // 2, 1)
        self._rows_apart = True
        self._strategy.clear()
        logger.warning("kv.reuse_wrong", length=length, limit=self._reuse_limit)

    def run(
        self, sequences: Sequence[TokenSequence], cold: bool = False
    ) -> Generator[Result, None, None]:
        """Compute ``sequences``. Every wanted row is yielded exactly once; the rows of one sequence
        come together and in order.

        When memory runs out, state is dropped; then forwards become smaller. A row that is NaN only
        because of a later token in the same forward is computed again without that token.

        Args:
            sequences: The sequences whose rows are wanted.
            cold: Whether no kept state is used.

        Raises:
            EngineError: one sequence alone does not fit into memory.
        """
        wanted, alone = list(sequences), set[int]()
        parts = [([*range(len(wanted))], False)] if cold else self._parts(sequences)
        while parts:
            indices, kept = parts.pop()
            given = Counter[int]()
            try:
                for result in self._results(wanted, indices, kept):
                    yield self._without_later(result, wanted, given)
                    given.update(result.owners)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                parts += self._smaller(wanted, given, indices, kept, alone, error)

    def pieces(self, sequence: TokenSequence) -> list[TokenSequence]:
        """The parts of ``sequence`` that need forwards of their own, so that each of its rows is
        what it would be if requested alone. Beyond a certain length, some models change their
        attention for all positions of a forward, so no forward may cross that length."""
        limit, first = 0 if self.whole else self._reuse_limit, sequence.latest_start
        if limit is None or sequence.length <= limit:
            return [sequence]
        stops = [limit] if first < limit else []
        beyond = range(max(first, limit) + 1, sequence.length + 1)
        stops.extend(beyond if self._rows_apart or self.whole else beyond[-1:])
        return [
            TokenSequence(sequence.tokens.first(stop), sequence.adapter, keep=stop - before)
            for before, stop in pairwise([first, *stops])
        ]

    def keeps(self, length: int) -> bool:
        """Whether the state of contexts of a length is kept."""
        return not self.is_beyond(length) and self._strategy.fits(length)

    def is_beyond(self, length: int) -> bool:
        """Whether contexts of a length are too long for their state to be kept, regardless of
        memory."""
        return self.whole or (self._reuse_limit is not None and length > self._reuse_limit)

    def continues(self, sequence: TokenSequence) -> bool:
        """Whether a sequence can be computed in parts, each from the state of the one before."""
        return self._strategy.continues and self.keeps(sequence.length)

    def known(self, sequences: Sequence[TokenSequence]) -> list[int]:
        """How many leading tokens of each sequence need not be computed."""
        known = self._strategy.known(sequences)
        if self._reuse_limit is None and not self.whole:
            return known
        return [
            0 if self.is_beyond(one.length) else found
            for one, found in zip(sequences, known, strict=True)
        ]

    def batch_cost(self) -> BatchCost[Any]:
        """The cost of adding further sequences to a batch."""
        return self._strategy.batch_cost()

    def cold(self, sequence: TokenSequence) -> Result:
        """Compute one sequence from its tokens only."""
        (result,) = self._strategy.plain([sequence], [0])
        return result

    def _parts(self, sequences: Sequence[TokenSequence]) -> list[Part]:
        """The groups of sequences that may share forwards, in reverse order."""
        parts: list[Part] = []
        lengths = [sequence.length for sequence in sequences]
        kept = {length for length in {*lengths} if self.keeps(length)}
        for group in self._adapters.groups([sequence.adapter for sequence in sequences]):
            parts.append(([at for at in group if lengths[at] not in kept], False))
            parts.append(([at for at in group if lengths[at] in kept], True))
        return [part for part in reversed(parts) if part[0]]

    def _results(
        self, sequences: Sequence[TokenSequence], indices: Sequence[int], kept: bool
    ) -> Iterator[Result]:
        if kept:
            return self._strategy.compute(sequences, indices)
        # If attention depends on the length, it may depend on the length with padding too.
        alike = any(self.is_beyond(sequences[at].length) for at in indices)
        return self._strategy.plain(sequences, indices, padded=not alike)

    def _without_later(
        self, result: Result, wanted: Sequence[TokenSequence], given: Mapping[int, int]
    ) -> Result:
        """``result``, with each NaN row computed again without the tokens that come after it.

        Args:
            result: The result of a forward.
            wanted: All sequences.
            given: For each sequence, how many of its rows came before.
        """
        if not (result.has_later and bool(result.nan.any())):
            return result
        broken: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # (row, position)
        before = Counter(given)
        for row, (owner, is_nan) in enumerate(zip(result.owners, result.nan.tolist(), strict=True)):
            if is_nan:
                broken[owner].append((row, wanted[owner].latest_start + before[owner]))
            before[owner] += 1
        logits = result.logits.clone()
        for owner, places in broken.items():
            rows, positions = zip(*places, strict=True)
            found = self._first_numbers(wanted[owner], positions)
            for row, numbers in zip(rows, found, strict=False):
                logits[row] = numbers
        return Result(result.owners, logits)

    def _first_numbers(
        self, sequence: TokenSequence, positions: Sequence[int]
    ) -> Sequence[torch.Tensor]:
        """The rows of the first ``positions``, up to the token that makes rows NaN, which a
        bisection finds."""
        found: Sequence[torch.Tensor] = ()
        right, wrong = 0, len(positions) + 1
        while right + 1 < wrong:
            count = wrong - 1 if wrong > len(positions) else (right + wrong) // 2
            first, stop = positions[0], positions[count - 1] + 1
            part = TokenSequence(sequence.tokens.first(stop), sequence.adapter, stop - first)
            (result,) = self._strategy.plain([part], [0], padded=False)
            if result.nan.any():
                wrong = count
            else:
                found = [result.logits[position - first] for position in positions[:count]]
                right = count
        return found

    def _smaller(
        self,
        wanted: list[TokenSequence],
        given: Counter[int],
        indices: Sequence[int],
        kept: bool,
        alone: set[int],
        error: Exception,
    ) -> list[Part]:
        """After memory ran out, drop state and return the halves to try again. A single sequence is
        tried ``alone``, without keeping its state. Rows that were already given are removed from
        ``wanted``."""
        self._strategy.drop_unpinned()
        left = [at for at in indices if given[at] < wanted[at].keep]
        if len(left) == 1 and not kept:
            if left[0] in alone:
                raise EngineError(
                    f"a context of {wanted[left[0]].length} tokens does not fit into the "
                    "device's memory; lower max_batch_tokens (now "
                    f"{self._strategy.max_tokens}), kv_cache_bytes, or the precision of the weights"
                ) from error
            alone.update(left)
        for at in left:
            one = wanted[at]
            wanted[at] = TokenSequence(one.tokens, one.adapter, one.keep - given[at])
        half = len(left) // 2
        return [(part, kept and len(left) > 1) for part in (left[half:], left[:half]) if part]
