"""The places of the tokens of one forward in the KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, compress, repeat
from operator import add, sub
from typing import Any

import torch
from attrs import frozen

from genlm.hf.costs import costs_of
from genlm.hf.patterns import Pattern
from genlm.hf.upload import Indices, Places, Upload
from genlm.kit.segments import Segment, Slot, Trunk

#: The padding that a group's attention may have: this many tokens, plus half of the group's own.
SPARE_TOKENS = 32

MaskKey = tuple[Pattern, torch.dtype, torch.device]


def ranges(starts: Iterable[int], stops: Iterable[int]) -> list[int]:
    """The integers from each start to its stop (exclusive), one range after the other."""
    return [*chain.from_iterable(map(range, starts, stops))]


class Chunks:
    """The parts of sequences that one forward computes. Each lies in one segment. Parts in slots
    come first, by ascending slot; parts in trunks follow.

    Args:
        parts: Segments, each with the start and stop (exclusive) of the positions to compute.

    Attributes:
        segments: The segment of each part.
        starts, stops, sizes: The positions of each part, and their number.
        bases: The first position of each part's segment.
        firsts, lasts: The columns of each part within its segment, the last one exclusive.
        ends: Where each part's tokens end among all tokens of the forward.
    """

    def __init__(self, parts: Iterable[tuple[Segment, int, int]]) -> None:
        # One tuple for each attribute, since a forward may have one chunk or a thousand.
        self.segments, self.starts, self.stops = zip(*parts, strict=True)
        self.sizes = [*map(sub, self.stops, self.starts)]
        self.bases = [segment.start for segment in self.segments]
        self.firsts = [*map(sub, self.starts, self.bases)]
        self.lasts = [*map(sub, self.stops, self.bases)]
        self.ends = [*accumulate(self.sizes)]


class Layout:
    """The slots of the pool that a forward reads, and the places where it writes."""

    #: The length of the cache that is reported to models. Only uniform layouts have one.
    past: int = 0

    def write(self, states: torch.Tensor, new: torch.Tensor, layer: int, which: int) -> None:
        """Write new states of a layer.

        Args:
            states: The layer's slots.
            new: ``[batch, heads, tokens, head_dim]``, as the model computed them.
            layer: The layer.
            which: 0 for keys, 1 for values.
        """
        raise NotImplementedError

    def read(self, states: torch.Tensor) -> torch.Tensor:
        """The slots and columns of a layer that this forward reads."""
        raise NotImplementedError


class ChunkLayout(Layout):
    """The layout of chunks. It lists their slots anew for each forward.

    Args:
        slots: The slots, ascending.
        width: How many columns are read.
        upload: Takes the indices.
    """

    def __init__(self, slots: Sequence[int], width: int, upload: Upload) -> None:
        self._slots = Places(slots, upload)
        self._width = width

    def read(self, states: torch.Tensor) -> torch.Tensor:
        slots = self._slots.on(states.device)
        if isinstance(slots, slice):
            return states[slots, :, : self._width]
        return states[:, :, : self._width].index_select(0, slots)


def _indices_of(chunks: Chunks) -> list[int]:
    return [segment.index for segment in chunks.segments if isinstance(segment, Slot)]


class UniformLayout(ChunkLayout):
    """Chunks of equal start and size. They form a rectangle of ``[len(chunks), size]`` tokens, as
    any model expects."""

    def __init__(self, chunks: Chunks, upload: Upload) -> None:
        self.past, self._stop = chunks.starts[0], chunks.stops[0]
        super().__init__(_indices_of(chunks), self._stop, upload)

    def write(self, states: torch.Tensor, new: torch.Tensor, layer: int, which: int) -> None:
        states[self._slots.on(states.device), :, self.past : self._stop] = new


class PackedLayout(ChunkLayout):
    """Chunks of any start and size. Every token is a sequence of its own in the batch, and only
    attention knows which tokens belong together.

    So no forward is padded: 31 contexts that grow by one token and a new one of 200 are a forward
    over 231 tokens.

    Args:
        chunks: The chunks to compute.
        patterns: What each layer attends to.
        upload: Takes the indices.
        device: What computes.

    Attributes:
        positions: The position of every token in its context.
        groups: Attention of the tokens over their own segments.
        tiers: Attention over the trunks below, by pattern; empty if there are none.
    """

    def __init__(
        self, chunks: Chunks, patterns: Sequence[Pattern], upload: Upload, device: torch.device
    ) -> None:
        slots = _indices_of(chunks)
        count = len(slots)
        firsts, lasts, sizes = (of[:count] for of in (chunks.firsts, chunks.lasts, chunks.sizes))
        super().__init__(slots, max(lasts, default=0), upload)
        self._patterns = patterns
        self._in_slots = sum(sizes)
        self._token_indices = upload.add([*chain.from_iterable(map(repeat, slots, sizes))])
        self._token_columns = upload.add(ranges(firsts, lasts))
        self.positions = upload.add(ranges(chunks.starts, chunks.stops))
        spare = max(SPARE_TOKENS, costs_of(device).products // max(self._width, 1))
        self.groups = [Group(chunks, which, upload) for which in _groups(sizes, spare)]
        self._trunk_groups = [
            Group(chunks, slice(at, at + 1), upload) for at in range(count, len(chunks.segments))
        ]
        self.groups.extend(self._trunk_groups)
        self.tiers = _tiers(chunks, patterns, self.positions, upload)

    def pattern(self, layer: int) -> Pattern:
        """The pattern of positions that a layer attends to."""
        return self._patterns[layer]

    def write(self, states: torch.Tensor, new: torch.Tensor, layer: int, which: int) -> None:
        new = new.squeeze(2)
        if self._in_slots:
            indices = self._token_indices.on(states.device)
            states[indices, :, self._token_columns.on(states.device)] = new[: self._in_slots]
        for group in self._trunk_groups:
            states = group.segment.layers[layer][which]
            states[0, :, group.columns] = new[group.tokens].transpose(0, 1)


class Group:
    """Neighbouring slots of a packed layout, or one trunk that is being computed. The attention of
    a group's tokens is computed together, padded to the longest of its chunks.

    Args:
        chunks: All chunks of the forward.
        which: The chunks of the group.
        upload: Takes the indices.

    Attributes:
        segment: The segment of the first chunk.
        tokens: The places of the group's tokens in the forward.
        columns: The columns of the first chunk.
        size: Tokens per slot, padding included.
        width: How many columns are read.
    """

    def __init__(self, chunks: Chunks, which: slice, upload: Upload) -> None:
        firsts, lasts, sizes = (of[which] for of in (chunks.firsts, chunks.lasts, chunks.sizes))
        self.segment: Any = chunks.segments[which.start]
        self._slots = which if isinstance(self.segment, Slot) else slice(0, 1)
        self._count = len(sizes)
        end = chunks.ends[which.stop - 1]
        self.tokens = slice(end - sum(sizes), end)
        self.columns = slice(firsts[0], lasts[0])
        self.size, self.width = max(sizes), max(lasts)
        # If the group is padded: for every place of the padded rectangle, its token (any token, if
        # the place is padding); and for every token, its place.
        self._ragged: tuple[Indices, Indices] | None = None
        if min(sizes) < self.size:
            begins = range(0, self._count * self.size, self.size)
            places = ranges(begins, map(add, begins, sizes))
            tokens = [0] * (self._count * self.size)
            for token, place in enumerate(places):
                tokens[place] = token
            self._ragged = upload.add(tokens), upload.add(places)
        self._starts = upload.add(chunks.starts[which])
        self._bases = upload.add(chunks.bases[which])
        self._longest = max(chunks.stops[which])
        all_equal = self.size == 1 and min(lasts) == self.width
        self._plainly_causal = all_equal or not any(firsts)
        self._masks: dict[MaskKey, torch.Tensor | None] = {}

    def own(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of these segments, ``[slots, heads, width, dim]``.

        Args:
            layer: The layer.
            key, value: The layout's slots.
        """
        if isinstance(self.segment, Trunk):
            key, value = self.segment.layers[layer]
        return key[self._slots, :, : self.width], value[self._slots, :, : self.width]

    def gather(self, query: torch.Tensor) -> torch.Tensor:
        """``[tokens, heads, 1, dim]`` of the forward to ``[slots, heads, size, dim]`` of this
        group."""
        part = query[self.tokens]
        if self.size == 1:
            return part
        if self._ragged is None:
            return part.view(self._count, self.size, *part.shape[1::2]).transpose(1, 2)
        padded = part.index_select(0, self._ragged[0].on(query.device))
        return padded.view(self._count, self.size, *part.shape[1::2]).transpose(1, 2)

    def scatter(self, output: torch.Tensor) -> torch.Tensor:
        """``[slots, size, ...]`` of this group to ``[tokens, ...]`` of the forward."""
        flat = output.flatten(0, 1)
        if self._ragged is None:
            return flat
        return flat.index_select(0, self._ragged[1].on(flat.device))

    def mask(
        self, pattern: Pattern, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor | None:
        """An additive mask, ``[slots, 1, size, width]``; ``None`` if plain causal attention is the
        same."""
        key = (pattern, dtype, device)
        if key not in self._masks:
            self._masks[key] = self._make_mask(pattern, dtype, device)
        return self._masks[key]

    def _make_mask(
        self, pattern: Pattern, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor | None:
        if self._plainly_causal and pattern.is_causal_within(self._longest):
            return None
        starts, bases = self._starts.on(device), self._bases.on(device)
        queries = starts[:, None] + torch.arange(self.size, device=device)
        keys = bases[:, None] + torch.arange(self.width, device=device)
        return additive(pattern.allowed(queries[:, None, :, None], keys[:, None, None]), dtype)


@frozen(eq=False)
class Product:
    """Attention of some tokens over one trunk below them.

    Attributes:
        trunk: The trunk.
        length: How many of the trunk's positions belong to the contexts of these tokens.
        nearest, farthest: The lowest and the highest position of the tokens.
        tokens: The places of the tokens in the forward.
    """

    trunk: Trunk
    length: int
    nearest: int
    farthest: int
    tokens: Sequence[int]

    def columns(self, pattern: Pattern) -> slice:
        """The columns of the trunk that some of the tokens attend to."""
        first = pattern.first_seen(self.nearest) - self.trunk.start
        return slice(max(first, 0), self.length)

    def is_seen(self, pattern: Pattern) -> bool:
        """Whether any of the tokens attends to any position of the trunk."""
        return pattern.first_seen(self.nearest) < self.trunk.start + self.length


class Tier:
    """Attention over all trunks with equally many trunks below them, in layers of one pattern. The
    context of a token contains at most one of these trunks, so their results are merged at once.

    Args:
        pattern: What the layers attend to.
        products: The products, each with tokens that attend to its trunk.
        positions: The position of every token of the forward.
        upload: Takes the indices.

    Attributes:
        tokens: The places of the products' tokens in the forward, product by product.
    """

    def __init__(
        self, pattern: Pattern, products: Sequence[Product], positions: Indices, upload: Upload
    ) -> None:
        self._pattern = pattern
        self._products = products
        self._positions = positions
        self.tokens = Places([*chain.from_iterable(one.tokens for one in products)], upload)
        stops = [*accumulate(len(one.tokens) for one in products)]
        self._parts = [*map(slice, [0, *stops], stops)]
        self._masks: dict[tuple[torch.dtype, torch.device], list[torch.Tensor | None]] = {}

    def products(
        self, layer: int, dtype: torch.dtype, device: torch.device
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """For each trunk: its part of ``tokens``; its keys and values, ``[1, heads, columns,
        dim]``; and an additive mask ``[1, 1, n, columns]``, or ``None`` if each token attends to
        all columns.

        Args:
            layer: The layer.
            dtype, device: The type and device of the masks.
        """
        masks = self._masks.get((dtype, device))
        if masks is None:
            masks = self._masks[dtype, device] = [
                self._mask(product, part, dtype, device)
                for product, part in zip(self._products, self._parts, strict=True)
            ]
        for product, part, mask in zip(self._products, self._parts, masks, strict=True):
            keys, values = product.trunk.layers[layer]
            columns = product.columns(self._pattern)
            yield part, keys[:, :, columns], values[:, :, columns], mask

    def _mask(
        self, product: Product, part: slice, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor | None:
        columns, start = product.columns(self._pattern), product.trunk.start
        if self._pattern.first_seen(product.farthest) <= start + columns.start:
            return None
        keys = start + torch.arange(columns.start, columns.stop, device=device)
        positions = self._positions.on(device)[self.tokens.on(device)][part]
        return additive(self._pattern.allowed(positions[:, None], keys)[None, None], dtype)


def additive(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask to add to attention's logits."""
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)


def _tiers(
    chunks: Chunks, patterns: Sequence[Pattern], positions: Indices, upload: Upload
) -> dict[Pattern, list[Tier]]:
    """For each attention pattern, the tiers over whose trunks attention is computed; empty without
    trunks."""
    found: dict[Pattern, list[Tier]] = {}
    tiers = _products(chunks)
    for pattern in {*patterns} if tiers else ():
        seen = [[one for one in tier if one.is_seen(pattern)] for tier in tiers]
        found[pattern] = [Tier(pattern, some, positions, upload) for some in seen if some]
    return found


def _products(chunks: Chunks) -> list[list[Product]]:
    """The products of tokens with the trunks below them, one list for each number of trunks
    below."""
    above: dict[tuple[Trunk, int], list[int]] = {}
    for at in compress(range(len(chunks.bases)), chunks.bases):
        for shared in chunks.segments[at].path():
            above.setdefault(shared, []).append(at)
    tiers: dict[int, list[Product]] = {}
    for (trunk, length), some in above.items():
        ends, sizes, starts, stops = (
            [of[at] for at in some]
            for of in (chunks.ends, chunks.sizes, chunks.starts, chunks.stops)
        )
        tokens = ranges(map(sub, ends, sizes), ends)
        product = Product(trunk, length, min(starts), max(stops) - 1, tokens)
        tiers.setdefault(len([*trunk.path()]), []).append(product)
    return [*tiers.values()]


def _groups(sizes: Sequence[int], spare: int) -> list[slice]:
    """Divide slots, which have ``sizes`` tokens, into groups. A group ends where padding it further
    would cost more than another call of attention: more than half of the group's own tokens plus
    ``spare`` tokens."""
    groups: list[slice] = []
    first = longest = total = 0
    for at, size in enumerate(sizes) if len({*sizes}) > 1 else ():
        total += size
        longest = max(longest, size)
        if longest * (at + 1 - first) > 1.5 * total + spare:
            groups.append(slice(first, at))
            first, longest, total = at, size, size
    return [*groups, slice(first, len(sizes))] if sizes else []
