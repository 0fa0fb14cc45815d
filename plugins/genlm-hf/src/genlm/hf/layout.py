"""How the tokens of one forward lie in the key/value state."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import chain, repeat

import torch
from attrs import define, field

from genlm.hf.patterns import Pattern
from genlm.hf.upload import Indices, Places, Upload
from genlm.kit.segments import Row, Segment, Trunk

#: A group may compute attention for this many padding tokens, and half of its tokens more.
SPARE_TOKENS = 32

MaskKey = tuple[Pattern, torch.dtype, torch.device]


class Chunk:
    """The part of a sequence that one forward computes: positions ``start`` to ``stop``
    (exclusive), ``size`` of them, kept in columns ``first`` to ``last`` (exclusive) of
    ``segment``."""

    __slots__ = ("first", "last", "segment", "size", "start", "stop")

    def __init__(self, segment: Segment, start: int, stop: int) -> None:
        self.segment, self.start, self.stop, self.size = segment, start, stop, stop - start
        self.first, self.last = start - segment.start, stop - segment.start

    @property
    def columns(self) -> slice:
        """Where the segment keeps them."""
        return slice(self.first, self.last)


class Layout:
    """Which rows of the pool a forward reads, and where it writes.

    Args:
        rows: The rows, by ascending slot.
        width: How many columns are read.
        upload: Takes the indices.
    """

    #: The length that models are told the cache has; only uniform layouts have one.
    past: int = 0

    def __init__(self, rows: Sequence[Row], width: int, upload: Upload) -> None:
        self._rows = Places([row.slot for row in rows], upload)
        self._width = width

    def write(self, states: torch.Tensor, new: torch.Tensor, layer: int, which: int) -> None:
        """Write new states of a layer.

        Args:
            states: The layer's rows.
            new: ``[batch, heads, tokens, head_dim]``, as the model computed them.
            layer: The layer.
            which: 0 for keys, 1 for values.
        """
        raise NotImplementedError

    def read(self, states: torch.Tensor) -> torch.Tensor:
        """The rows and columns of a layer that this forward reads."""
        rows = self._rows.on(states.device)
        if isinstance(rows, slice):
            return states[rows, :, : self._width]
        return states[:, :, : self._width].index_select(0, rows)


def _rows_of(chunks: Sequence[Chunk]) -> list[Row]:
    return [chunk.segment for chunk in chunks if isinstance(chunk.segment, Row)]


class UniformLayout(Layout):
    """Chunks of equal start and size: ``[len(chunks), size]`` tokens, as any model expects
    them."""

    def __init__(self, chunks: Sequence[Chunk], upload: Upload) -> None:
        first = chunks[0]
        super().__init__(_rows_of(chunks), first.stop, upload)
        self.past = first.start
        self._stop = first.stop

    def write(self, states: torch.Tensor, new: torch.Tensor, layer: int, which: int) -> None:
        states[self._rows.on(states.device), :, self.past : self._stop] = new


class PackedLayout(Layout):
    """Any chunks: every token is a batch row of length one, and only attention knows which belong
    together.

    So no forward is padded: 31 rows that grow by one token and a newcomer of 200 are a forward over
    231 tokens.

    Args:
        chunks: Those kept in rows first, by ascending slot, then those kept in trunks.
        patterns: What each layer attends to.
        upload: Takes the indices.

    Attributes:
        positions: The position of every token in its context.
        groups: Attention of the tokens over their own segments.
        products: Attention over the trunks below: one for all tokens that share a trunk.
    """

    def __init__(
        self, chunks: Sequence[Chunk], patterns: Sequence[Pattern], upload: Upload
    ) -> None:
        rows = _rows_of(chunks)
        in_rows = chunks[: len(rows)]
        sizes, lasts = [chunk.size for chunk in in_rows], [chunk.last for chunk in in_rows]
        super().__init__(rows, max(lasts, default=0), upload)
        self._patterns = patterns
        self._in_rows = sum(sizes)
        slots = map(repeat, [row.slot for row in rows], sizes)
        columns = map(range, [chunk.first for chunk in in_rows], lasts)
        positions = [range(chunk.start, chunk.stop) for chunk in chunks]
        self._token_slots = upload.add([*chain.from_iterable(slots)])
        self._token_columns = upload.add([*chain.from_iterable(columns)])
        self.positions = upload.add([*chain.from_iterable(positions)])
        self.groups = _groups(in_rows, upload)
        self._trunk_groups: list[Group] = []
        token = self._in_rows
        for chunk in chunks[len(in_rows) :]:
            tokens = slice(token, token + chunk.size)
            self._trunk_groups.append(Group(slice(0, 1), tokens, [chunk], upload))
            token += chunk.size
        self.groups.extend(self._trunk_groups)
        self.products = _products(chunks, self.positions, upload)

    def pattern(self, layer: int) -> Pattern:
        """What a layer attends to."""
        return self._patterns[layer]

    def write(self, states: torch.Tensor, new: torch.Tensor, layer: int, which: int) -> None:
        new = new.squeeze(2)
        if self._in_rows:
            slots = self._token_slots.on(states.device)
            states[slots, :, self._token_columns.on(states.device)] = new[: self._in_rows]
        for group in self._trunk_groups:
            (chunk,) = group.chunks
            assert isinstance(chunk.segment, Trunk)
            chunk.segment.layers[layer][which][0, :, chunk.columns] = new[group.tokens].transpose(
                0, 1
            )


@define(eq=False, slots=False)
class Group:
    """Neighbouring rows of a packed layout, or one trunk that is being computed: their attention is
    computed together, padded to the longest chunk among them.

    Attributes:
        rows: Their place among the layout's rows.
        tokens: The place of their tokens in the forward.
        chunks: One per row.
        upload: Takes the indices.
    """

    rows: slice
    tokens: slice
    chunks: Sequence[Chunk]
    upload: Upload
    _ragged: tuple[Indices, Indices] | None = field(init=False)
    _starts: Indices = field(init=False)
    _segment_starts: Indices = field(init=False)
    _masks: dict[MaskKey, torch.Tensor | None] = field(init=False, factory=dict)

    @cached_property
    def size(self) -> int:
        """Tokens per row, padding included."""
        return max([chunk.size for chunk in self.chunks])

    @cached_property
    def width(self) -> int:
        """Columns to read."""
        return max([chunk.last for chunk in self.chunks])

    @_ragged.default
    def _find_ragged(self) -> tuple[Indices, Indices] | None:
        """Row and column of every token in the padded rectangle; ``None`` where nothing is
        padded."""
        if min([chunk.size for chunk in self.chunks]) == self.size:
            return None
        rows = [row for row, one in enumerate(self.chunks) for _ in range(one.size)]
        columns = [column for chunk in self.chunks for column in range(chunk.size)]
        return self.upload.add(rows), self.upload.add(columns)

    @_starts.default
    def _find_starts(self) -> Indices:
        return self.upload.add([chunk.start for chunk in self.chunks])

    @_segment_starts.default
    def _find_segment_starts(self) -> Indices:
        return self.upload.add([chunk.segment.start for chunk in self.chunks])

    def own(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of these segments, ``[rows, heads, width, dim]``.

        Args:
            layer: The layer.
            key, value: The layout's rows.
        """
        segment = self.chunks[0].segment
        if isinstance(segment, Trunk):
            key, value = segment.layers[layer]
        return key[self.rows, :, : self.width], value[self.rows, :, : self.width]

    def gather(self, query: torch.Tensor) -> torch.Tensor:
        """``[tokens, heads, 1, dim]`` of the forward to ``[rows, heads, size, dim]`` of this
        group."""
        part = query[self.tokens]
        if self.size == 1:
            return part
        if self._ragged is None:
            return part.view(len(self.chunks), self.size, *part.shape[1::2]).transpose(1, 2)
        padded = query.new_zeros(len(self.chunks), self.size, query.shape[1], query.shape[3])
        rows, columns = self._ragged
        padded[rows.on(query.device), columns.on(query.device)] = part.squeeze(2)
        return padded.transpose(1, 2)

    def scatter(self, output: torch.Tensor) -> torch.Tensor:
        """``[rows, size, ...]`` of this group to ``[tokens, ...]`` of the forward."""
        if self._ragged is None:
            return output.flatten(0, 1)
        rows, columns = self._ragged
        return output[rows.on(output.device), columns.on(output.device)]

    def mask(
        self, pattern: Pattern, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor | None:
        """Additive ``[rows, 1, size, width]``; ``None`` where plain causal attention does the
        same."""
        key = (pattern, dtype, device)
        if key not in self._masks:
            self._masks[key] = self._make_mask(pattern, dtype, device)
        return self._masks[key]

    def _make_mask(
        self, pattern: Pattern, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor | None:
        from_scratch = not any([chunk.first for chunk in self.chunks])
        all_equal = self.size == 1 and min([one.last for one in self.chunks]) == self.width
        longest = max([chunk.stop for chunk in self.chunks])
        if (from_scratch or all_equal) and pattern.is_causal_within(longest):
            return None
        starts, segment_starts = self._starts.on(device), self._segment_starts.on(device)
        queries = starts[:, None] + torch.arange(self.size, device=device)
        keys = segment_starts[:, None] + torch.arange(self.width, device=device)
        return additive(pattern.allowed(queries[:, None, :, None], keys[:, None, None]), dtype)


@define(eq=False, slots=False)
class Product:
    """Attention of many tokens over one trunk below them.

    Attributes:
        trunk: The trunk.
        length: How many of its positions belong to these tokens' contexts.
        nearest, farthest: The first and the last of their positions.
        tokens: Their places in the forward.
        positions: Of all tokens of the forward.
    """

    trunk: Trunk
    length: int
    nearest: int
    farthest: int
    tokens: Places
    positions: Indices
    _masks: dict[MaskKey, torch.Tensor | None] = field(init=False, factory=dict)

    def columns(self, pattern: Pattern) -> slice:
        """The columns of the trunk that some of the tokens attend to; perhaps none."""
        first = pattern.first_seen(self.nearest) - self.trunk.start
        return slice(max(first, 0), self.length)

    def mask(
        self, pattern: Pattern, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor | None:
        """Additive ``[1, 1, n, columns]``; ``None`` where every token attends to all of them."""
        key = (pattern, dtype, device)
        if key not in self._masks:
            columns = self.columns(pattern)
            seen_by_all = pattern.first_seen(self.farthest) <= self.trunk.start + columns.start
            self._masks[key] = None
            if not seen_by_all:
                keys = self.trunk.start + torch.arange(columns.start, columns.stop, device=device)
                positions = self.positions.on(device)[self.tokens.on(device)]
                allowed = pattern.allowed(positions[:, None], keys)
                self._masks[key] = additive(allowed[None, None], dtype)
        return self._masks[key]


def additive(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask to add to attention's logits."""
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)


def _products(chunks: Sequence[Chunk], positions: Indices, upload: Upload) -> list[Product]:
    """Group the tokens by the trunks below them."""
    above: dict[tuple[Trunk, int], list[tuple[Chunk, int]]] = {}
    token = 0
    for chunk in chunks:
        for shared in chunk.segment.path() if chunk.segment.start else ():
            above.setdefault(shared, []).append((chunk, token))
        token += chunk.size
    products = []
    for (trunk, length), parts in above.items():
        places = [at for chunk, first in parts for at in range(first, first + chunk.size)]
        nearest = min(chunk.start for chunk, _ in parts)
        farthest = max(chunk.stop for chunk, _ in parts) - 1
        tokens = Places(places, upload)
        products.append(Product(trunk, length, nearest, farthest, tokens, positions))
    return products


def _groups(chunks: Sequence[Chunk], upload: Upload) -> list[Group]:
    """Cut the rows where padding them together would waste more attention than another call
    costs."""
    parts: list[list[Chunk]] = []
    longest = total = 0
    for chunk in chunks:
        total += chunk.size
        if chunk.size > longest:
            longest = chunk.size
        if not parts or longest * (len(parts[-1]) + 1) > 1.5 * total + SPARE_TOKENS:
            parts.append([])
            longest = total = chunk.size
        parts[-1].append(chunk)
    groups: list[Group] = []
    row = token = 0
    for part in parts:
        size = sum(chunk.size for chunk in part)
        groups.append(Group(slice(row, row + len(part)), slice(token, token + size), part, upload))
        row, token = row + len(part), token + size
    return groups
