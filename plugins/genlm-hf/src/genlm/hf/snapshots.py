"""Snapshots: whole states of contexts, for models whose state cannot be cut at any length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from attrs import define, field

from genlm.core.types import Adapter
from genlm.hf.runner import Runner
from genlm.hf.upload import Places, Upload
from genlm.kit.kv.sequence import TokenSequence
from genlm.kit.prefixes import key_of, prefix_of

#: Tokens after a snapshot are run one at a time; each such step counts as much as this many tokens
#: of a whole forward.
STEP_COST = 16


@define(eq=False)
class Snapshot:
    """The states of contexts of one length, as one forward left them.

    Attributes:
        cache: transformers' cache object; never written to, since it is copied before use.
        keys: For each row of the cache the context, see
            :class:`~genlm.kit.kv.sequence.TokenSequence`.
        pinned: Whether it stays until the state is cleared.
        size: Bytes of memory that its tensors hold.
    """

    cache: Any
    keys: Sequence[bytes]
    pinned: bool = False
    size: int = field(init=False)

    @size.default
    def _count(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in _tensors(self.cache))


#: A snapshot, and the row in it of one context.
Place = tuple[Snapshot, int]


class Snapshots:
    """Keeps snapshots within a budget, the least recently used first out.

    A context starts from a snapshot of exactly its first tokens, of all but the last few.

    Args:
        budget: The most bytes that all of them may take.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._used: dict[Snapshot, None] = {}  # the least recently used first
        self._places: dict[bytes, Place] = {}

    def fits(self, length: int) -> bool:
        """Whether any context may be kept: how large a state is does not show before it is
        there."""
        return self._budget > 0

    def find(self, sequence: TokenSequence) -> tuple[int, Place | None]:
        """Where a sequence starts: after the longest snapshot worth stepping from, or at 0."""
        shortest = sequence.length - max(sequence.length // STEP_COST, 1)
        for length in range(sequence.latest_start, max(shortest, 1) - 1, -1):
            place = self._places.get(prefix_of(sequence.key, length))
            if place is not None:
                self._used[place[0]] = self._used.pop(place[0])
                return length, place
        return 0, None

    def groups(
        self, sequences: Sequence[TokenSequence], indices: Sequence[int], max_tokens: int
    ) -> Iterator[tuple[int, list[int], Any]]:
        """Sequences that start and end together: where they start, which they are, and the cache
        that they start from (``None`` at 0), of at most about ``max_tokens`` new tokens each."""
        places: dict[int, Place] = {}
        groups: dict[tuple[int, int, int], list[int]] = {}
        for at in indices:
            start, place = self.find(sequences[at])
            if place is not None:
                places[at] = place
            groups.setdefault((start, sequences[at].length, sequences[at].keep), []).append(at)
        for (start, length, _), group in groups.items():
            count = max(max_tokens // (length - start), 1)
            for first in range(0, len(group), count):
                rows = group[first : first + count]
                yield start, rows, joined([places[at] for at in rows]) if start else None

    def keep(self, keys: Sequence[bytes], cache: Any) -> None:
        """Keep what a forward left of contexts, unless it is larger than what the pinned ones leave
        of the budget."""
        snapshot = Snapshot(cache, keys)
        if snapshot.size + sum(kept.size for kept in self._used if kept.pinned) > self._budget:
            return
        spare = self._budget - snapshot.size - sum(kept.size for kept in self._used)
        for victim in [kept for kept in self._used if not kept.pinned]:
            if spare >= 0:
                break
            spare += victim.size
            self._drop(victim)
        self._used[snapshot] = None
        for row, key in enumerate(keys):
            if key not in self._places or not self._places[key][0].pinned:
                self._places[key] = (snapshot, row)

    def pin(self, sequence: TokenSequence) -> bool:
        """Keep the snapshot of a sequence until :meth:`clear`; ``False`` if it has none of its
        own."""
        place = self._places.get(sequence.key)
        if place is None or len(place[0].keys) > 1:
            return False
        place[0].pinned = True
        return True

    def clear(self) -> None:
        """Drop everything."""
        self._used.clear()
        self._places.clear()

    def drop_unpinned(self) -> None:
        """Drop all but the pinned ones."""
        for snapshot in [kept for kept in self._used if not kept.pinned]:
            self._drop(snapshot)

    def drop_adapter(self, adapter: Adapter) -> None:
        """Drop the snapshots with contexts computed with an adapter, pinned ones included."""
        header = key_of(adapter.version, ())
        for snapshot in list(self._used):
            if any(key.startswith(header) for key in snapshot.keys):
                self._drop(snapshot)

    def _drop(self, snapshot: Snapshot) -> None:
        del self._used[snapshot]
        for key in snapshot.keys:
            if key in self._places and self._places[key][0] is snapshot:
                del self._places[key]


def steps(
    runner: Runner, sequences: Sequence[TokenSequence], start: int, cache: Any
) -> tuple[list[int], torch.Tensor, Any]:
    """Run the rest of some sequences of one length, at once where it is all, else token by token.

    Recurrent models may take several tokens as a beginning, and ignore what their cache holds.

    Returns:
        For each row of logits, the index of its sequence; the logits; the cache.
    """
    length, latest_start = sequences[0].length, sequences[0].latest_start
    owners: list[int] = []
    parts = []
    for stop in range(start + 1, length + 1) if start else [length]:
        wanted = range(max(latest_start, start) - start, stop - start)
        places = [row * (stop - start) + at for row in range(len(sequences)) for at in wanted]
        tokens = [sequence.tokens[start:stop] for sequence in sequences]
        adapters = [sequence.adapter for sequence in sequences]
        logits, cache = runner.stateful(cache, start, tokens, adapters, places)
        owners.extend(row for row in range(len(sequences)) for _ in wanted)
        parts.append(logits)
        start = stop
    if len(parts) == 1:
        return owners, parts[0], cache
    # The steps of one sequence together, in order.
    by_sequence = [part.view(len(sequences), -1, part.shape[-1]) for part in parts]
    return sorted(owners), torch.cat(by_sequence, 1).flatten(0, 1), cache


@torch.inference_mode()
def joined(places: Sequence[Place]) -> Any:
    """A new cache whose rows are copies of these, all of contexts of one length."""
    upload = Upload()
    runs = [
        (snapshot.cache, Places([row for _, row in run], upload))
        for snapshot, run in groupby(places, key=itemgetter(0))
    ]
    parts = zip(*(_selected(cache, rows) for cache, rows in runs), strict=True)
    tensors = [part[0] if len(part) == 1 else torch.cat(part) for part in parts]
    cache = runs[0][0]
    # What the memo holds is not copied, but taken: lengths and flags come from the first cache,
    # tensors from all.
    return deepcopy(
        cache, {id(old): new for old, new in zip(_tensors(cache), tensors, strict=True)}
    )


def _selected(cache: Any, rows: Places) -> Iterator[torch.Tensor]:
    for tensor in _tensors(cache):
        at = rows.on(tensor.device)
        if isinstance(at, slice):
            part = tensor.narrow(0, at.start, at.stop - at.start)
            yield part.clone(memory_format=torch.contiguous_format)
        else:
            yield tensor.index_select(0, at)


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    """All tensors with rows within an object, always in the same order; single numbers, such as a
    window's length, are the same for all rows."""
    if isinstance(state, torch.Tensor):
        if state.ndim:
            yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _tensors(value)
    elif hasattr(state, "__dict__") and not isinstance(state, type):
        yield from _tensors(vars(state))
