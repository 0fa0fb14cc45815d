"""The table: the state of many contexts' tails, one row each, written in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from genlm.core.engines.segments import Row, Trunk
from genlm.mlx.layout import LayerState, Layout
from genlm.mlx.runner import Runner
from genlm.mlx.windows import windows_of

#: Columns are allotted in steps of this many.
COLUMN_STEP = 32


class TableLayer:
    """One layer, as mlx-lm's models see a cache: keys and values ``[slots, heads, columns, dim]``.

    Each token of a forward pass comes as a row of its own.

    Attributes:
        index: Its number.
        window: The most positions that a token attends to; ``None`` is all.
        keys, values: The state.
    """

    def __init__(
        self, table: Table, index: int, window: int | None, keys: mx.array, values: mx.array
    ) -> None:
        self._table = table
        self.index = index
        self.window = window
        self.keys = keys
        self.values = values

    @property
    def offset(self) -> mx.array:
        """The position of each token."""
        return self._table.layout.offsets

    @property
    def state(self) -> LayerState:
        return self.keys, self.values

    def make_mask(self, N: int, return_array: bool = False, window_size: Any = None) -> None:
        """None: the layout decides what a token attends to."""
        if N != 1 or window_size not in (None, self.window):
            raise NotImplementedError("another window, or tokens that are laid out anew")

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[TableLayer, TableLayer]:
        """Write new keys and values; gives itself, to be attended to."""
        self._table.layout.write(self.state, self.index, (keys, values))
        return self, self

    def attend(self, queries: mx.array, scale: float) -> mx.array:
        return self._table.layout.attend(queries, self.state, self.index, scale, self.window)


class Table:
    """Rows of all layers.

    Attributes:
        slots, columns: The size of every layer.
        layers: The layers, to be given to the model as its cache.
        layout: Where tokens go; there only while a forward pass is asked for.
    """

    def __init__(self, runner: Runner) -> None:
        self.slots: int = 0
        self.columns: int = 0
        self.layout: Layout
        cache = runner.empty_cache()
        runner.feed(cache, [0], [[0]])  # only then it is known what a position takes
        self.layers = [
            TableLayer(self, index, window, layer.keys[:0, :, :0], layer.values[:0, :, :0])
            for index, (layer, window) in enumerate(
                zip(cache, windows_of(runner.model), strict=True)
            )
        ]
        self.evaluate()
        self.position_bytes: int = sum(
            state.shape[1] * state.shape[3] * state.itemsize
            for layer in self.layers
            for state in layer.state
        )

    @property
    def nbytes(self) -> int:
        return self.slots * self.columns * self.position_bytes

    def evaluate(self) -> None:
        """Carry out what has been asked for."""
        mx.eval([layer.state for layer in self.layers])

    def resize(self, slots: int, columns: int, kept: Sequence[Row]) -> None:
        """Change the size; ``kept``, in order, become rows 0, 1, ... One layer at a time, so that
        memory peaks low."""
        taken = mx.array([row.slot for row in kept], mx.int32)
        width = min(columns, self.columns)
        for layer in self.layers:
            layer.keys, layer.values = (
                _resized(state, slots, columns, taken, width) for state in layer.state
            )
            mx.eval(layer.state)
        for slot, row in enumerate(kept):
            row.slot = slot
        self.slots, self.columns = slots, columns

    def fork(self, forks: Sequence[tuple[int, int]], columns: int) -> None:
        """Copy the first columns of rows to other rows: pairs of source and target."""
        if 2 * len(forks) < self.slots:
            sources, targets = zip(*forks, strict=True)
            self._move(sources, targets, 0, columns)
            return
        order = list(range(self.slots))
        for source, target in forks:
            order[target] = source
        taken = mx.array(order, mx.int32)
        for layer in self.layers:
            layer.keys, layer.values = (state[taken] for state in layer.state)
            mx.eval(layer.state)

    def shift(self, rows: Sequence[Row], columns: int) -> None:
        """Drop the first columns of rows."""
        slots = [row.slot for row in rows]
        self._move(slots, slots, columns, self.columns - columns)

    def _move(
        self, sources: Sequence[int], targets: Sequence[int], start: int, columns: int
    ) -> None:
        """Copy columns from ``start`` on to the front of rows."""
        taken = mx.array(sources, mx.int32)
        for layer in self.layers:
            for state in layer.state:
                # Apart first: a part of the table that is still held would have all of it copied.
                moved = state[:, :, start : start + columns][taken]
                mx.eval(moved)
                for at, target in enumerate(targets):
                    state[target : target + 1, :, :columns] = moved[at : at + 1]
            mx.eval(layer.state)

    # --- trunks -----------------------------------------------------------------------------------

    def new_trunk(self, size: int) -> list[LayerState]:
        """Memory for ``size`` positions that belong to no row."""
        return [
            (
                mx.zeros((1, layer.keys.shape[1], size, layer.keys.shape[3]), layer.keys.dtype),
                mx.zeros(
                    (1, layer.values.shape[1], size, layer.values.shape[3]), layer.values.dtype
                ),
            )
            for layer in self.layers
        ]

    def read(self, segment: Row | Trunk, columns: slice) -> list[LayerState]:
        """A copy of some positions."""
        copies = []
        for layer in self.layers:
            states = segment.layers[layer.index] if isinstance(segment, Trunk) else layer.state
            row = mx.array([segment.slot if isinstance(segment, Row) else 0], mx.int32)
            # Taken by an array: a slice would be a view, and keep all of the table.
            keys, values = (state[:, :, columns][row] for state in states)
            mx.eval(keys, values)
            copies.append((keys, values))
        return copies

    def to_row(self, trunk: Trunk, size: int, slot: int) -> None:
        """Copy the first positions of a trunk to a row."""
        for layer, states in zip(self.layers, trunk.layers, strict=True):
            for state, source in zip(layer.state, states, strict=True):
                state[slot : slot + 1, :, :size] = source[:, :, :size]
            mx.eval(layer.state)


def joined(parts: Sequence[Sequence[LayerState]]) -> list[LayerState]:
    """Positions one after the other."""
    if len(parts) == 1:
        return list(parts[0])
    states = [
        (mx.concatenate(keys, axis=2), mx.concatenate(values, axis=2))
        for keys, values in (zip(*layer, strict=True) for layer in zip(*parts, strict=True))
    ]
    mx.eval(states)
    return states


def allotted(columns: int) -> int:
    """How many columns are allotted for ``columns`` positions."""
    return -(-columns // COLUMN_STEP) * COLUMN_STEP


def _resized(state: mx.array, slots: int, columns: int, taken: mx.array, width: int) -> mx.array:
    fresh = mx.zeros((slots, state.shape[1], columns, state.shape[3]), state.dtype)
    if taken.size and width:
        fresh[: taken.size, :, :width] = state[:, :, :width][taken]
    return fresh
