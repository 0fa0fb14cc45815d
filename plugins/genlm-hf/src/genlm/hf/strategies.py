"""Strategies: key/value state in slots and trunks, or in snapshots, or none."""

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
from genlm.hf.static import COLUMNS, StaticSteps
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

#: A placed sequence, and the start and stop of the positions of it that one forward computes.
Part = tuple[Placed, int, int]

#: What sharing is weighed with, but for what depends on the device.
SHARING_COSTS = SharingCosts()

#: Which part of the memory for state recorded steps may take: one in so many.
RECORDED_SHARE = 8

#: A forward: chunks, their tokens, an adapter for each chunk, which tokens are wanted; gives their
#: logits.
Forward = Callable[[Chunks, Sequence[int], Sequence[Adapter | None], Sequence[int]], torch.Tensor]


@frozen(eq=False)
class Result:
    """What one forward gave.

    Attributes:
        owners: For each row of ``logits``, the index of the sequence that it belongs to; the rows
            of a sequence come in order.
        logits: ``[len(owners), vocab_size]``, in the model's type.
        has_later: Whether the forward also computed tokens that come after some of the rows:
            further ones of a sequence, or padding. Where one of them is nan, it may have made these
            rows nan: a masked column still takes part in products, and 0 * nan is nan.
        nan: ``[len(owners)]`` on the device: whether a row is nan. One value of a row tells: each
            is a sum over the whole state.
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
    """What forwards have written into assigned slots and trunks, whether or not it is numbers.

    Attributes:
        placed: What they computed.
        owners: For each flag the index of its sequence.
        flags: On the device: whether a row was nan.
    """

    placed: list[Placed]
    owners: list[int]
    flags: list[torch.Tensor]

    def broken(self) -> set[int]:
        """The sequences with a row of nan, also of what is inside; the device is waited for, if it
        still computes."""
        nan = {self.owners[at] for at in torch.cat(self.flags).nonzero().flatten().tolist()}
        return {one.index for one in self.placed if nan and not nan.isdisjoint(one.indices())}


@define(eq=False)
class Strategy:
    """How sequences become forwards; this one keeps no state: every context is computed whole, in
    padded batches of similar length.

    The base of the others, which compute so what they cannot keep. There is one for each reuse
    mode, chosen once, when the model is loaded.

    A strategy decides which tokens go into one forward, and when what a forward has written counts
    as kept. It does not decide which sequences are asked for (the evaluator does), nor, where state
    lies in slots and trunks, what is kept, shared, copied and evicted: that is the planner's.

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
        """What further sequences cost beside those of a batch: none waits for another."""
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
            padded: Whether sequences of unequal length may share a forward, and so one be inside of
                another.
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
        """Keep the state of a sequence until :meth:`clear`; ``False`` if there is none of its
        own."""
        return True  # there is nothing to keep

    def clear(self) -> None:
        """Drop all state."""

    def leave_unfinished(self, chunk: TokenSequence) -> None:
        """Say that a context was computed only for one that goes on from it."""

    def drop_unpinned(self) -> None:
        """Drop all state but that of pinned contexts."""

    def drop_adapter(self, adapter: Adapter) -> None:
        """Drop the state computed with an adapter, pinned or not."""


@define(eq=False)
class InSlots(Strategy):
    """With state in slots and trunks; how forwards are made is left to the two below.

    State with nan must not be kept: what shares a prefix would start from it, and a masked column
    still takes part in the products. Whether there is any is looked at before the state is used,
    a step later. So no step waits for its own forward.
    """

    _planner: Planner[TokenSequence]
    _unsettled: Computed | None = field(default=None, init=False)

    @property
    def continues(self) -> bool:
        return True

    @property
    def planner(self) -> Planner[TokenSequence]:
        """The planner, once it has been told what became of the step before: what was computed
        then is kept, or given up where it is nan."""
        done, self._unsettled = self._unsettled, None
        if done is not None:
            if broken := done.broken():  # where nobody has looked before they were answered
                logger.warning("rows.nan", rows=len(broken))
            self._settle(done, broken)
        return self._planner

    def _settle(self, done: Computed, broken: set[int]) -> None:
        """Keep the state of those that are not broken."""
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
            if len(batch) == len(left):  # as usual
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
    """Any chunks of any sequences in one forward; steps of one token each perhaps in constant
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
    """Sequences that begin and end together in one forward."""

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
    # What runs: each part, cut where its sequence goes from one segment to the next.
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
    # What is read: of each piece the last positions that its sequence wants.
    kept = [*map(max, [sequence.latest_start for sequence in sequences], starts)]
    counts = [*map(max, map(sub, stops, kept), repeat(0))]
    owners = chain.from_iterable(map(repeat, [one.index for one in placed], counts))
    positions = ranges(map(sub, stops, counts), stops)
    places = ranges(map(sub, chunks.ends, counts), chunks.ends)
    wanted = [*zip(owners, positions, places, strict=True)]
    # And those that the sequences inside of it want.
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
    """Slots by index, so that neighbours are read without a copy; then trunks."""
    segment = piece[2]
    return segment.index if isinstance(segment, Slot) else sys.maxsize


@define(eq=False)
class InSnapshots(Strategy):
    """With snapshots: contexts that grow by equal length together."""

    snapshots: Snapshots

    @property
    def continues(self) -> bool:
        return self.snapshots.at_once

    def fits(self, length: int) -> bool:
        return self.snapshots.fits(length)

    def known(self, sequences: Sequence[TokenSequence]) -> list[int]:
        return list(map(self.snapshots.known, sequences))

    def batch_cost(self) -> BatchCost[Any]:
        # Where new tokens run one at a time, a context may be computed whole behind another one.
        at_once = self.snapshots.at_once
        return BatchCost(self.snapshots.forward if at_once else math.inf, nests=at_once)

    def compute(
        self, sequences: Sequence[TokenSequence], indices: Sequence[int]
    ) -> Iterator[Result]:
        yield from self._results(self.snapshots.runs(sequences, indices), set())

    def _results(self, runs: Mapping[int, Run], tried: set[bytes]) -> Iterator[Result]:
        """What runs give; what they begin with comes first, and what that begins with before it.

        Args:
            runs: By the last sequence of each.
            tried: The beginnings that have been computed, and may not have been kept.
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
    """The strategy for what the probe has chosen.

    Args:
        choice: That.
        runner: Runs forwards.
        max_tokens: The most new tokens in one forward.
        budget: The most bytes of state to keep, and of recorded steps.
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
        sharing = evolve(sharing, step=COLUMNS)  # a resize drops what is recorded
        recorder = recorder_for(runner.device)
        share = 0 if recorder is None else budget // RECORDED_SHARE
        static = StaticSteps(runner, recorder, share)
        budget -= share
    planner: Planner[TokenSequence] = Planner(PoolTable(runner.pool, budget), sharing, shares)
    if reuse is ReuseMode.UNIFORM:
        return Uniform(runner, max_tokens, planner)
    return Packed(runner, max_tokens, planner, static)
