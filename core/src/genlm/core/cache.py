"""The output cache: computed rows, of which the least recently used are evicted first."""

from __future__ import annotations

import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

from genlm.core.copies import copies_of
from genlm.core.types import Query

if TYPE_CHECKING:
    import torch

#: The most bytes that each token id of a context takes: an object of 32 bytes, a place of 8 bytes
#: in a block and another in the tuple of all ids, and its share of the block. It is less if the
#: objects belong to the program, or if contexts share blocks.
ID_BYTES = 50

#: The bytes that the objects of a row and of its query take besides, measured: in a small
#: vocabulary they are as many as the row's own.
ENTRY_BYTES = 1100


class OutputCache:
    """Rows by key, bounded by number and by bytes. Safe to use from any thread.

    What goes in and what comes out are copies: no caller can change what another one gets. A forked
    child finds nothing.

    Args:
        maxsize: The most rows kept; 0 keeps none, ``None`` means no limit.
        move_to_cpu: Keep rows in main memory; they come back on the device they were computed on.
        max_bytes: The most bytes kept, of rows, their objects (1,100 bytes a row) and the ids of
            their contexts (up to 50 bytes each); ``None`` means no limit.
    """

    def __init__(
        self,
        maxsize: int | None = 1000,
        move_to_cpu: bool = False,
        max_bytes: int | None = 512 << 20,
    ) -> None:
        self.maxsize = maxsize
        self.max_bytes = max_bytes
        self.move_to_cpu = move_to_cpu
        self.hits = 0
        # For each key: the row, the device that it came from, and its bytes.
        self._rows: OrderedDict[Hashable, tuple[torch.Tensor, torch.device, int]] = OrderedDict()
        #: The bytes that the rows, their objects and the ids of their contexts take.
        self.nbytes = 0
        #: Replaced whenever rows are dropped on purpose. A row computed under an older generation
        #: must not be kept.
        self.generation = 0
        # Re-entrant, because comparing keys runs Python code. Between any two lines of it, a signal
        # handler may look up or drop rows, or wait while the engine thread stores some; peek() and
        # drop() allow for that. Signal handlers run on the main thread, put() on the engine thread.
        self.lock = threading.RLock()
        self._pid = os.getpid()

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._rows and not self._forked()

    def get(self, key: Hashable) -> torch.Tensor | None:
        """A copy of the row of ``key``, now the most recently used; ``None`` if it is not here."""
        row = self.peek(key)
        return None if row is None else row.clone()

    def peek(self, key: Hashable, *, counted: bool = True) -> torch.Tensor | None:
        """The cached row of ``key`` itself, which the caller must copy before writing; ``None`` if
        it is not cached. If it is, and ``counted`` is true, ``hits`` grows by one."""
        # The usual case. It needs no lock, because no change by another thread can harm this
        # look-up.
        if not self._rows or key not in self._rows or self._forked():
            return None
        with self.lock:
            try:
                row, device, _ = self._rows[key]
                self._rows.move_to_end(key)
            except KeyError:  # the row was dropped meanwhile, perhaps between these two lines
                return None
            self.hits += counted
        return row if row.device == device else row.to(device)

    def put(self, rows: Iterable[tuple[Hashable, torch.Tensor]], generation: int) -> None:
        """Keep copies of rows, each with its key, unless they were computed under an older
        generation. A row larger than the whole cache is not kept."""
        # NumPy's integers may overflow.
        most = math.inf if self.max_bytes is None else int(self.max_bytes)
        kept: list[tuple[Hashable, torch.Tensor, int]] = []
        room = most
        for key, row in reversed([*rows]):  # from the last one, because the last rows would stay
            nbytes = row.nbytes
            if isinstance(key, Query):
                nbytes += ENTRY_BYTES + ID_BYTES * key.context.length
            if nbytes > most:
                continue
            room -= nbytes
            if room < 0 or len(kept) == self.maxsize:
                break
            kept.append((key, row, nbytes))
        kept.reverse()
        own = self._copies([row for _, row, _ in kept])
        with self.lock:
            if generation != self.generation:
                return
            for (key, row, nbytes), copy in zip(kept, own, strict=True):
                if (old := self._rows.pop(key, None)) is not None:
                    self.nbytes -= old[2]
                self._rows[key] = copy, row.device, nbytes
                self.nbytes += nbytes
            while (
                self.maxsize is not None and len(self._rows) > self.maxsize
            ) or self.nbytes > most:
                _, (_, _, gone) = self._rows.popitem(last=False)
                self.nbytes -= gone

    def _copies(self, rows: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        import torch

        if self.move_to_cpu and rows and rows[0].device.type != "cpu":
            rows = torch.stack([*rows]).cpu().unbind()  # waits for the device once
        return copies_of(rows)

    def clear(self) -> None:
        """Drop all rows."""
        self.drop(lambda key: True)

    def drop(self, condition: Callable[[Hashable], bool]) -> None:
        """Drop the rows whose key meets ``condition``, including rows that are still being
        computed."""
        if self._forked():
            return
        with self.lock:
            self.generation += 1
            # Iterating the OrderedDict itself would hash every key.
            for key in list(dict.__iter__(self._rows)):
                if condition(key) and (kept := self._rows.pop(key, None)) is not None:
                    self.nbytes -= kept[2]

    def _forked(self) -> bool:
        """Whether this process is a forked child, which needs no rows, and whose copy of the lock
        may never be released."""
        return os.getpid() != self._pid
