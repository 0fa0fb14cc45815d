"""AsyncTokenCharacterTrie: sums and maxima for many coroutines in one kernel call."""

from __future__ import annotations

import asyncio
import operator
import os
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from attrs import frozen

from genlm.core.checks import safe_repr
from genlm.core.errors import InvalidInputError, InvalidOptionError
from genlm.core.runtime.batcher import Batcher, Executor
from genlm.core.runtime.lanes import Lane
from genlm.core.runtime.results import evaluate_isolated
from genlm.core.trie.trie import ParallelTokenCharacterTrie, TokenCharacterTrie
from genlm.core.trie.weights import MAX, SUM, Operation


@frozen(eq=False)
class CombineRequest:
    """One vector of weights to combine.

    No two requests are equal: comparing their vectors would cost more than it saves.
    """

    operation: Operation
    weights: Any


#: Makes the caller's result from the answer of its only request. Requests are never equal, so no
#: other caller shares the answer.
_THE_ANSWER = operator.itemgetter(0)

#: Sums and maxima are computed by different kernel calls.
SUMS, MAXIMA = Lane("sums"), Lane("maxima")


class TrieExecutor(Executor):
    """Answers all requests of a batch with one kernel call. Lives on the batcher's thread."""

    def __init__(self, trie: TokenCharacterTrie) -> None:
        self.trie = trie

    def lane(self, request: CombineRequest) -> Lane:
        return SUMS if request.operation is SUM else MAXIMA

    def step(
        self, new_requests: Sequence[CombineRequest], dropped: Sequence[CombineRequest] = ()
    ) -> Iterable[tuple[CombineRequest, Any]]:
        """Answer all of ``new_requests``, which ask for the same operation. Wrong ones fail
        alone."""
        return evaluate_isolated(self._combine, new_requests)

    def close(self) -> None:
        """Nothing to release."""

    def _combine(self, requests: Sequence[CombineRequest]) -> list[tuple[CombineRequest, Any]]:
        is_sum = requests[0].operation is SUM
        combine = self.trie.batch_weight_sum if is_sum else self.trie.batch_weight_max
        results = combine([request.weights for request in requests])
        return list(zip(requests, results, strict=True))


class AsyncTokenCharacterTrie:
    """A trie that answers concurrent calls together.

    Calls that wait at the same time, from any number of event loops, become one call of the trie
    for sums and one for maxima. A call with wrong weights fails alone. The results of one batch are
    rows of one array.

    Args:
        trie: The trie that computes.

    Raises:
        InvalidInputError: ``trie`` is not a trie.
    """

    #: The class that :meth:`from_vocab` builds for each backend.
    tries: ClassVar[Mapping[str, type[TokenCharacterTrie]]] = {
        "parallel": ParallelTokenCharacterTrie,
        "sequential": TokenCharacterTrie,
    }

    def __init__(self, trie: TokenCharacterTrie) -> None:
        if not isinstance(trie, TokenCharacterTrie):
            raise InvalidInputError(
                f"give a TokenCharacterTrie, or call from_vocab(vocab); got {safe_repr(trie)}"
            )
        self.trie = trie
        # Re-entrant, because a signal handler may call shutdown() at any line.
        self._lock = threading.RLock()
        # The worker, and the finalizer that stops it when this trie is collected.
        self._worker: tuple[Batcher, weakref.finalize[[], AsyncTokenCharacterTrie]] | None = None
        self._pid = os.getpid()

    @classmethod
    def from_vocab(
        cls, vocab: Sequence[Any], backend: str = "parallel", **options: Any
    ) -> AsyncTokenCharacterTrie:
        """Build the trie, and this around it.

        Args:
            vocab: The vocabulary.
            backend: ``"parallel"`` computes on an accelerator if there is one, ``"sequential"`` on
                the CPU.
            options: Options of the trie.

        Raises:
            InvalidOptionError: ``backend`` is neither of these.
        """
        if backend not in [*cls.tries]:
            raise InvalidOptionError(f"backend must be 'parallel' or 'sequential'; got {backend!r}")
        return cls(cls.tries[backend](vocab, **options))

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy gets a worker thread of its own, since this one's thread ends with this object."""
        return type(self), (self.trie,)

    async def weight_sum(self, ws: Any) -> Any:
        """:meth:`TokenCharacterTrie.weight_sum`, together with other calls.

        Do not write into ``ws`` before the answer is there.
        """
        return await self._running().submit([CombineRequest(SUM, ws)], _THE_ANSWER)

    async def weight_max(self, ws: Any) -> Any:
        """:meth:`TokenCharacterTrie.weight_max`, together with other calls.

        Do not write into ``ws`` before the answer is there.
        """
        return await self._running().submit([CombineRequest(MAX, ws)], _THE_ANSWER)

    def start(self) -> None:
        """Start the worker thread. The first call does the same."""
        self._running()

    def shutdown(self) -> None:
        """End the worker thread. May be called twice; the next call starts a new thread.

        A call that still waits gets :class:`~genlm.core.errors.ModelClosedError`.
        """
        self._leave_parent()
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            batcher, finalizer = worker
            batcher.close()
            finalizer.detach()

    async def cleanup(self) -> None:
        """:meth:`shutdown`, without blocking the event loop."""
        await asyncio.to_thread(self.shutdown)

    def _running(self) -> Batcher:
        self._leave_parent()
        with self._lock:
            worker = self._worker
            if worker is None:
                executor = TrieExecutor(self.trie)
                batcher = Batcher(lambda: executor, name="genlm-trie")
                finalizer = weakref.finalize(self, batcher.stop)
                finalizer.atexit = False  # at the interpreter's exit, the batcher stops itself
                batcher.start()
                worker = self._worker = batcher, finalizer
            return worker[0]

    def _leave_parent(self) -> None:
        """Reset in a forked child, which has no worker thread, and whose copy of the lock may never
        be released."""
        if os.getpid() != self._pid:
            self._pid, self._lock, self._worker = os.getpid(), threading.RLock(), None
