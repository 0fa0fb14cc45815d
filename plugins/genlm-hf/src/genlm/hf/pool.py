"""The slot pool: the KV cache of many sequences, one slot each, preallocated and written in
place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from genlm.hf.layout import Layout
from genlm.hf.slabs import Part, Slab, States
from genlm.hf.upload import Places, Upload

#: All layers lie in about this many tensors. With fewer, slots are moved in fewer kernels. With
#: more, less memory is needed for two copies while the pool grows.
SLAB_COUNT = 4


class PoolLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers ships no types
    """One layer of the pool: keys and values ``[slots, heads, columns, head_dim]``.

    Sliding-window layers keep all columns too, so that any prefix can be forked: masks apply the
    window.
    """

    is_sliding = False

    def __init__(self, pool: SlotPool, index: int) -> None:
        super().__init__()
        self._pool = pool
        self._index = index

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self._pool.begin((self._index, "keys"), key_states)
        self._pool.begin((self._index, "values"), value_states)
        self.is_initialized = True

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


class SlotPool(Cache):  # type: ignore[misc]  # transformers ships no types
    """All layers of the pool, as a cache of transformers' models.

    Attributes:
        slots, columns: The size of every layer.
        bytes_per_column: The bytes of one position of one slot, over all layers; 0 before the first
            forward.
        layout: Which slots and columns the running forward reads and writes.
        resizes: How often the tensors have been replaced.
    """

    def __init__(self) -> None:
        self.resizes = 0
        self.slots = 0
        self.columns = 0
        self.bytes_per_column = 0
        self.layout: Layout
        self._slabs: list[Slab] = []
        super().__init__(layers=[])

    # Slots and columns differ in every forward: torch.compile would compile it again and again.
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
        """Return to the state before the first forward."""
        self.layers.clear()
        self._slabs.clear()
        self.bytes_per_column = 0

    def begin(self, part: Part, states: torch.Tensor) -> None:
        """Allocate the keys or values of a layer that the first forward has reached. They get a
        slab of their own, since the layers above are not known yet."""
        self._hold(self._empty([part], states))
        self.bytes_per_column += states.shape[1] * states.shape[3] * states.element_size()

    def _empty(self, parts: Sequence[Part], like: torch.Tensor) -> Slab:
        # Zeros instead of uninitialised memory: a masked column still takes part in the product
        # with the values, and 0 * nan is nan.
        _, heads, _, dim = like.shape
        with torch.inference_mode(False):  # forwards in any of PyTorch's modes write to it
            states = like.new_zeros(len(parts), self.slots, heads, self.columns, dim)
        return Slab(parts, states)

    def _hold(self, slab: Slab) -> None:
        self._slabs.append(slab)
        for (layer, name), states in zip(slab.parts, slab.states, strict=True):
            setattr(self.layers[layer], name, states)

    @torch.inference_mode()
    def resize(self, slots: int, columns: int, kept: Sequence[int] = ()) -> None:
        """Change the size. The slots ``kept`` become slots 0, 1, ... Slabs are replaced one after
        the other, so that little memory is needed twice."""
        self.slots, self.columns = slots, columns
        self.resizes += 1
        moved = Places(kept, Upload())
        self._slabs = []
        for parts in self._alike():
            self._hold(self._resized(parts, moved))

    def _resized(self, parts: Sequence[Part], kept: Places) -> Slab:
        old = [getattr(self.layers[layer], name) for layer, name in parts]
        slab = self._empty(parts, old[0])
        for fresh, states in zip(slab.states, old, strict=True):
            moved = states[kept.on(states.device), :, : self.columns]
            fresh[: len(moved), :, : moved.shape[2]] = moved
        return slab

    def _alike(self) -> list[list[Part]]:
        """The parts that go into each slab: of one shape, and about equally many in each."""
        kinds: dict[object, list[Part]] = {}
        for at, layer in enumerate(self.layers):
            for name in ("keys", "values") if layer.is_initialized else ():
                states = getattr(layer, name)
                kind = states.shape[1], states.shape[3], states.dtype, states.device
                kinds.setdefault(kind, []).append((at, name))
        size = -(-2 * len(self.layers) // SLAB_COUNT)
        return [
            parts[first : first + size]
            for parts in kinds.values()
            for first in range(0, len(parts), size)
        ]

    @torch.inference_mode()
    def fork(self, sources: Sequence[int], targets: Sequence[int], columns: int) -> None:
        """Copy the first ``columns`` columns of slots ``sources`` to slots ``targets``."""
        upload = Upload()
        from_slots, to_slots = upload.add(sources), upload.add(targets)
        for slab in self._slabs:
            slab.fork(from_slots, to_slots, columns)

    @torch.inference_mode()
    def spread(self, source: States, slots: Sequence[int], size: int) -> None:
        """Copy the first positions of a trunk to the front of slots."""
        indices = Upload().add(slots)
        for slab, states in zip(self._slabs, source.slabs, strict=True):
            slab.spread(states, indices, size)

    @torch.inference_mode()
    def shift(self, slots: Sequence[int], by: int, columns: int) -> None:
        """Move the columns of slots from ``by`` on to their front."""
        moved = Upload().add(slots)
        for slab in self._slabs:
            slab.shift(moved, by, columns)

    @torch.inference_mode()
    def blank(self, slot: int, first: int) -> None:
        """Fill a slot with zeros from the column ``first`` on."""
        for slab in self._slabs:
            slab.states[:, slot, :, first:] = 0

    def new_trunk(self, size: int) -> States:
        """Memory for ``size`` positions that belong to no slot."""
        return States([slab.empty(size) for slab in self._slabs])

    def slot(self, index: int) -> States:
        """A view of one slot of every layer."""
        return States([Slab(slab.parts, slab.states[:, index : index + 1]) for slab in self._slabs])
