"""Strategies: the KV cache in slots and trunks, in snapshots, or none."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from operator import sub
from typing import Any

import torch
from attrs import define, evolve, field, frozen

from genlm.core.logs import get_logger
from genlm.core.types import Adapter
from genlm.hf.costs import costs_of
from genlm.hf.graphs import recorder_for
from genlm.hf.layout import Chunks, ranges
from genlm.hf.reuse import Choice, ReuseMode
from genlm.hf.runner import Runner
from genlm.hf.snapshots import Run, Snapshots, steps
from genlm.hf.static import COLUMN_MULTIPLE, StaticSteps
from genlm.hf.table import PoolTable
from genlm.kit.kv.placement import Placement, nested
from genlm.kit.kv.planner import Planner
from genlm.kit.kv.sequence import TokenSequence
from genlm.kit.kv.sharing import BatchCost, SharingCosts
from genlm.kit.memory import is_out_of_memory
from genlm.kit.segments import Segment, Slot

logger = get_logger()

#: A sequence, and where it is computed.
Placed = Placement[TokenSequence]

#: A placed sequence, and the start and stop (exclusive) of its positions that one forward computes.
Part = tuple[Placed, int, int]

#: The costs of sharing that do not depend on the device.
SHARING_COSTS = SharingCosts()

#: Recorded steps may take this part of the memory for state: 8 means an eighth.
GRAPH_MEMORY_DIVISOR = 8

#: A forward. Its arguments are chunks, their tokens, an adapter for each chunk, and the indices of
#: the wanted tokens; it returns their logits.
Forward = Callable[[Chunks, Sequence[int], Sequence[Adapter | None], Sequence[int]], torch.Tensor]


@frozen(eq=False)
class Result:
    """The result of one forward.

    Attributes:
        owners: For each row of ``logits``, the index of the sequence that it belongs to; the rows
            of a sequence come in order.
        logits: ``[len(owners), vocab_size]``, in the model's type.
        has_later: Whether the forward also computed tokens after some of the rows: further tokens
            of a sequence, or padding. If one of these is NaN, it may have made the rows NaN,
            because a masked column still takes part in products, and 0 * nan is nan.
        nan: ``[len(owners)]`` on the device: whether a row is NaN. One value of a row is enough to
            tell, because each is a sum over the whole state.
    """

    owners: list[int]
    logits: torch.Tensor
    has_later: bool = False
    nan: torch.Tensor = field(init=False)

    @nan.default
    def _is_nan(self) -> torch.Tensor:
        return self.logits[:, 0].isnan()


@frozen(eq=False)
class Computed:
    """State that forwards have written into assigned slots and trunks, and that may be NaN.

    Attributes:
        placed: The sequences that they computed.
        owners: For each flag, the index of its sequence.
        flags: On the device, whether a row was NaN.
    """

    placed: list[Placed]
    owners: list[int]
    flags: list[torch.Tensor]

    def broken(self) -> set[int]:
        """The indices of sequences with a NaN row, their own or of a sequence inside. This waits
        for the device."""
        nan = {self.owners[at] for at in torch.cat(self.flags).nonzero().flatten().tolist()}
        return {one.index for one in self.placed if nan and not nan.isdisjoint(one.indices())}


@define(eq=False)
class Strategy:
    """How sequences become forwards. This base class keeps no state: every context is computed
    whole, in padded batches of similar length.

    Its subclasses do the same for contexts whose state they cannot keep. The strategy is chosen by
    the reuse mode, once, when the model is loaded.

    A strategy decides which tokens go into one forward, and when the state that a forward has
    written counts as kept. The evaluator decides which sequences are computed. For state in slots
    and trunks, the planner decides what is kept, shared, copied and evicted.

    Attributes:
        runner: Runs forwards.
        max_tokens: The most new tokens in one forward.
    """

    runner: Runner
    max_tokens: int

    @property
    def continues(self) -> bool:
        """Whether a context can be computed in parts, each from the state of the one before."""
        return False

    def fits(self, length: int) -> bool:
        """Whether the state of a context of this length can be kept."""
        return False

    def known(self, sequences: Sequence[TokenSequence]) -> list[int]:
        """How many leading tokens of each sequence need not be computed."""
        return [0] * len(sequences)

    def batch_cost(self) -> BatchCost[Any]:
        """The cost of adding further sequences to a batch; here none waits for another."""
        return BatchCost(math.inf, nests=True)

    def compute(
        self, sequences: Sequence[TokenSequence], indices: Sequence[int]
    ) -> Iterator[Result]:
        """Compute some sequences and keep their state.

        Args:
            sequences: All sequences.
            indices: Those to compute.
        """
        return self.plain(sequences, indices)

    def plain(
        self, sequences: Sequence[TokenSequence], indices: Sequence[int], padded: bool = True
    ) -> Iterator[Result]:
        """Compute some sequences without state.

        Args:
            sequences: All sequences.
            indices: Those to compute.
            padded: Whether sequences of unequal length may share a forward, and a sequence be
                computed inside a longer one that begins with it.
        """
        placed = [Placement(at, sequences[at]) for at in indices]
        ordered = sorted(nested(placed) if padded else placed, key=lambda one: -one.sequence.length)
        while ordered:
            longest = ordered[0].sequence.length
            count = max(self.max_tokens // longest, 1)
            shortest = longest / 2 if padded else longest
            batch = [one for one in ordered[:count] if one.sequence.length >= shortest]
            ordered = ordered[len(batch) :]
            rows = [one.rows() for one in batch]
            logits = self.runner.plain(
                [one.sequence.tokens for one in batch],
                [one.sequence.adapter for one in batch],
                [[position for _, position in some] for some in rows],
            )
            owners = [index for some in rows for index, _ in some]
            has_later = len(owners) > len(batch) or batch[-1].sequence.length < longest
            yield Result(owners, logits, has_later)

    def pin(self, sequence: TokenSequence) -> bool:
        """Keep the state of a sequence until :meth:`clear`; ``False`` if the sequence has no state
        of its own."""
        return True  # there is nothing to keep

    def clear(self) -> None:
        """Drop all state."""

    def leave_unfinished(self, chunk: TokenSequence) -> None:
        """Note that a context was computed only as the beginning of a longer one."""

    def drop_unpinned(self) -> None:
        """Drop all state but that of pinned contexts."""

    def drop_adapter(self, adapter: Adapter) -> None:
        """Drop the state computed with an adapter, pinned or not."""


@define(eq=False)
class InSlots(Strategy):
    """Strategies with state in slots and trunks. The two subclasses make the forwards.

    State with NaN must not be kept: contexts that share the prefix would start from it, and a
    masked column still takes part in products. The engine looks for NaN one step later, before the
    state is used, so no step waits for its own forward.
    """

    _planner: Planner[TokenSequence]
    _unsettled: Computed | None = field(default=None, init=False)

    @property
    def continues(self) -> bool:
        return True

    @property
    def planner(self) -> Planner[TokenSequence]:
        """The planner. Before it is used, the state of the previous step is kept, or given up where
        it is NaN."""
        done, self._unsettled = self._unsettled, None
        if done is not None:
            if broken := done.broken():  # the answers may have been given without looking for NaN
                logger.warning("rows.nan", rows=len(broken))
            self._settle(done, broken)
        return self._planner

    def _settle(self, done: Computed, broken: set[int]) -> None:
        """Keep the state of the sequences that are not broken."""
        try:
            self._planner.commit([one for one in done.placed if one.index not in broken])
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._planner.drop_unpinned()

    def fits(self, length: int) -> bool:
        return self.planner.fits(length)

    def known(self, sequences: Sequence[TokenSequence]) -> list[int]:
        return list(map(self.planner.known, sequences))

    def batch_cost(self) -> BatchCost[Any]:
        return self._planner.batch_cost()

    def compute(
        self, sequences: Sequence[TokenSequence], indices: Sequence[int]
    ) -> Iterator[Result]:
        left = list(indices)
        while left:
            batch = self.planner.place(sequences, left)
            if not batch:
                yield from self.plain(sequences, left)
                return
            if len(batch) == len(left):  # the usual case
                left = []
            else:
                placed = {index for one in batch for index in one.indices()}
                left = [at for at in left if at not in placed]
            done = Computed(batch, [], [])
            for result in self.forwards(batch):
                done.owners.extend(result.owners)
                done.flags.append(result.nan)
                yield result
            self._unsettled = done

    def forwards(self, placed: Sequence[Placed]) -> Iterator[Result]:
        """Compute some placed sequences."""
        raise NotImplementedError

    def pin(self, sequence: TokenSequence) -> bool:
        return self.planner.pin(sequence)

    def clear(self) -> None:
        self._unsettled = None
        self._planner.clear()

    def drop_unpinned(self) -> None:
        self.planner.drop_unpinned()

    def drop_adapter(self, adapter: Adapter) -> None:
        self.planner.drop_adapter(adapter.version)


@define(eq=False)
class Packed(InSlots):
    """Chunks of any size and start in one forward. Steps of one token each may have a constant
    shape."""

    _static: StaticSteps | None = None

    def forwards(self, placed: Sequence[Placed]) -> Iterator[Result]:
        packed = self.runner.packed if self._static is None else self._static.packed
        room, some = self.max_tokens, list[Part]()
        for one in placed:
            start, stop = one.start, one.sequence.length
            while stop - start > room:
                yield _forward(packed, [*some, (one, start, start + room)])
                start, room, some = start + room, self.max_tokens, []
            some.append((one, start, stop))
            room -= stop - start
        yield _forward(packed, some)

    def clear(self) -> None:
        self._drop_recordings()
        super().clear()

    def drop_unpinned(self) -> None:
        self._drop_recordings()
        super().drop_unpinned()

    def _drop_recordings(self) -> None:
        if self._static is not None:
            self._static.drop()


@define(eq=False)
class Uniform(InSlots):
    """Sequences of equal start and length in one forward."""

    def forwards(self, placed: Sequence[Placed]) -> Iterator[Result]:
        groups: dict[tuple[int, int], list[Placed]] = {}
        for one in placed:
            groups.setdefault((one.start, one.sequence.length), []).append(one)
        for (start, length), group in groups.items():
            count = max(self.max_tokens // (length - start), 1)
            for first in range(0, len(group), count):
                some = group[first : first + count]
                size = max(self.max_tokens // len(some), 1)
                for at in range(start, length, size):
                    stop = min(at + size, length)
                    yield _forward(self.runner.uniform, [(one, at, stop) for one in some])


def _forward(run: Forward, parts: Iterable[Part]) -> Result:
    """One forward over parts of sequences."""
    # The forward computes these pieces: each part, divided where its sequence goes from one segment
    # to the next.
    pieces = [
        (one, one.sequence, segment, first, last)
        for one, start, stop in parts
        for segment, first, last in one.segments(start, stop)
    ]
    pieces.sort(key=_place)
    placed, sequences, segments, starts, stops = zip(*pieces, strict=True)
    chunks = Chunks(zip(segments, starts, stops, strict=True))
    tokens = [
        token
        for sequence, start, size in zip(sequences, starts, chunks.sizes, strict=True)
        for token in sequence.tokens.since(start)[:size]
    ]
    # It reads the last positions of each piece, as far as the sequence wants them.
    kept = [*map(max, [sequence.latest_start for sequence in sequences], starts)]
    counts = [*map(max, map(sub, stops, kept), repeat(0))]
    owners = chain.from_iterable(map(repeat, [one.index for one in placed], counts))
    positions = ranges(map(sub, stops, counts), stops)
    places = ranges(map(sub, chunks.ends, counts), chunks.ends)
    wanted = [*zip(owners, positions, places, strict=True)]
    # It also reads the rows that sequences inside of a piece want.
    for at, other in [(at, other) for at, one in enumerate(placed) for other in one.inside]:
        first = max(other.sequence.latest_start, starts[at])
        last, before = min(other.sequence.length, stops[at]), chunks.ends[at] - stops[at]
        wanted += [(other.index, position, before + position) for position in range(first, last)]
    wanted.sort()
    adapters = [sequence.adapter for sequence in sequences]
    logits = run(chunks, tokens, adapters, [place for *_, place in wanted])
    has_later = any(one.sequence.keep > 1 or one.inside for one in placed)
    return Result([index for index, *_ in wanted], logits, has_later)


def _place(piece: tuple[Placed, TokenSequence, Segment, int, int]) -> int:
    """The sort key of a piece: slots by index, so that neighbours are read without a copy, then
    trunks."""
    segment = piece[2]
    return segment.index if isinstance(segment, Slot) else sys.maxsize


@define(eq=False)
class InSnapshots(Strategy):
    """The strategy with snapshots: contexts that are extended by equally many tokens run
    together."""

    snapshots: Snapshots

    @property
    def continues(self) -> bool:
        return self.snapshots.at_once

    def fits(self, length: int) -> bool:
        return self.snapshots.fits(length)

    def known(self, sequences: Sequence[TokenSequence]) -> list[int]:
        return list(map(self.snapshots.known, sequences))

    def batch_cost(self) -> BatchCost[Any]:
        # If new tokens run one at a time, a context may be computed whole, and then it does not
        # share.
        at_once = self.snapshots.at_once
        return BatchCost(self.snapshots.forward if at_once else math.inf, nests=at_once)

    def compute(
        self, sequences: Sequence[TokenSequence], indices: Sequence[int]
    ) -> Iterator[Result]:
        yield from self._results(self.snapshots.runs(sequences, indices), set())

    def _results(self, runs: Mapping[int, Run], tried: set[bytes]) -> Iterator[Result]:
        """The results of runs. Common beginnings are computed first, and the beginnings of those
        before them.

        Args:
            runs: The runs, each under the index of its last sequence.
            tried: The keys of beginnings that have been computed. Their state may not have been
                kept.
        """
        while runs:
            first: list[TokenSequence] = []
            waiting: set[int] = set()
            for one in self.snapshots.beginnings({at: run.sequence for at, run in runs.items()}):
                if one.sequence.key not in tried and waiting.isdisjoint(one.waiting):
                    waiting.update(one.waiting)
                    first += [] if one.asked else [one.sequence]
            now = {at: run for at, run in runs.items() if at not in waiting}
            ahead = {at: Run(one, [(at, one.length - 1)]) for at, one in enumerate(first)}
            for _ in self._results(ahead, tried):
                pass
            yield from self._computed(now)
            if waiting:
                tried.update(one.key for one in (*first, *(run.sequence for run in now.values())))
            runs = {at: runs[at] for at in runs if at in waiting}

    def _computed(self, runs: Mapping[int, Run]) -> Iterator[Result]:
        sequences = {at: run.sequence for at, run in runs.items()}
        for start, group, cache in self.snapshots.groups(sequences, self.max_tokens):
            at_once = self.snapshots.at_once
            owners, logits, cache = steps(
                self.runner, [runs[at] for at in group], start, cache, at_once
            )
            self.snapshots.keep([sequences[at].key for at in group], cache)
            yield Result(owners, logits, has_later=len(owners) > len(group))

    def pin(self, sequence: TokenSequence) -> bool:
        return self.snapshots.pin(sequence)

    def leave_unfinished(self, chunk: TokenSequence) -> None:
        self.snapshots.leave_unfinished(chunk)

    def clear(self) -> None:
        self.snapshots.clear()

    def drop_unpinned(self) -> None:
        self.snapshots.drop_unpinned()

    def drop_adapter(self, adapter: Adapter) -> None:
        self.snapshots.drop_adapter(adapter)


def strategy_for(choice: Choice, runner: Runner, max_tokens: int, budget: int) -> Strategy:
    """The strategy for the probe's choice.

    Args:
        choice: The result of the probe.
        runner: Runs forwards.
        max_tokens: The most new tokens in one forward.
        budget: The most bytes of kept state and recorded steps together.
    """
    costs, reuse = costs_of(runner.device), choice.reuse
    if reuse is ReuseMode.NONE:
        return Strategy(runner, max_tokens)
    if reuse in (ReuseMode.SNAPSHOTS, ReuseMode.STEPWISE):
        at_once = reuse is ReuseMode.SNAPSHOTS
        snapshots = Snapshots(budget, costs.forward, at_once, choice.ragged)
        return InSnapshots(runner, max_tokens, snapshots)
    waiting = max(SHARING_COSTS.waiting, costs.forward)
    sharing = evolve(SHARING_COSTS, waiting=waiting, plenty=costs.plenty)
    shares, static = reuse is ReuseMode.SHARED, None
    if choice.static:
        # A resize drops the recordings, so resizes should be rare.
        sharing = evolve(sharing, step=COLUMN_MULTIPLE)
        recorder = recorder_for(runner.device)
        share = 0 if recorder is None else budget // GRAPH_MEMORY_DIVISOR
        static = StaticSteps(runner, recorder, share)
        budget -= share
    planner: Planner[TokenSequence] = Planner(PoolTable(runner.pool, budget), sharing, shares)
    if reuse is ReuseMode.UNIFORM:
        return Uniform(runner, max_tokens, planner)
    return Packed(runner, max_tokens, planner, static)
