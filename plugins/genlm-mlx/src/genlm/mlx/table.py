"""The table: the KV cache of many contexts, in slots and trunks. The end of each context lies in a
slot of its own, which is written in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from genlm.kit.kv import commands
from genlm.kit.segments import Segment, Slot, Trunk
from genlm.mlx.cache_limit import CacheLimit
from genlm.mlx.chunk import LayerState
from genlm.mlx.layout import Layout
from genlm.mlx.runner import Runner
from genlm.mlx.windows import windows_of

#: If fewer than one in this many slots is a fork, each fork is copied alone. Otherwise the whole
#: table is copied at once, which costs less per slot in MLX, because no slot has to be sliced out.
SLOTS_PER_FORK = 6

#: A limit is kept until it exceeds the newly computed one by more than one part in this many.
LIMIT_SLACK_DIVISOR = 8


class TableLayer:
    """One layer, in the form of a cache of mlx-lm: keys and values ``[slots, heads, columns,
    dim]``.

    Each token of a forward pass is a sequence of its own.

    Attributes:
        index: The number of the layer.
        window: The most positions that a token attends to; ``None`` means all.
        keys, values: The layer's state.
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

    @property
    def dtype(self) -> Any:
        """The type of the values. Phi converts the result of attention to it."""
        return self.values.dtype

    def make_mask(self, N: int, return_array: bool = False, window_size: Any = None) -> None:
        """None: the layout decides what a token attends to."""
        if N != 1 or window_size not in (None, self.window):
            raise NotImplementedError("another window, or tokens that are laid out anew")

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[TableLayer, TableLayer]:
        """Write new keys and values. Returns this layer in place of keys and values, so that
        attention calls :meth:`attend`."""
        self._table.layout.write(self.state, self.index, (keys, values))
        return self, self

    def attend(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        return self._table.layout.attend(queries, self.state, self.index, scale, self.window, sinks)


class Table:
    """Slots of all layers, and trunks, as a :class:`~genlm.kit.kv.commands.Table`: it carries out
    the planner's commands.

    Args:
        runner: The model.
        max_bytes: The most bytes to keep besides the current batch and pinned contexts. For
            ``None`` see :class:`~genlm.mlx.cache_limit.CacheLimit`.

    Attributes:
        layers: The layers, given to the model as its cache.
        layout: Where tokens go; set only during a forward pass.
        in_hand: The positions of contexts that were placed earlier in the same call: the next batch
            must not take their room.
        position_bytes: What one position takes in all layers.
    """

    def __init__(self, runner: Runner, max_bytes: int | None) -> None:
        self.layout: Layout
        self.in_hand = 0
        self._cache_limit = CacheLimit(max_bytes)
        self._limit = 0  # the last limit, in positions
        cache = runner.empty_cache()
        runner.feed(cache, [0], [[0]])  # the size of a position is known only after this
        self.layers = [
            TableLayer(self, index, window, layer.keys[:0, :, :0], layer.values[:0, :, :0])
            for index, (layer, window) in enumerate(
                zip(cache, windows_of(runner.model, cache), strict=True)
            )
        ]
        self.evaluate()
        self.position_bytes: int = sum(
            state.shape[1] * state.shape[3] * state.itemsize
            for layer in self.layers
            for state in layer.state
        )

    def evaluate(self) -> None:
        """Evaluate the state."""
        mx.eval([layer.state for layer in self.layers])

    def limit(self, used: int) -> int:
        """The most positions: those of the current call, of pinned contexts, and a reserve. If the
        new limit is only a little lower than the last one, the last one stays, because the table is
        copied to shrink it."""
        used += self.in_hand
        limit = used + self._cache_limit.limit(used * self.position_bytes) // self.position_bytes
        if not limit <= self._limit <= limit + limit // LIMIT_SLACK_DIVISOR:
            self._limit = limit
        return self._limit

    def do(self, command: commands.Command) -> None:
        """Carry out a command, one layer at a time to keep the peak of memory low."""
        match command:
            case commands.Resize(slots, columns, kept):
                self._resize(slots, columns, kept)
                if not slots:
                    self._cache_limit.clear()
                    self._limit = 0
            case commands.NewTrunk(trunk):
                trunk.layers = [
                    tuple(_zeros(state, 1, trunk.size) for state in layer.state)
                    for layer in self.layers
                ]
            case commands.Copy(source, targets, size):
                self._copy(source, targets, size)
            case commands.Fork(sources, targets, columns):
                self._fork(
                    [slot.index for slot in sources], [slot.index for slot in targets], columns
                )
            case commands.Shift(slots, by, columns):
                indices = [slot.index for slot in slots]
                self._move(indices, indices, by, columns)
            case commands.Join(trunk, below, size):
                front = [[state[:, :, :size] for state in layer] for layer in below.layers]
                trunk.layers = _joined([front, trunk.layers])
            case commands.Blank(slot, first):
                for layer in self.layers:
                    for state in layer.state:
                        state[slot.index : slot.index + 1, :, first:] = 0
                    mx.eval(layer.state)

    def read(self, end: Segment, stop: int) -> list[LayerState]:
        """A copy of the first ``stop`` positions of the context that a segment ends."""
        return _joined(
            [
                [self._front(segment, layer, size) for layer in self.layers]
                for segment, size in end.parts(stop)
            ]
        )

    def _front(self, segment: Segment, layer: TableLayer, size: int) -> LayerState:
        """A copy of the first positions of a segment."""
        states, index = _place(segment, layer)
        # A slice would be a view, and keep the whole table alive.
        taken = mx.array([index], mx.int32)
        keys, values = (state[:, :, :size][taken] for state in states)
        mx.eval(keys, values)
        return keys, values

    def _copy(self, source: Segment, targets: Sequence[Segment], size: int) -> None:
        for layer in self.layers:
            fronts = self._front(source, layer, size)
            for states, index in (_place(target, layer) for target in targets):
                for state, front in zip(states, fronts, strict=True):
                    state[index : index + 1, :, :size] = front
                mx.eval(states)

    def _resize(self, slots: int, columns: int, kept: Sequence[int]) -> None:
        taken = mx.array(kept, mx.int32)
        for layer in self.layers:
            layer.keys, layer.values = (
                _resized(state, slots, columns, taken) for state in layer.state
            )
            mx.eval(layer.state)

    def _fork(self, sources: Sequence[int], targets: Sequence[int], columns: int) -> None:
        slots = len(self.layers[0].keys)
        if SLOTS_PER_FORK * len(targets) < slots:
            self._move(sources, targets, 0, columns)
            return
        order = list(range(slots))
        for source, target in zip(sources, targets, strict=True):
            order[target] = source
        taken = mx.array(order, mx.int32)
        for layer in self.layers:
            layer.keys, layer.values = (state[taken] for state in layer.state)
            mx.eval(layer.state)

    def _move(
        self, sources: Sequence[int], targets: Sequence[int], start: int, columns: int
    ) -> None:
        """Copy the columns from ``start`` on to the front of slots."""
        taken = mx.array(sources, mx.int32)
        for layer in self.layers:
            for state in layer.state:
                # The columns are copied out first. If a view of the table were still in use, MLX
                # would copy the whole table.
                moved = state[:, :, start : start + columns][taken]
                mx.eval(moved)
                for at, target in enumerate(targets):
                    state[target : target + 1, :, :columns] = moved[at : at + 1]
            mx.eval(layer.state)


def _place(segment: Segment, layer: TableLayer) -> tuple[LayerState, int]:
    """The tensors that hold a layer's state of a segment, and the index of its slot in them."""
    if isinstance(segment, Slot):
        return layer.state, segment.index
    assert isinstance(segment, Trunk)
    return segment.layers[layer.index], 0


def _joined(parts: Sequence[Sequence[Sequence[mx.array]]]) -> list[LayerState]:
    """The positions of all parts, concatenated."""
    states = []
    for layer in zip(*parts, strict=True):
        keys, values = (mx.concatenate(some, axis=2) for some in zip(*layer, strict=True))
        mx.eval(keys, values)
        states.append((keys, values))
    return states


def _zeros(like: mx.array, slots: int, columns: int) -> mx.array:
    return mx.zeros((slots, like.shape[1], columns, like.shape[3]), like.dtype)


def _resized(state: mx.array, slots: int, columns: int, taken: mx.array) -> mx.array:
    fresh = _zeros(state, slots, columns)
    width = min(columns, state.shape[2])
    if taken.size and width:
        fresh[: taken.size, :, :width] = state[:, :, :width][taken]
    return fresh
