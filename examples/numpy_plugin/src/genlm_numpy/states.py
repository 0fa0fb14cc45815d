"""Key/value state of contexts: the core's planner says where it is and what is kept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from genlm.kit import kv
from genlm.kit.segments import Segment, Slot, Trunk
from genlm_numpy.network import Array, Network, attention

Placement = kv.Placement[kv.TokenSequence]


class Table:
    """Slots of equal length, and shared prefixes. It moves what the planner wants moved."""

    def __init__(self, network: Network, kept: int) -> None:
        self._slots = np.zeros((network.layers, 2, 0, 0, network.width), dtype=np.float32)
        self._kept = kept

    def limit(self, used: int) -> int:
        """The most positions; a larger batch is computed all the same."""
        return max(used, self._kept)

    def layers(self, segment: Segment) -> list[Array]:
        """The keys and values of each layer in a segment, ``[2, positions, width]``."""
        if isinstance(segment, Slot):
            return list(self._slots[:, :, segment.index])
        assert isinstance(segment, Trunk)
        return segment.layers

    def do(self, command: kv.Command) -> None:
        match command:
            case kv.Resize(slots, columns, kept):
                old = self._slots[:, :, list(kept), :columns]
                more = (0, slots - old.shape[2]), (0, columns - old.shape[3])
                self._slots = np.pad(old, [(0, 0), (0, 0), *more, (0, 0)])
            case kv.NewTrunk(trunk):
                layers, _, _, _, width = self._slots.shape
                trunk.layers = list(np.zeros((layers, 2, trunk.size, width), dtype=np.float32))
            case kv.Copy(source, targets, size):
                for target in targets:
                    self._copy(source, target, size)
            case kv.Fork(sources, targets, columns):
                for source, target in zip(sources, targets, strict=True):
                    self._copy(source, target, columns)
            case kv.Shift(slots, by, columns):
                for slot in slots:
                    self._copy(slot, slot, columns, first=by)
            case kv.Join(trunk, below, size):
                pairs = zip(below.layers, trunk.layers, strict=True)
                trunk.layers = [np.concatenate([a[:, :size], b], axis=1) for a, b in pairs]
            case kv.Blank(slot, first):
                self._slots[:, :, slot.index, first:] = 0

    def _copy(self, source: Segment, target: Segment, size: int, first: int = 0) -> None:
        for new, old in zip(self.layers(target), self.layers(source), strict=True):
            new[:, :size] = old[:, first : first + size]


class States:
    """Computes contexts, each from its longest known prefix."""

    def __init__(self, networks: dict[int, Network], kept: int, costs: kv.SharingCosts) -> None:
        self._networks = networks  # by version of the adapter
        self._table = Table(networks[0], kept)
        self.planner: kv.Planner[kv.TokenSequence] = kv.Planner(self._table, costs)

    def logits(self, sequences: Sequence[kv.TokenSequence]) -> Array:
        """The scores of what may follow each sequence."""
        rows: dict[int, Array] = {}
        for batch in self.planner.batches(sequences):
            for version in {one.sequence.version for one in batch}:
                some = [one for one in batch if one.sequence.version == version]
                rows |= self._forward(self._networks[version], some)
            # State with NaN is not committed, so it is given up.
            broken = {at for one in batch for at in one.indices() if np.isnan(rows[at][0])}
            self.planner.commit([one for one in batch if broken.isdisjoint(one.indices())])
        return np.stack([rows[at] for at in range(len(sequences))])

    def _forward(self, network: Network, batch: Sequence[Placement]) -> dict[int, Array]:
        """One forward over the unknown tokens of each sequence; the rows on its way, by index."""
        tokens = [token for one in batch for token in one.sequence.tokens[one.start :]]
        positions = [at for one in batch for at in range(one.start, one.sequence.length)]
        stops = np.cumsum([one.sequence.length - one.start for one in batch])

        def attend(layer: int, *new: Array) -> Array:
            parts = zip(batch, *(np.split(states, stops[:-1]) for states in new), strict=True)
            return np.concatenate([self._attend(layer, *part) for part in parts])

        wanted = {
            index: stop - one.sequence.length + at
            for one, stop in zip(batch, stops, strict=True)
            for index, at in one.rows()
        }
        rows = network.forward(tokens, positions, np.array([*wanted.values()]), attend)
        return dict(zip(wanted, rows, strict=True))

    def _attend(self, layer: int, one: Placement, query: Array, *new: Array) -> Array:
        """Write a sequence's new keys and values, then attend to all of its positions."""
        for segment, start, stop in one.segments(one.start, one.sequence.length):
            places = slice(start - segment.start, stop - segment.start)
            written = np.stack(new)[:, start - one.start : stop - one.start]
            self._table.layers(segment)[layer][:, places] = written
        parts = one.end.parts(one.sequence.length)
        states = [self._table.layers(segment)[layer][:, :used] for segment, used in parts]
        keys, values = np.concatenate(states, axis=1)
        return attention(one.start, query, keys, values)
