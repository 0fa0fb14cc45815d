"""The evaluator: from jobs to logits, by way of the key/value store and the runner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from attrs import evolve, frozen

from genlm.core.errors import EngineError
from genlm.hf.adapters import AdapterSet
from genlm.hf.job import Job, shared_tokens
from genlm.hf.layout import Span
from genlm.hf.reuse import Reuse
from genlm.hf.runner import Runner
from genlm.hf.snapshots import Place, Snapshots, joined
from genlm.hf.store import KVStore, Placement

#: Jobs that would share at least this many tokens with another one, not computed yet, wait for it
#: and start from its state.
WORTH_WAITING = 16


@frozen(eq=False)
class Result:
    """What one forward gave.

    Attributes:
        owners: For each row of ``logits``, the index of the job that it belongs to; a job's rows
            come in order.
        logits: ``[len(owners), vocab_size]``, in the model's type.
    """

    owners: list[int]
    logits: torch.Tensor


@frozen(eq=False)
class _Work:
    """What remains to be computed of a placed job."""

    index: int
    placement: Placement
    done: int

    @property
    def left(self) -> int:
        return self.placement.job.length - self.done


class Evaluator:
    """Computes jobs with as few and as small forwards as the model allows.

    Args:
        runner: Runs forwards.
        store: Keeps state.
        adapters: Says which jobs may share a forward.
        reuse: How state can be reused.
        max_tokens: The most new tokens in one forward.
        reuse_limit: The longest context whose state may be kept; ``None`` is no limit.
    """

    def __init__(
        self,
        runner: Runner,
        store: KVStore | Snapshots,
        adapters: AdapterSet,
        reuse: Reuse,
        max_tokens: int,
        reuse_limit: int | None,
    ) -> None:
        self._runner = runner
        self._store = store
        self._adapters = adapters
        self._reuse = reuse
        self._max_tokens = max_tokens
        self._reuse_limit = reuse_limit

    def run(self, jobs: Sequence[Job]) -> Iterator[Result]:
        """Compute ``jobs``; every wanted row comes exactly once, those of one job together and in
        order.

        Memory that runs out is met by dropping state, then by smaller forwards.

        Raises:
            EngineError: one job alone is more than memory holds.
        """
        for group in self._adapters.groups([job.adapter for job in jobs]):
            kept = [at for at in group if self.keeps(jobs[at])]
            yield from self._spared(jobs, sorted({*group} - {*kept}), kept=False)
            while kept:
                now, kept = self._leaders(jobs, kept)
                yield from self._spared(jobs, now, kept=True)

    def keeps(self, job: Job) -> bool:
        """Whether a job's state is kept."""
        if self._reuse is Reuse.NONE or (
            self._reuse_limit is not None and job.length > self._reuse_limit
        ):
            return False
        return self._store.fits(job.length)

    def cold(self, job: Job) -> Result:
        """Compute one job from its tokens only."""
        return Result([0] * job.keep, self._runner.plain([job.tokens], [job.adapter], [job.keep]))

    # --- the jobs of one wave ---------------------------------------------------------------------

    def _leaders(self, jobs: Sequence[Job], indices: list[int]) -> tuple[list[int], list[int]]:
        """Split off the jobs that had better wait, because another one computes much of what they
        need."""
        if len(indices) == 1 or isinstance(self._store, Snapshots):
            return indices, []
        later = set()
        ordered = sorted(indices, key=lambda at: jobs[at].key)
        for before, at in pairwise(ordered):
            shared = min(shared_tokens(jobs[before].key, jobs[at].key), jobs[at].latest_start)
            if shared >= WORTH_WAITING and shared - self._store.known(jobs[at]) >= WORTH_WAITING:
                later.add(at)
        return [at for at in indices if at not in later], [at for at in indices if at in later]

    def _spared(self, jobs: Sequence[Job], indices: list[int], kept: bool) -> Iterator[Result]:
        """Compute jobs; where memory runs out, drop state and try again in halves, one alone
        without keeping its state."""
        if not indices:
            return
        compute = self._kept if kept else self._plain
        given: Counter[int] = Counter()
        try:
            for result in compute(jobs, indices):
                yield result
                given.update(result.owners)
        except torch.OutOfMemoryError as error:
            self._store.drop_unpinned()
            left = [at for at in indices if given[at] < jobs[at].keep]
            if len(left) == 1 and not kept:
                raise EngineError(
                    f"a context of {jobs[left[0]].length} tokens does not fit into the device's "
                    "memory; "
                    f"lower max_batch_tokens (now {self._max_tokens}), kv_cache_bytes, or the "
                    "precision of the weights"
                ) from error
        else:
            return
        rest = list(jobs)
        for at in left:  # what it has rows of already is not wanted again
            rest[at] = evolve(jobs[at], keep=jobs[at].keep - given[at])
        for half in (left[: len(left) // 2], left[len(left) // 2 :]):
            yield from self._spared(rest, half, kept and len(left) > 1)

    def _plain(self, jobs: Sequence[Job], indices: Sequence[int]) -> Iterator[Result]:
        """Without state: padded batches of similar length."""
        ordered = sorted(indices, key=lambda at: -jobs[at].length)
        while ordered:
            longest = jobs[ordered[0]].length
            count = max(self._max_tokens // longest, 1)
            batch = [at for at in ordered[:count] if 2 * jobs[at].length >= longest]
            ordered = ordered[len(batch) :]
            logits = self._runner.plain(
                [jobs[at].tokens for at in batch],
                [jobs[at].adapter for at in batch],
                [jobs[at].keep for at in batch],
            )
            yield Result([at for at in batch for _ in range(jobs[at].keep)], logits)

    def _kept(self, jobs: Sequence[Job], indices: Sequence[int]) -> Iterator[Result]:
        """With state: as many at once as the store has room for."""
        store = self._store
        if isinstance(store, Snapshots):
            yield from self._grown(store, jobs, indices)
            return
        left = list(indices)
        while left:
            placements = store.place([jobs[at] for at in left])
            if not placements:
                yield from self._plain(jobs, left)
                return
            works = [
                _Work(at, placement, placement.start)
                for at, placement in zip(left, placements, strict=False)
            ]
            left = left[len(placements) :]
            finished = False
            try:
                yield from self._forwards(works)
                finished = True
            finally:
                if not finished:
                    store.abandon(placements)
            store.commit(placements)

    def _grown(
        self, store: Snapshots, jobs: Sequence[Job], indices: Sequence[int]
    ) -> Iterator[Result]:
        """With snapshots: contexts that grow from equal length to equal length together."""
        places: dict[int, Place] = {}
        groups: dict[tuple[int, int, int], list[int]] = {}
        for at in indices:
            start, place = store.find(jobs[at])
            if place is not None:
                places[at] = place
            groups.setdefault((start, jobs[at].length, jobs[at].keep), []).append(at)
        for (start, length, _), group in groups.items():
            count = max(self._max_tokens // (length - start), 1)
            for first in range(0, len(group), count):
                rows = group[first : first + count]
                cache = joined([places[at] for at in rows]) if start else None
                result, cache = self._steps(jobs, rows, start, cache)
                store.keep([jobs[at].key for at in rows], cache)
                yield result

    def _steps(
        self, jobs: Sequence[Job], rows: Sequence[int], start: int, cache: Any
    ) -> tuple[Result, Any]:
        """Run the rest of some contexts, at once where it is all, else token by token.

        Recurrent models may take several tokens as a beginning, whatever their cache holds.
        """
        chosen = [jobs[at] for at in rows]
        length, latest_start = chosen[0].length, chosen[0].latest_start
        owners: list[int] = []
        parts = []
        for stop in range(start + 1, length + 1) if start else [length]:
            wanted = range(max(latest_start, start) - start, stop - start)
            places = [row * (stop - start) + at for row in range(len(rows)) for at in wanted]
            tokens = [job.tokens[start:stop] for job in chosen]
            logits, cache = self._runner.stateful(
                cache, tokens, [job.adapter for job in chosen], places
            )
            owners.extend(at for at in rows for _ in wanted)
            parts.append(logits)
            start = stop
        if len(parts) == 1:
            return Result(owners, parts[0]), cache
        # The steps of one job together, in order.
        by_owner = sorted(range(len(owners)), key=owners.__getitem__)
        return Result(sorted(owners), torch.cat(parts)[by_owner]), cache

    # --- the forwards of one placement ------------------------------------------------------------

    def _forwards(self, works: Sequence[_Work]) -> Iterator[Result]:
        works = sorted(works, key=lambda work: work.placement.slot)
        if self._reuse is Reuse.PACKED:
            while works:
                chosen, works = self._fill(works)
                yield self._forward(chosen)
            return
        groups: dict[tuple[int, int], list[_Work]] = {}
        for work in works:
            groups.setdefault((work.done, work.left), []).append(work)
        for group in groups.values():
            yield from self._uniform(group)

    def _fill(self, works: Sequence[_Work]) -> tuple[list[tuple[_Work, int]], list[_Work]]:
        """Choose spans of at most ``max_tokens`` tokens; return them with where they stop, and what
        is left to do."""
        room, chosen, rest = self._max_tokens, [], []
        for work in works:
            size = min(work.left, room)
            if size:
                chosen.append((work, work.done + size))
                room -= size
            if size < work.left:
                rest.append(_Work(work.index, work.placement, work.done + size))
        return chosen, rest

    def _uniform(self, works: Sequence[_Work]) -> Iterator[Result]:
        """Works that begin and end together, in chunks of rows and of columns."""
        count = max(self._max_tokens // works[0].left, 1)
        for first in range(0, len(works), count):
            rows = list(works[first : first + count])
            size = max(self._max_tokens // len(rows), 1)
            while rows and rows[0].left:
                stop = rows[0].done + min(size, rows[0].left)
                yield self._forward([(row, stop) for row in rows])
                rows = [_Work(row.index, row.placement, stop) for row in rows]

    def _forward(self, chosen: Sequence[tuple[_Work, int]]) -> Result:
        """One forward over the works' tokens up to where they stop."""
        spans: list[Span] = []
        tokens: list[int] = []
        wanted: list[tuple[int, int]] = []
        for work, stop in chosen:
            job = work.placement.job
            spans.append(Span(work.placement.slot, work.done, stop))
            first_wanted = max(job.latest_start, work.done)
            wanted.extend(
                (work.index, len(tokens) + at - work.done) for at in range(first_wanted, stop)
            )
            tokens.extend(job.tokens[work.done : stop])
        wanted.sort()
        run = self._runner.packed if self._reuse is Reuse.PACKED else self._runner.uniform
        adapters = [work.placement.job.adapter for work, _ in chosen]
        logits = run(spans, tokens, adapters, [at for _, at in wanted])
        return Result([index for index, _ in wanted], logits)
