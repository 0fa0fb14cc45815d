"""The row pool: key/value state of many sequences, one row each, preallocated and written in
place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from genlm.hf.costs import costs_of
from genlm.hf.layout import Layout
from genlm.hf.upload import Indices, Places, Upload

#: Keys and values of one layer, ``[1, heads, positions, head_dim]`` each.
LayerStates = tuple[torch.Tensor, torch.Tensor]


class PoolLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers ships no types
    """One layer of the pool: keys and values ``[rows, heads, columns, head_dim]``.

    Sliding-window layers keep all columns too, so that any prefix can be forked: masks apply the
    window.
    """

    is_sliding = False

    def __init__(self, pool: RowPool, index: int) -> None:
        super().__init__()
        self._pool = pool
        self._index = index

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rows, columns = self._pool.rows, self._pool.columns
        # Zeros, not garbage: a masked column still takes part in the product with the values, and 0
        # * nan is nan.
        self.keys = key_states.new_zeros(rows, key_states.shape[1], columns, key_states.shape[-1])
        self.values = value_states.new_zeros(
            rows, value_states.shape[1], columns, value_states.shape[-1]
        )
        self.is_initialized = True
        for states in (self.keys, self.values):
            self._pool.bytes_per_column += states.shape[1] * states.shape[3] * states.element_size()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        layout = self._pool.layout
        layout.write(self.keys, key_states, self._index, 0)
        layout.write(self.values, value_states, self._index, 1)
        return layout.read(self.keys), layout.read(self.values)

    def get_seq_length(self) -> int:
        return self._pool.layout.past

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._pool.layout.past + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def resize(self, rows: int, columns: int, kept: Places) -> None:
        """Move the rows ``kept`` to the front of new tensors."""
        if self.is_initialized:
            self.keys = _resized(self.keys, rows, columns, kept)
            self.values = _resized(self.values, rows, columns, kept)

    def fork(self, sources: Indices, targets: Indices, columns: int) -> None:
        """Copy the first ``columns`` columns of rows ``sources`` to rows ``targets``."""
        if self.is_initialized:
            for states in (self.keys, self.values):
                part, device = states[:, :, :columns], states.device
                if costs_of(device).row_by_row:
                    for source, target in zip(sources.values, targets.values, strict=True):
                        part[target].copy_(part[source])
                else:
                    forked = part.index_select(0, sources.on(device))
                    part.index_copy_(0, targets.on(device), forked)

    def spread(self, source: LayerStates, slots: Indices, size: int) -> None:
        """Copy the first positions of a trunk to the front of rows."""
        for states, copied in zip((self.keys, self.values), source, strict=True):
            device, front = states.device, copied[:, :, :size]
            if costs_of(device).row_by_row:
                for slot in slots.values:
                    states[slot : slot + 1, :, :size] = front
            else:
                states[slots.on(device), :, :size] = front

    def shift(self, slots: Indices, by: int, columns: int) -> None:
        """Move columns of rows from ``by`` on to their front."""
        for states in (self.keys, self.values):
            at = slots.on(states.device)
            states[at, :, :columns] = states[at, :, by : by + columns]  # indices copy


class RowPool(Cache):  # type: ignore[misc]  # transformers ships no types
    """All layers of the pool, as transformers' models see a cache.

    Attributes:
        rows, columns: The size of every layer.
        bytes_per_column: Of one position of one row over all layers; 0 before the first forward.
        layout: Which rows and columns the running forward reads and writes.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.columns = 0
        self.bytes_per_column = 0
        self.layout: Layout
        super().__init__(layers=[])

    # Rows and columns differ in every forward: torch.compile would compile it again and again.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        while len(self.layers) <= layer_idx:
            self.layers.append(PoolLayer(self, len(self.layers)))
        keys, values = self.layers[layer_idx].update(key_states, value_states)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.layout.past

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.layout.past + query_length, 0

    def forget_layers(self) -> None:
        """Be as before the first forward."""
        self.layers.clear()
        self.bytes_per_column = 0

    @torch.inference_mode()
    def resize(self, rows: int, columns: int, kept: Sequence[int] = ()) -> None:
        """Change the size; the rows ``kept`` become rows 0, 1, ... One layer at a time, so that
        memory peaks low."""
        self.rows, self.columns = rows, columns
        moved = Places(kept, Upload())
        for layer in self.layers:
            layer.resize(rows, columns, moved)

    @torch.inference_mode()
    def fork(self, sources: Sequence[int], targets: Sequence[int], columns: int) -> None:
        """Copy the first ``columns`` columns of rows ``sources`` to rows ``targets``."""
        upload = Upload()
        from_rows, to_rows = upload.add(sources), upload.add(targets)
        for layer in self.layers:
            layer.fork(from_rows, to_rows, columns)

    @torch.inference_mode()
    def spread(self, source: Sequence[LayerStates], slots: Sequence[int], size: int) -> None:
        """Copy the first positions of a trunk to the front of rows."""
        rows = Upload().add(slots)
        for layer, states in zip(self.layers, source, strict=True):
            layer.spread(states, rows, size)

    @torch.inference_mode()
    def shift(self, slots: Sequence[int], by: int, columns: int) -> None:
        """Move columns of rows from ``by`` on to their front."""
        moved = Upload().add(slots)
        for layer in self.layers:
            layer.shift(moved, by, columns)

    @torch.inference_mode()
    def blank(self, slot: int, first: int) -> None:
        """Make a row zero from a column on."""
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys[slot, :, first:] = 0
                layer.values[slot, :, first:] = 0

    @torch.inference_mode()
    def new_trunk(self, size: int) -> list[LayerStates]:
        """Memory for ``size`` positions that belong to no row."""
        return [
            (
                layer.keys.new_empty(1, layer.keys.shape[1], size, layer.keys.shape[3]),
                layer.values.new_empty(1, layer.values.shape[1], size, layer.values.shape[3]),
            )
            for layer in self.layers
        ]

    def row(self, slot: int) -> list[LayerStates]:
        """One row of every layer; what is written to them is written to the row."""
        rows = slice(slot, slot + 1)
        return [(layer.keys[rows], layer.values[rows]) for layer in self.layers]


@torch.inference_mode()
def copy_front(source: Sequence[LayerStates], target: Sequence[LayerStates], size: int) -> None:
    """Copy the first positions of every layer."""
    for layer, other in zip(target, source, strict=True):
        for states, copied in zip(layer, other, strict=True):
            states[:, :, :size] = copied[:, :, :size]


def _resized(states: torch.Tensor, rows: int, columns: int, kept: Places) -> torch.Tensor:
    fresh = states.new_zeros(rows, states.shape[1], columns, states.shape[3])
    moved = states[kept.on(states.device), :, :columns]
    fresh[: len(moved), :, : moved.shape[2]] = moved
    return fresh
