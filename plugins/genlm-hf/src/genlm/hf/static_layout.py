"""The layout of a step of constant shape: one token for each of some slots."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat

import torch

from genlm.hf.layout import Layout, additive
from genlm.hf.patterns import Pattern
from genlm.hf.upload import on_host


class StaticInputs:
    """What a step of constant shape reads, in memory that stays: a recorded step reads it there.

    Args:
        rows: How many tokens the step has.
        device: What computes.

    Attributes:
        ids, positions, slots: Of each token, ``[rows]`` int64.
        unused_mask: ``[rows, 1, 1, 1]``: of four dimensions, so that the model makes no mask of its
            own; the layout has them.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._all = torch.zeros(3, rows, dtype=torch.long, device=device)
        self.ids, self.positions, self.slots = self._all
        self.unused_mask = torch.zeros(rows, 1, 1, 1, dtype=torch.bool, device=device)

    def fill(self, ids: Sequence[int], positions: Sequence[int], slots: Sequence[int]) -> None:
        """Set them, in one copy. Rows that are left over repeat the first one: they write to its
        slot what it writes itself, and nobody reads their logits."""
        more = len(self.ids) - len(ids)
        values = [
            value
            for column in (ids, positions, slots)
            for value in chain(column, repeat(column[0], more))
        ]
        device = self._all.device
        host = on_host(values, device).view_as(self._all)
        self._all.copy_(host, non_blocking=device.type == "cuda")


class StaticLayout(Layout):
    """One token for each of some slots, ``[rows, 1]``. Slots and positions are tensors, and a mask
    made of the positions hides the columns beyond them. So the operators of a forward, and the
    memory that they read and write, depend on the number of rows and columns alone.

    Args:
        inputs: The tokens' positions and slots.
        patterns: What each layer attends to.
        width: How many columns are read.

    Attributes:
        groups: This: all slots are one group of attention.
    """

    size = 1

    def __init__(self, inputs: StaticInputs, patterns: Sequence[Pattern], width: int) -> None:
        self._positions, self._slots = inputs.positions, inputs.slots
        self._patterns = patterns
        self._width = width
        self.groups = (self,)
        self._masks: dict[tuple[Pattern, torch.dtype], torch.Tensor] = {}

    def write(self, states: torch.Tensor, new: torch.Tensor, layer: int, which: int) -> None:
        states[self._slots, :, self._positions] = new.squeeze(2)

    def read(self, states: torch.Tensor) -> torch.Tensor:
        return states[:, :, : self._width].index_select(0, self._slots)

    def pattern(self, layer: int) -> Pattern:
        """What a layer attends to."""
        return self._patterns[layer]

    def own(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of these slots: what was read."""
        return key, value

    def gather(self, query: torch.Tensor) -> torch.Tensor:
        """``[rows, heads, 1, dim]``, as it is."""
        return query

    def scatter(self, output: torch.Tensor) -> torch.Tensor:
        """``[rows, 1, ...]`` to ``[rows, ...]``."""
        return output.flatten(0, 1)

    def mask(self, pattern: Pattern, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Additive ``[rows, 1, 1, width]``, made once in a forward: a layout lives for one."""
        key = (pattern, dtype)
        if key not in self._masks:
            columns = torch.arange(self._width, device=device)
            allowed = pattern.allowed(self._positions[:, None, None, None], columns)
            self._masks[key] = additive(allowed, dtype)
        return self._masks[key]
