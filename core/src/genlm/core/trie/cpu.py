"""The trie's kernel for rows in main memory: NumPy, on all cores."""

from __future__ import annotations

import contextlib
import math
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from genlm.core.trie.nodes import Ints, Nodes
from genlm.core.trie.pairing import Pairing
from genlm.core.trie.weights import FloatArray, Operation, ResultType, check_shape, to_array

# The mode of ``take`` for indices out of range. There are none, and this mode is the fastest.
_UNCHECKED: Final = "wrap"
# With fewer elements in all, a second thread costs more than it saves.
_MIN_THREAD_ELEMENTS = 1 << 17


class CpuKernel:
    """Sums and maxima over the nodes of a trie, for rows in main memory.

    Works on one row after the other, so that its values stay in the processor's cache. NumPy
    releases the interpreter lock meanwhile: other threads run, and large batches use all cores.
    """

    precision = "float64"

    def __init__(self, order: Ints, nodes: Nodes) -> None:
        self.plan = Pairing.of(order, nodes)
        self._results = Recycler()

    def _rows(self, ws: Any, batch: bool) -> list[FloatArray]:
        """Weights of any kind as a list of rows ``[items]``."""
        if isinstance(ws, list | tuple) or not batch:
            rows = [to_array(row) for row in (ws if batch else [ws])]
        else:
            rows = list(np.atleast_1d(to_array(ws)))
        for row in rows:
            check_shape(row.shape, self.plan.items)
        return rows

    def reduce(self, operation: Operation, ws: Any, batch: bool, wanted: ResultType) -> Any:
        """Combine each row of weights, ``[items]``, for all nodes and leaves, in float64.

        Args:
            operation: How.
            ws: Weights of any kind: one row, or several if ``batch``.
            batch: Whether there are several.
            wanted: What to return.

        Returns:
            ``[rows, nodes + items]``

        Raises:
            InvalidInputError: The weights have another shape.
        """
        plan, rows = self.plan, self._rows(ws, batch)
        result = self._results.empty((len(rows), plan.nodes + plan.items), wanted.name)

        # Each thread takes the next row when it is free; next() on this iterator is atomic.
        left = iter(list(zip(rows, result, strict=True)))
        helpers = min(self._cores, len(rows), len(rows) * plan.width // _MIN_THREAD_ELEMENTS) - 1
        helping: list[Future[None]] = []
        # No thread can start once the main thread has ended.
        with contextlib.suppress(RuntimeError):
            helping.extend(self._pool.submit(self._run, operation, left) for _ in range(helpers))
        self._run(operation, left)
        for helper in helping:
            if not helper.cancel():  # a helper that has not started need not be waited for
                helper.result()
        return wanted.of_array(result)

    def _run(self, operation: Operation, left: Iterator[tuple[FloatArray, FloatArray]]) -> None:
        nodes = self.plan.nodes
        work = np.empty(self.plan.width)
        for row, answer in left:
            self._combine(operation, row, work)
            answer[nodes:] = work[: self.plan.items]
            work.astype(answer.dtype, copy=False).take(
                self.plan.place, out=answer[:nodes], mode=_UNCHECKED
            )

    def _combine(
        self, operation: Operation, row: FloatArray, work: npt.NDArray[np.float64]
    ) -> None:
        """Fill the work row, as :mod:`genlm.core.trie.pairing` describes."""
        plan, combine = self.plan, operation.of(np)
        work[: plan.items] = row
        first = slice(plan.items, plan.items + len(plan.first))
        work[: plan.items].take(plan.first, out=work[first], mode=_UNCHECKED)
        for step in plan.rounds:
            others = work.take(step.other, mode=_UNCHECKED)
            combine(work[step.new], others, out=work[step.results])
        values = work.take(plan.rest.values, mode=_UNCHECKED)
        combine.reduceat(values, plan.rest.starts, out=work[plan.rest.results])

    @property
    def _cores(self) -> int:
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._cores, thread_name_prefix="genlm-trie")


# The allocator itself keeps smaller blocks. Larger ones would occupy too much memory.
_MIN_BLOCK_BYTES, _MAX_BLOCK_BYTES = 4 << 20, 256 << 20


class Recycler:
    """Makes arrays for results, in the memory of the last one that was released if that fits.

    A large block goes back to the operating system when it is freed. The system then clears every
    page of the next block, which takes as long as a batch of sums. So one block is kept.
    """

    def __init__(self) -> None:
        # The methods of a deque are atomic.
        self._spare: deque[npt.NDArray[np.uint8]] = deque(maxlen=1)

    def empty(self, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
        """Like ``np.empty``. The memory is free again when the array and all its views are gone."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if not _MIN_BLOCK_BYTES <= size <= _MAX_BLOCK_BYTES:
            return np.empty(shape, dtype)
        try:
            block = self._spare.pop()
        except IndexError:
            block = np.empty(size, np.uint8)
        if not size <= block.nbytes <= 2 * size:
            block = np.empty(size, np.uint8)
        return np.asarray(_Lease(block, self._spare, block[:size].view(dtype).reshape(shape)))


class _Lease:
    """The base of a result's array. It returns the block when the last array on it has been
    freed."""

    def __init__(
        self, block: npt.NDArray[Any], home: deque[npt.NDArray[Any]], array: npt.NDArray[Any]
    ) -> None:
        self._block, self._home = block, home
        self.__array_interface__ = array.__array_interface__

    def __del__(self) -> None:
        self._home.append(self._block)
