"""How the tokens of one forward lie in the row pool."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from attrs import define, field, frozen

from genlm.hf.patterns import Pattern

#: A segment may compute attention for this many padding tokens, and half of its tokens more.
SPARE_TOKENS = 32


@frozen(eq=False)
class Span:
    """The part of a job that one forward computes: tokens ``start`` to ``stop`` (exclusive), kept
    in row ``slot``."""

    slot: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of tokens."""
        return self.stop - self.start


class Layout:
    """Which rows of the pool a forward reads, and where it writes.

    Args:
        slots: The rows, ascending.
        width: How many columns are read.
    """

    #: The length that models are told the cache has; only uniform layouts have one.
    past: int = 0

    def __init__(self, slots: Sequence[int], width: int) -> None:
        self._adjacent = slots[-1] - slots[0] + 1 == len(slots)
        self._first, self._last = slots[0], slots[-1]
        self._slots = torch.tensor(slots)
        self._width = width

    def write(self, states: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Write new states into one layer's tensor and return the rows and columns to read."""
        raise NotImplementedError

    def _read(self, states: torch.Tensor) -> torch.Tensor:
        if self._adjacent:
            return states[self._first : self._last + 1, :, : self._width]
        return states[:, :, : self._width].index_select(0, self._slots.to(states.device))


class UniformLayout(Layout):
    """Spans of equal start and size: ``[len(spans), size]`` tokens, as any model expects them."""

    def __init__(self, spans: Sequence[Span]) -> None:
        first = spans[0]
        super().__init__([span.slot for span in spans], first.stop)
        self.past = first.start
        self._stop = first.stop

    def write(self, states: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        columns = slice(self.past, self._stop)
        if self._adjacent:
            states[self._first : self._last + 1, :, columns] = new
        else:
            states[self._slots.to(states.device), :, columns] = new
        return self._read(states)


class PackedLayout(Layout):
    """Any spans: every token is a batch row of length one, and only attention knows which belong
    together.

    So no forward is padded: 31 rows that grow by one token and a newcomer of 200 are a forward over
    231 tokens.
    """

    def __init__(self, spans: Sequence[Span], patterns: Sequence[Pattern]) -> None:
        super().__init__([span.slot for span in spans], max(span.stop for span in spans))
        self._patterns = patterns
        self._token_slots = torch.tensor([span.slot for span in spans for _ in range(span.size)])
        self.positions = torch.tensor([at for span in spans for at in range(span.start, span.stop)])
        self.segments = _segments(spans)

    def pattern(self, layer_idx: int) -> Pattern:
        """What a layer attends to."""
        return self._patterns[layer_idx]

    def write(self, states: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        slots, positions = self._token_slots.to(states.device), self.positions.to(states.device)
        states[slots, :, positions] = new.squeeze(2)
        return self._read(states)


@define(eq=False, slots=False)
class Segment:
    """Neighbouring rows of a packed layout whose attention is computed together, padded to the
    longest span among them.

    Attributes:
        rows: Their place among the layout's rows.
        tokens: The place of their tokens in the forward.
        spans: One per row.
    """

    rows: slice
    tokens: slice
    spans: Sequence[Span]
    _masks: dict[tuple[Pattern, torch.dtype, torch.device], torch.Tensor | None] = field(
        factory=dict
    )

    @cached_property
    def size(self) -> int:
        """Tokens per row, padding included."""
        return max(span.size for span in self.spans)

    @cached_property
    def width(self) -> int:
        """Columns to read."""
        return max(span.stop for span in self.spans)

    @cached_property
    def _ragged(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Row and column of every token in the padded rectangle; ``None`` where nothing is
        padded."""
        if all(span.size == self.size for span in self.spans):
            return None
        rows = torch.tensor([row for row, span in enumerate(self.spans) for _ in range(span.size)])
        columns = torch.tensor([column for span in self.spans for column in range(span.size)])
        return rows, columns

    def gather(self, query: torch.Tensor) -> torch.Tensor:
        """``[tokens, heads, 1, dim]`` of the forward to ``[rows, heads, size, dim]`` of this
        segment."""
        part = query[self.tokens]
        if self.size == 1:
            return part
        if self._ragged is None:
            return part.view(len(self.spans), self.size, *part.shape[1::2]).transpose(1, 2)
        padded = query.new_zeros(len(self.spans), self.size, query.shape[1], query.shape[3])
        padded[self._ragged] = part.squeeze(2)
        return padded.transpose(1, 2)

    def scatter(self, output: torch.Tensor) -> torch.Tensor:
        """``[rows, size, heads, dim]`` of this segment to ``[tokens, 1, heads, dim]`` of the
        forward."""
        flat = output.flatten(0, 1) if self._ragged is None else output[self._ragged]
        return flat.unsqueeze(1)

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
        from_scratch = all(span.start == 0 for span in self.spans)
        all_equal = all(span.stop == self.width for span in self.spans) and self.size == 1
        if (from_scratch or all_equal) and pattern.is_causal_within(self.width):
            return None
        starts = torch.tensor([span.start for span in self.spans], device=device)
        queries = starts[:, None] + torch.arange(self.size, device=device)
        allowed = pattern.allowed(
            queries[:, None, :, None], torch.arange(self.width, device=device)
        )
        return torch.zeros(allowed.shape, dtype=dtype, device=device).masked_fill_(
            ~allowed, torch.finfo(dtype).min
        )


def _segments(spans: Sequence[Span]) -> list[Segment]:
    """Cut the rows where padding them together would waste more attention than another call
    costs."""
    segments: list[Segment] = []
    first, token, longest, total = 0, 0, 0, 0
    for at, span in enumerate(spans):
        padded = max(longest, span.size) * (at - first + 1)
        if at > first and padded > 1.5 * (total + span.size) + SPARE_TOKENS:
            segments.append(Segment(slice(first, at), slice(token, token + total), spans[first:at]))
            first, token, longest, total = at, token + total, 0, 0
        longest, total = max(longest, span.size), total + span.size
    segments.append(Segment(slice(first, len(spans)), slice(token, token + total), spans[first:]))
    return segments
