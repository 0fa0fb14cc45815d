"""Slabs: the KV cache of many layers in few tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from genlm.hf.costs import costs_of
from genlm.hf.upload import Indices

#: A copy moves the slots of several layers at a time, as many as fit into this many bytes, but at
#: least one layer.
COPIED_BYTES = 1 << 28

#: The index of a layer, and ``keys`` or ``values``.
Part = tuple[int, str]


class Slab:
    """Keys or values of some layers in one tensor, so that one kernel moves the slots of all these
    layers.

    Args:
        parts: The layers, and whether it holds their keys or their values.
        states: ``[parts, slots, heads, columns, head_dim]``.
    """

    def __init__(self, parts: Sequence[Part], states: torch.Tensor) -> None:
        self.parts = parts
        self.states = states

    def fork(self, sources: Indices, targets: Indices, columns: int) -> None:
        """Copy the first ``columns`` columns of slots ``sources`` to slots ``targets``."""
        fronts, device = self.states[:, :, :, :columns], self.states.device
        if costs_of(device).slot_by_slot:
            for source, target in zip(sources.values, targets.values, strict=True):
                fronts.select(1, target).copy_(fronts.select(1, source))
        else:
            for some in _pieces(fronts, len(sources.values)):
                forked = some.index_select(1, sources.on(device))
                some.index_copy_(1, targets.on(device), forked)

    def spread(self, source: Slab, slots: Indices, size: int) -> None:
        """Copy the first positions of a trunk to the front of slots."""
        fronts, front = self.states[:, :, :, :size], source.states[:, :, :, :size]
        if costs_of(fronts.device).slot_by_slot:
            for slot in slots.values:
                fronts[:, slot : slot + 1] = front
        else:
            fronts[:, slots.on(fronts.device)] = front

    def shift(self, slots: Indices, by: int, columns: int) -> None:
        """Move the columns of slots from ``by`` on to their front."""
        at = slots.on(self.states.device)
        for some in _pieces(self.states[:, :, :, : by + columns], len(slots.values)):
            some[:, at, :, :columns] = some[:, at, :, by:]  # indexing copies

    def empty(self, size: int) -> Slab:
        """A new slab for the same layers, with one slot of ``size`` positions."""
        parts, _, heads, _, dim = self.states.shape
        with torch.inference_mode(False):  # forwards in any of PyTorch's modes write to it
            states = self.states.new_empty(parts, 1, heads, size, dim)
        return Slab(self.parts, states)


def _pieces(states: torch.Tensor, slots: int) -> Sequence[torch.Tensor]:
    """A slab in pieces, so that a copy of some slots takes little memory."""
    _, _, heads, columns, dim = states.shape
    each = max(slots * heads * columns * dim * states.element_size(), 1)
    return torch.split(states, max(COPIED_BYTES // each, 1))


class States(list[tuple[torch.Tensor, torch.Tensor]]):
    """Keys and values of every layer, ``[slots, heads, columns, head_dim]`` each.

    Args:
        slabs: The tensors that hold them.
    """

    def __init__(self, slabs: Sequence[Slab]) -> None:
        self.slabs = slabs
        parts = {
            part: states
            for slab in slabs
            for part, states in zip(slab.parts, slab.states, strict=True)
        }
        super().__init__((parts[at, "keys"], parts[at, "values"]) for at in range(len(parts) // 2))

    @torch.inference_mode()
    def copy_front(self, source: States, size: int) -> None:
        """Copy the first positions of other states into these."""
        for slab, other in zip(self.slabs, source.slabs, strict=True):
            slab.states[:, :, :, :size] = other.states[:, :, :, :size]

    def joined(self, below: States, size: int) -> States:
        """New states: the first positions of other states, followed by these."""
        # Forwards in any of PyTorch's modes write to it.
        with torch.inference_mode(False), torch.no_grad():
            return States(
                [
                    Slab(slab.parts, torch.cat([other.states[:, :, :, :size], slab.states], 3))
                    for slab, other in zip(self.slabs, below.slabs, strict=True)
                ]
            )
