"""Snapshots: whole states of contexts, for models whose state cannot be truncated to a prefix."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

import torch
from attrs import define, field, frozen
from torch.nn.functional import pad

from genlm.core.types import Adapter
from genlm.hf.runner import Runner
from genlm.hf.upload import Places, Upload
from genlm.kit.kv.placement import Placement, nested
from genlm.kit.kv.sequence import TokenSequence
from genlm.kit.kv.sharing import parts_of
from genlm.kit.prefixes import (
    PrefixIndex,
    key_of,
    length_of,
    prefix_of,
    shared_length,
    tokens_in,
)

#: A sequence, with the part of it that is to be computed.
Placed = Placement[TokenSequence]

#: Running one token alone costs as much as this many tokens of a long sequence. On a CPU it is 2
#: with Mamba 2 and 5 with LFM2.
SINGLE_TOKEN_COST = 4

#: Contexts of unequal length run together if the longest has at most this many times as many tokens
#: as the shortest, plus this many tokens.
MAX_LENGTH_RATIO, MAX_EXTRA_TOKENS = 2, 64

#: transformers' cache layers whose keys and values have a position for each token, or that have no
#: keys and values.
OF_ALL_POSITIONS = (
    "DynamicLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionLayer",
)


@define(eq=False)
class Snapshot:
    """The states of contexts after one forward. Shorter contexts have empty positions in front.

    Attributes:
        cache: transformers' cache object; never written to, since it is copied before use.
        keys: The context of each sequence in the cache, as a key of
            :class:`~genlm.kit.kv.sequence.TokenSequence`.
        pinned: Whether the snapshot stays until all state is cleared.
        unfinished: Whether it belongs to a chunk whose context has not been continued yet.
        size: Bytes of memory that its tensors hold.
        width: How many positions the cache has: the length of its longest context.
    """

    cache: Any
    keys: Sequence[bytes]
    pinned: bool = False
    unfinished: bool = False
    size: int = field(init=False)
    width: int = field(init=False)

    @size.default
    def _count(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in _tensors(self.cache))

    @width.default
    def _widest(self) -> int:
        return self.longest(range(len(self.keys)))

    def longest(self, places: Sequence[int]) -> int:
        """The length of the longest of the contexts at these indices of the cache."""
        return max(length_of(self.keys[at]) for at in places)


#: A snapshot, and the index of one context in its cache.
Place = tuple[Snapshot, int]


@frozen(eq=False)
class Run:
    """A sequence to compute.

    Attributes:
        sequence: The sequence, which starts before the first of the rows.
        rows: The rows to read on the way: for each, the index of the sequence that wants it, and
            its position.
    """

    sequence: TokenSequence
    rows: Sequence[tuple[int, int]]


@frozen(eq=False)
class Beginning:
    """The common first tokens of several sequences.

    Attributes:
        sequence: These tokens.
        waiting: The indices of the sequences that would start from there.
        asked: Whether the first tokens are themselves one of the requested sequences.
        saved: How many tokens are saved if the beginning is computed first.
    """

    sequence: TokenSequence
    waiting: list[int]
    asked: bool
    saved: int


class Snapshots:
    """Keeps snapshots within a budget, and evicts the least recently used first.

    A context starts from a snapshot of exactly its first tokens.

    Args:
        budget: The most bytes that all of them may take.
        forward: What a forward costs beside its tokens, in tokens.
        at_once: Whether all new tokens of a context may run in one forward. If not, they run one at
            a time, or the whole context is computed again in one forward, whichever is cheaper.
        ragged: Whether contexts of unequal length may be extended together.
    """

    def __init__(self, budget: int, forward: int, at_once: bool, ragged: bool) -> None:
        self.at_once, self._ragged = at_once, ragged
        self._budget = budget
        self.forward = forward
        self._used: OrderedDict[Snapshot, None] = OrderedDict()  # the least recently used first
        self._places: PrefixIndex[bytes, Place] = PrefixIndex()
        # Replaced whenever `_places` changes, so that sequences notice outdated look-ups.
        self._state = object()

    def fits(self, length: int) -> bool:
        """Whether any context may be kept. The size of a state is unknown before it is computed."""
        return self._budget > 0

    def known(self, sequence: TokenSequence) -> int:
        """How many leading tokens of a sequence need not be computed if it is computed alone."""
        return self._cheapest(self._start(sequence), sequence.length, 1)[1]

    def runs(self, sequences: Sequence[TokenSequence], indices: Iterable[int]) -> dict[int, Run]:
        """The runs that compute some sequences, each under the index of its last sequence. If a
        sequence begins with others, their rows may be read while it is computed."""
        placed = [Placement(at, sequences[at], None, self._start(sequences[at])) for at in indices]
        if all(one.sequence.length == one.start + 1 for one in placed):
            return {one.index: Run(one.sequence, one.rows()) for one in placed}
        return {route[-1].index: _run(route) for route in _routes(placed, self.forward)}

    def beginnings(self, sequences: Mapping[int, TokenSequence]) -> list[Beginning]:
        """The common beginnings of sequences that are worth computing first, best first."""
        starts = {at: self._start(one) for at, one in sequences.items()}
        if all(sequences[at].length == start + 1 for at, start in starts.items()):
            return []  # the usual step: each sequence extends a known context by one token
        ordered = sorted(starts, key=lambda at: sequences[at].key)
        common = [_common_start(sequences[a], sequences[b]) for a, b in pairwise(ordered)]
        parts = [(ordered[first : last + 1], size) for first, last, size in parts_of(common)]
        # A sequence that leaves a known context may not be the last to do so, so it counts twice.
        parts += [([at, at], self._near(sequences[at])) for at in ordered]
        found = [self._beginning(sequences, starts, *part) for part in parts]
        worthwhile = [one for one in found if one is not None and one.saved > 0]
        return sorted(worthwhile, key=lambda one: (-one.saved, one.sequence.length))

    def groups(
        self, sequences: Mapping[int, TokenSequence], max_tokens: int
    ) -> Iterator[tuple[int, list[int], Any]]:
        """The groups of sequences that are computed together, each with at most about
        ``max_tokens`` new tokens. Yields the start of the group's longest sequence, the indices,
        and the cache from which they start (``None`` at 0)."""
        found: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for at, one in sequences.items():
            found[self._start(one), one.length].append(at)
        # The key is the number of new tokens and, if contexts must have equal length, the length.
        groups: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for (known, length), some in found.items():
            start = self._cheapest(known, length, len(some))[1]
            groups[length - start, 0 if start and self._ragged else length] += some
        # All places are looked up now, because keeping the state of one group may evict snapshots
        # that the next group starts from.
        places = {
            at: self._places[self._found(sequences[at])]
            for (new, _), some in groups.items()
            for at in some
            if sequences[at].length > new
        }
        for snapshot in {snapshot: None for snapshot, _ in places.values()}:
            # A chunk's snapshot is used only once. It is evicted before others, which may be used
            # again.
            self._used.move_to_end(snapshot, last=not snapshot.unfinished)
            snapshot.unfinished = False
        for (new, _), group in groups.items():
            lengths = {at: sequences[at].length for at in group}
            for batch in _alike(lengths, max(max_tokens // new, 1)):
                start = lengths[batch[-1]] - new
                yield start, batch, joined([places[at] for at in batch]) if start else None

    def _start(self, sequence: TokenSequence) -> int:
        """The length of the longest snapshot that a sequence may start from; 0 without one."""
        found = self._found(sequence)
        return 0 if found is None else length_of(found)

    def _found(self, sequence: TokenSequence) -> Any:
        """The key of the longest snapshot that a sequence may start from, or ``None``. It is looked
        up once, since keys are long."""
        state, found, _ = sequence.looked_up
        if state is not self._state:
            found = self._places.longest_prefix(prefix_of(sequence.key, sequence.latest_start))
            sequence.looked_up = self._state, found, 0
        return found

    def _near(self, sequence: TokenSequence) -> int:
        """How many tokens a sequence may share with others: those in common with the nearest known
        context or, for a score, its whole context, which may get other continuations."""
        if sequence.keep > 1:
            return sequence.latest_start
        shared = tokens_in(self._places.nearest(sequence.key)[1])
        return min(shared, sequence.latest_start) if shared < sequence.length else 0

    def _beginning(
        self,
        sequences: Mapping[int, TokenSequence],
        starts: Mapping[int, int],
        some: Sequence[int],
        size: int,
    ) -> Beginning | None:
        """The first ``size`` tokens of some sequences; ``None`` if their state is known for all of
        them."""
        waiting = [at for at in some if starts[at] < size <= sequences[at].latest_start]
        if not waiting:
            return None
        one = sequences[waiting[0]]
        sequence = TokenSequence(one.tokens.first(size), one.adapter)
        asked = any(sequences[at].length == size for at in some)
        cost = 0 if asked else self._cheapest(self._start(sequence), size, 1)[0]
        before, after = (
            sum(self._cheapest(*ends, count)[0] for ends, count in Counter(each).items())
            for each in (
                [(starts[at], sequences[at].length) for at in waiting],
                [(size, sequences[at].length) for at in waiting],
            )
        )
        return Beginning(sequence, waiting, asked, before - after - cost)

    def _cheapest(self, start: int, length: int, count: int) -> tuple[int, int]:
        """The least cost, in tokens, of computing ``count`` contexts of equal start and length, and
        the start at which it is reached."""
        whole = self.forward + count * length, 0
        if self.at_once:
            return whole[0] - count * start, start
        steps = (self.forward + SINGLE_TOKEN_COST * count) * (length - start), start
        return min(steps, whole) if start else whole

    def keep(self, keys: Sequence[bytes], cache: Any) -> None:
        """Keep the state of contexts after a forward, unless it exceeds what pinned snapshots leave
        of the budget."""
        _compact(cache)
        snapshot = Snapshot(cache, keys)
        if snapshot.size + sum(kept.size for kept in self._used if kept.pinned) > self._budget:
            return
        spare = self._budget - snapshot.size - sum(kept.size for kept in self._used)
        for victim in [kept for kept in self._used if not kept.pinned]:
            if spare >= 0:
                break
            spare += victim.size
            self._drop(victim)
        self._used[snapshot], self._state = None, object()
        for at, key in enumerate(keys):
            if key not in self._places or not self._places[key][0].pinned:
                self._places.add(key, (snapshot, at))

    def leave_unfinished(self, chunk: TokenSequence) -> None:
        """Note that a context was computed only as the beginning of a longer one."""
        if place := self._places.get(chunk.key):
            place[0].unfinished = True

    def pin(self, sequence: TokenSequence) -> bool:
        """Keep the snapshot of a sequence until :meth:`clear`; ``False`` if the sequence has no
        snapshot of its own."""
        place = self._places.get(sequence.key)
        if place is None or len(place[0].keys) > 1:
            return False
        place[0].pinned = True
        return True

    def clear(self) -> None:
        """Drop everything."""
        self._used.clear()
        self._places.clear()
        self._state = object()

    def drop_unpinned(self) -> None:
        """Drop all but the pinned ones."""
        for snapshot in [kept for kept in self._used if not kept.pinned]:
            self._drop(snapshot)

    def drop_adapter(self, adapter: Adapter) -> None:
        """Forget the contexts computed with an adapter, pinned ones included. A snapshot that also
        holds other contexts stays."""
        header = key_of(adapter.version, ())
        for key in [key for key in self._places if key.startswith(header)]:
            self._places.remove(key)
        self._state = object()
        for snapshot in list(self._used):
            if all(key.startswith(header) for key in snapshot.keys):
                self._drop(snapshot)

    def _drop(self, snapshot: Snapshot) -> None:
        del self._used[snapshot]
        self._state = object()
        for key in snapshot.keys:
            if key in self._places and self._places[key][0] is snapshot:
                self._places.remove(key)


def _common_start(one: TokenSequence, other: TokenSequence) -> int:
    """The length of the longest beginning from which both sequences may start, where ``one`` sorts
    before ``other``. It may also be all of ``one``."""
    shared = shared_length(one.key, other.key)
    latest = one.length if one.length == shared else one.latest_start
    return min(shared, latest, other.latest_start)


def _routes(batch: Sequence[Placed], forward: float) -> list[list[Placed]]:
    """Routes of placements. The rows of a route's shorter placements are read on the way to its
    last.

    The shorter placements leave no state, so extending one of them computes half of the route
    again, on average. So a route is only so long that this costs no more than the forwards it
    saves.

    Args:
        batch: What is to be computed.
        forward: What a forward costs beside its tokens, in tokens.
    """
    wholes, found = nested(batch), list[list[Placed]]()
    together = sum(bool(whole.inside) for whole in wholes)  # these routes share each forward
    for whole in wholes:
        start, route = whole.start, list[Placed]()
        for part in (*reversed(whole.inside), whole):
            again = together * (part.sequence.length - start) / 2
            if route and again > forward * len(route):
                found.append(route)
                start, route = route[-1].sequence.length, []
            route.append(part)
        found.append(route)
    return found


def _run(some: Sequence[Placed]) -> Run:
    """One run for sequences, each of which begins with the one before it."""
    *inside, last = some
    last.inside, sequence = inside, last.sequence
    if inside:
        start = min(one.sequence.latest_start for one in some)
        sequence = TokenSequence(sequence.tokens, sequence.adapter, sequence.length - start)
    return Run(sequence, last.rows())


def _alike(lengths: Mapping[int, int], count: int) -> Iterator[list[int]]:
    """Divide sequences of given lengths into batches of at most ``count``, none of them mostly
    padding. The longest sequence of a batch comes last."""
    batch: list[int] = []
    for at in sorted(lengths, key=lengths.__getitem__):
        if batch and (
            len(batch) == count
            or lengths[at] > MAX_LENGTH_RATIO * lengths[batch[0]] + MAX_EXTRA_TOKENS
        ):
            yield batch
            batch = []
        batch.append(at)
    yield batch


def steps(
    runner: Runner, runs: Sequence[Run], start: int, cache: Any, at_once: bool
) -> tuple[list[int], torch.Tensor, Any]:
    """Run the new tokens of some sequences, equally many in each: in one forward, or token by token
    if ``at_once`` is false and they continue a state. Some recurrent models treat several tokens as
    a new context, and ignore the state in their cache.

    Args:
        runner: The model.
        runs: What to compute, the longest last.
        start: The start of the longest sequence.
        cache: The state from which they start.
        at_once: Whether all new tokens run in one forward.

    Returns:
        For each row of logits, the index of its sequence; the logits; the cache.
    """
    sequences = [run.sequence for run in runs]
    length = sequences[-1].length
    empty = [length - sequence.length for sequence in sequences]  # positions in front of each
    owners: list[int] = []
    parts = []
    for stop in [length] if at_once or not start else range(start + 1, length + 1):
        wanted = [
            (index, number * (stop - start) + at + front - start)
            for number, (run, front) in enumerate(zip(runs, empty, strict=True))
            for index, at in run.rows
            if start <= at + front < stop
        ]
        tokens = [
            sequence.tokens[start - front : stop - front]
            for sequence, front in zip(sequences, empty, strict=True)
        ]
        adapters = [sequence.adapter for sequence in sequences]
        places = [place for _, place in wanted]
        logits, cache = runner.stateful(cache, start, tokens, adapters, places, empty)
        owners += [index for index, _ in wanted]
        parts.append(logits)
        start = stop
    if len(parts) == 1:
        return owners, parts[0], cache
    # Order the rows by sequence, then by step.
    order = sorted(range(len(owners)), key=owners.__getitem__)
    ordered = Upload().add(order).on(parts[0].device)
    return [owners[at] for at in order], torch.cat(parts).index_select(0, ordered), cache


def joined(places: Sequence[Place]) -> Any:
    """A new cache with copies of these contexts' states; shorter contexts get empty positions in
    front.

    Raises:
        ValueError: the contexts have unequal lengths, and the cache has a layer that cannot be
            padded.
    """
    with _mode_of(places[0][0].cache):
        return _joined(places)


def _joined(places: Sequence[Place]) -> Any:
    upload, runs = Upload(), []
    for snapshot, run in groupby(places, key=itemgetter(0)):
        some = [at for _, at in run]
        runs.append((snapshot, Places(some, upload), snapshot.longest(some)))
    width = max(longest for *_, longest in runs)
    parts = zip(*(_selected(*run, width) for run in runs), strict=True)
    tensors = [part[0] if len(part) == 1 else torch.cat(part) for part in parts]
    cache = runs[0][0].cache
    # deepcopy takes the tensors from its memo instead of copying them. Lengths and flags come from
    # the first cache, tensors from all caches.
    return deepcopy(
        cache, {id(old): new for old, new in zip(_tensors(cache), tensors, strict=True)}
    )


def _selected(
    snapshot: Snapshot, places: Places, longest: int, width: int
) -> Iterator[torch.Tensor]:
    """Copies of the tensors of some contexts, resized from the snapshot's width to ``width``.
    ``longest`` is the length of the longest of them."""
    unused = snapshot.width - longest
    lasting = {id(one) for one in _of_all_positions(snapshot)} if unused or width > longest else ()
    for tensor in _tensors(snapshot.cache):
        resized = id(tensor) in lasting
        if resized:
            tensor = tensor[..., unused:, :]
        at = places.on(tensor.device)
        if isinstance(at, slice):
            part = tensor.narrow(0, at.start, at.stop - at.start)
            part = part.clone(memory_format=torch.contiguous_format)
        else:
            part = tensor.index_select(0, at)
        yield pad(part, (0, 0, width - longest, 0)) if resized else part


def _of_all_positions(snapshot: Snapshot) -> Iterator[torch.Tensor]:
    """The snapshot's tensors that have a position for each token, in the last dimension but one."""
    for layer in getattr(snapshot.cache, "layers", [None]):
        if type(layer).__name__ not in OF_ALL_POSITIONS:
            raise ValueError(f"its cache has a {type(layer).__name__}")
        found = getattr(layer, "keys", None), getattr(layer, "values", None)
        yield from (tensor for tensor in found if tensor is not None)


def _compact(cache: Any) -> None:
    """Copy tensors that are views of larger memory, such as the window of a longer computation, so
    that this memory is freed."""
    with _mode_of(cache):
        for tensor in _tensors(cache):
            if tensor.untyped_storage().nbytes() >= 2 * tensor.nbytes:
                tensor.data = tensor.clone(memory_format=torch.contiguous_format)


def _mode_of(cache: Any) -> AbstractContextManager[Any]:
    """The mode of PyTorch in which a cache was computed. Tensors made in inference mode can be
    copied and changed only in that mode."""
    inference = any(tensor.is_inference() for tensor in _tensors(cache))
    return torch.inference_mode() if inference else torch.no_grad()


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    """All tensors of a batch within an object, always in the same order. Tensors of single numbers,
    such as a window's length, are left out: they are equal for all sequences of the batch."""
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
