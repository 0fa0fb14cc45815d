"""The layout of a step of constant shape: one token for each of some slots."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat

import torch

from genlm.hf.layout import Layout, additive
from genlm.hf.patterns import Pattern
from genlm.hf.upload import on_host


class StaticInputs:
    """The inputs of a step of constant shape. They stay at the same addresses, from which a
    recorded step reads them.

    Args:
        rows: How many tokens the step has.
        device: What computes.

    Attributes:
        ids, positions, slots: The id, position and slot of each token, ``[rows]`` int64.
        unused_mask: ``[rows, 1, 1, 1]``. A mask of four dimensions keeps the model from making one;
            attention takes the layout's mask.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._all = torch.zeros(3, rows, dtype=torch.long, device=device)
        self.ids, self.positions, self.slots = self._all
        self.unused_mask = torch.zeros(rows, 1, 1, 1, dtype=torch.bool, device=device)

    def fill(self, ids: Sequence[int], positions: Sequence[int], slots: Sequence[int]) -> None:
        """Set all inputs, in one copy to the device. Unused rows repeat the first one: they write
        the same values to its slot, and their logits are ignored."""
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
    computed from the positions hides later columns. So the operators of a forward, and the memory
    that they use, depend only on the number of rows and columns.

    Args:
        inputs: The tokens' positions and slots.
        patterns: What each layer attends to.
        width: How many columns are read.

    Attributes:
        groups: This layout itself, since all slots are one group of attention.
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
        """The pattern of positions that a layer attends to."""
        return self._patterns[layer]

    def own(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of these slots, which :meth:`read` has already selected."""
        return key, value

    def gather(self, query: torch.Tensor) -> torch.Tensor:
        """``[rows, heads, 1, dim]``, as it is."""
        return query

    def scatter(self, output: torch.Tensor) -> torch.Tensor:
        """``[rows, 1, ...]`` to ``[rows, ...]``."""
        return output.flatten(0, 1)

    def mask(self, pattern: Pattern, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An additive mask, ``[rows, 1, 1, width]``, made once for all layers: each forward has its
        own layout."""
        key = (pattern, dtype)
        if key not in self._masks:
            columns = torch.arange(self._width, device=device)
            allowed = pattern.allowed(self._positions[:, None, None, None], columns)
            self._masks[key] = additive(allowed, dtype)
        return self._masks[key]
