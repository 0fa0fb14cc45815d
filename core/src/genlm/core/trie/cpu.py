"""The trie's kernel in NumPy: one row after the other, so that all of its work stays in the cache; rows on all cores."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from genlm.core.trie.operation import Operation
from genlm.core.trie.plan import Indices, Plan
from genlm.core.trie.recycling import Recycler
from genlm.core.trie.weights import FloatArray, ResultType, check_shape, to_array

# The blocks of a range after so many are combined by one segmented reduction: few ranges have them.
_ONE_BY_ONE = 6
# Below so many elements in all, a second thread costs more than it saves.
_WORTH_A_THREAD = 1 << 17


class CpuKernel:
    """Sums and maxima over the nodes of a trie, for rows in main memory.

    NumPy releases the interpreter lock while it works on a row, so other threads go on, and large batches use all cores.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._results = Recycler()
        self._head = plan.parts[:_ONE_BY_ONE]
        self._tail, self._tail_starts = _by_range(plan.parts[_ONE_BY_ONE:])

    def rows(self, ws: Any, batch: bool) -> list[FloatArray]:
        """Weights of any kind as a list of ``[words]``.

        :raises InvalidInputError: they have another shape.
        """
        if isinstance(ws, list | tuple) or not batch:
            rows = [to_array(row) for row in (ws if batch else [ws])]
        else:
            rows = list(np.atleast_1d(to_array(ws)))
        for row in rows:
            check_shape(row.shape, len(self.plan.order))
        return rows

    def reduce(self, operation: Operation, rows: list[FloatArray], wanted: ResultType) -> Any:
        """Combine each row of weights, ``[words]``, to ``[nodes + words]``; computed in float64.

        :returns: ``[len(rows), nodes + words]``.
        """
        plan = self.plan
        result = self._results.empty((len(rows), plan.nodes + len(plan.order)), wanted.name)

        left = iter(list(zip(rows, result, strict=True)))  # whoever is free takes the next: on this, next() is atomic
        helpers = min(self._cores, len(rows), len(rows) * plan.width // _WORTH_A_THREAD) - 1
        helping = [self._pool.submit(self._run, operation, left) for _ in range(helpers)]
        self._run(operation, left)
        for helper in helping:
            if not helper.cancel():  # one that never got to run is not waited for
                helper.result()
        return wanted.of_array(result)

    def _run(self, operation: Operation, left: Iterator[tuple[FloatArray, FloatArray]]) -> None:
        nodes = self.plan.nodes
        work = np.empty(self.plan.width)
        for row, answer in left:
            answer[nodes:] = row
            self._combine(operation, row.astype(np.float64, copy=False), work)
            # ``clip`` spares checking indices that are known to be good.
            work.astype(answer.dtype, copy=False).take(self.plan.place, out=answer[:nodes], mode="clip")

    def _combine(self, operation: Operation, row: npt.NDArray[np.float64], work: npt.NDArray[np.float64]) -> None:
        """Fill the work row; see :mod:`genlm.core.trie.plan`."""
        plan, combine = self.plan, operation.of(np)
        below, *larger = plan.levels
        row.take(plan.order, out=work[: below.blocks], mode="clip")
        for level in larger:
            work[below.start + below.blocks : below.stop] = operation.identity
            pairs = work[below.start : below.stop]
            combine(pairs[::2], pairs[1::2], out=work[level.start : level.start + level.blocks])
            below = level
        if not self._head:
            return
        ranges = work[plan.ranges :]
        work.take(self._head[0], out=ranges, mode="clip")
        for part in self._head[1:]:
            head = ranges[: len(part)]
            combine(head, work.take(part, mode="clip"), out=head)
        if len(self._tail):
            head = ranges[: len(self._tail_starts)]
            combine(head, combine.reduceat(work.take(self._tail, mode="clip"), self._tail_starts), out=head)

    @property
    def _cores(self) -> int:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._cores, thread_name_prefix="genlm-trie")


def _by_range(parts: Sequence[Indices]) -> tuple[Indices, Indices]:
    """All blocks of the first range, then all of the second, ...; and where each range's blocks begin."""
    if not parts:
        return np.empty(0, np.intp), np.empty(0, np.intp)
    range_of = np.concatenate([np.arange(len(part)) for part in parts])
    order = np.argsort(range_of, kind="stable")
    return np.concatenate(parts)[order], np.searchsorted(range_of[order], np.arange(len(parts[0])))
