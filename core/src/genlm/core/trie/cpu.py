"""The trie's kernel in NumPy: one row after the other, so that all of its work stays in the cache;
rows on all cores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from genlm.core.trie.operation import Operation
from genlm.core.trie.plan import Plan
from genlm.core.trie.recycling import Recycler
from genlm.core.trie.weights import FloatArray, ResultType, check_shape, to_array

# What ``take`` does to indices that are out of range. There are none, and with this it is quickest.
_UNCHECKED: Final = "wrap"
# Below so many elements in all, a second thread costs more than it saves.
_WORTH_A_THREAD = 1 << 17


class CpuKernel:
    """Sums and maxima over the nodes of a trie, for rows in main memory.

    NumPy releases the interpreter lock while it works on a row, so other threads go on, and large
    batches use all cores.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._results = Recycler()

    def rows(self, ws: Any, batch: bool) -> list[FloatArray]:
        """Weights of any kind as a list of ``[words]``.

        :raises InvalidInputError: they have another shape.
        """
        if isinstance(ws, list | tuple) or not batch:
            rows = [to_array(row) for row in (ws if batch else [ws])]
        else:
            rows = list(np.atleast_1d(to_array(ws)))
        for row in rows:
            check_shape(row.shape, self.plan.words)
        return rows

    def reduce(self, operation: Operation, rows: list[FloatArray], wanted: ResultType) -> Any:
        """Combine each row of weights, ``[words]``, to ``[nodes + words]``; computed in float64.

        :returns: ``[len(rows), nodes + words]``.
        """
        plan = self.plan
        result = self._results.empty((len(rows), plan.nodes + plan.words), wanted.name)

        # Whoever is free takes the next: on this, next() is atomic.
        left = iter(list(zip(rows, result, strict=True)))
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
            self._combine(operation, row, work)
            answer[nodes:] = work[: self.plan.words]
            work.astype(answer.dtype, copy=False).take(
                self.plan.place, out=answer[:nodes], mode=_UNCHECKED
            )

    def _combine(
        self, operation: Operation, row: FloatArray, work: npt.NDArray[np.float64]
    ) -> None:
        """Fill the work row; see :mod:`genlm.core.trie.plan`."""
        plan, combine = self.plan, operation.of(np)
        work[: plan.words] = row
        if plan.rounds:
            work[plan.rounds[0].new] = work[: plan.words].take(plan.first, mode=_UNCHECKED)
        for step in plan.rounds:
            combine(work[step.new], work.take(step.other, mode=_UNCHECKED), out=work[step.results])
        if len(plan.rest.starts):
            values = work.take(plan.rest.values, mode=_UNCHECKED)
            combine.reduceat(values, plan.rest.starts, out=work[plan.rest.results])

    @property
    def _cores(self) -> int:
        return (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._cores, thread_name_prefix="genlm-trie")
