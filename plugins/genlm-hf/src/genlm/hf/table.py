"""The table: carries out what the planner decides, in the tensors of the pool."""

from __future__ import annotations

import torch

from genlm.hf.pool import SlotPool
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
from genlm.kit.segments import Segment, Slot, Trunk


class PoolTable:
    """A pool of slots and the trunks beside it, as a :class:`~genlm.kit.kv.commands.Table`.

    Args:
        pool: The tensors.
        budget: The most bytes that pool and trunks may take.
    """

    def __init__(self, pool: SlotPool, budget: int) -> None:
        self._pool = pool
        self._budget = budget

    def limit(self, used: int) -> int:
        """The most positions; before the first forward, a number so large that it is no limit."""
        return self._budget // max(self._pool.bytes_per_column, 1)

    @torch.inference_mode()
    def do(self, command: Command) -> None:
        """Raises: torch.OutOfMemoryError: the device's memory is full."""
        pool = self._pool
        match command:
            case Resize(slots, columns, kept):
                pool.resize(slots, columns, kept)
            case NewTrunk(trunk):
                trunk.layers = pool.new_trunk(trunk.size)
            case Copy(source, (Trunk() as trunk,), size):
                self._states(trunk).copy_front(self._states(source), size)
            case Copy(trunk, slots, size):
                indices = [slot.index for slot in slots if isinstance(slot, Slot)]
                pool.spread(self._states(trunk), indices, size)
            case Fork(sources, targets, columns):
                pool.fork(
                    [slot.index for slot in sources], [slot.index for slot in targets], columns
                )
            case Shift(slots, by, columns):
                pool.shift([slot.index for slot in slots], by, columns)
            case Join(trunk, below, size):
                trunk.layers = self._states(trunk).joined(self._states(below), size)
            case Blank(slot, first):
                pool.blank(slot.index, first)

    def _states(self, segment: Segment) -> States:
        if isinstance(segment, Slot):
            return self._pool.slot(segment.index)
        assert isinstance(segment, Trunk)
        assert isinstance(segment.layers, States)
        return segment.layers
