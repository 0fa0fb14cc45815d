"""The table: carries out what the planner decides, in the tensors of the pool."""

from __future__ import annotations

import torch

from genlm.hf.pool import RowPool
from genlm.hf.slabs import States
from genlm.kit.kv.commands import (
    Blank,
    Command,
    Copy,
    Fork,
    Join,
    NewTrunk,
    Resize,
    Shift,
)
from genlm.kit.segments import Row, Segment, Trunk


class PoolTable:
    """A pool of rows and the trunks beside it, as :class:`~genlm.kit.kv.commands.Table`.

    Args:
        pool: The tensors.
        budget: The most bytes that they may take.
    """

    def __init__(self, pool: RowPool, budget: int) -> None:
        self._pool = pool
        self._budget = budget

    def limit(self, used: int) -> int:
        """The most positions; as good as no limit before the first forward."""
        return self._budget // max(self._pool.bytes_per_column, 1)

    @torch.inference_mode()
    def do(self, command: Command) -> None:
        """Raises: torch.OutOfMemoryError: the device's memory is full."""
        pool = self._pool
        match command:
            case Resize(rows, columns, kept):
                pool.resize(rows, columns, kept)
            case NewTrunk(trunk):
                trunk.layers = pool.new_trunk(trunk.size)
            case Copy(source, (Trunk() as trunk,), size):
                self._states(trunk).copy_front(self._states(source), size)
            case Copy(trunk, rows, size):
                slots = [row.slot for row in rows if isinstance(row, Row)]
                pool.spread(self._states(trunk), slots, size)
            case Fork(sources, targets, columns):
                pool.fork([row.slot for row in sources], [row.slot for row in targets], columns)
            case Shift(rows, by, columns):
                pool.shift([row.slot for row in rows], by, columns)
            case Join(trunk, below, size):
                trunk.layers = self._states(trunk).joined(self._states(below), size)
            case Blank(row, first):
                pool.blank(row.slot, first)

    def _states(self, segment: Segment) -> States:
        if isinstance(segment, Row):
            return self._pool.row(segment.slot)
        assert isinstance(segment, Trunk)
        assert isinstance(segment.layers, States)
        return segment.layers
