"""The ways of reuse as the probe runs them: the rows of a short context and of a long one, computed
in several forwards."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from genlm.core.context import Context, as_context
from genlm.core.types import Adapter
from genlm.hf.layout import Chunks
from genlm.hf.pool import copy_front
from genlm.hf.reuse import Reuse
from genlm.hf.runner import Runner
from genlm.hf.snapshots import Snapshot, joined
from genlm.kit.segments import Row, Trunk


def _row(slot: int, parent: Trunk | None = None, start: int = 0) -> Row:
    return Row(Context((0,)), 0, start, parent, slot=slot)


def _shared(runner: Runner, contexts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The first context in a row, the second through two trunks to a row of its own, beside a third
    one that leaves the first trunk earlier. The first trunk is copied from a row."""
    short, long = contexts
    half, first, second = len(short) // 2, len(long) // 3, len(long) - 2
    runner.pool.resize(3, len(long))
    rows: list[Row] = [_row(0), _row(1)]
    none: list[Adapter | None] = [None, None, None]
    # Only after a forward does the pool know the shape of a trunk.
    chunks = Chunks([(rows[0], 0, half), (rows[1], 0, first)])
    runner.packed(chunks, [*short[:half], *long[:first]], none[:2], [0])
    below = Trunk(as_context(long[:first]), layers=runner.pool.new_trunk(first))
    copy_front(runner.pool.row(1), below.layers, first)
    above = Trunk(
        as_context(long[:second]), 0, first, below, layers=runner.pool.new_trunk(second - first)
    )
    rows[1:] = [_row(1, below, first - 1), _row(2, above, second)]
    chunks = Chunks([(rows[1], first - 1, first + 1), (above, first, second)])
    runner.packed(chunks, [*short[:2], *long[first:second]], none[:2], [0])
    ends = [(rows[1], first + 1, first + 2), (rows[2], second, len(long))]
    chunks = Chunks([(rows[0], half, len(short)), *ends])
    tokens = [*short[half:], short[0], *long[second:]]
    return [runner.packed(chunks, tokens, none, [len(short) - half - 1, len(tokens) - 1])]


def _packed(runner: Runner, contexts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """In two forwards, the first context forked between them."""
    short, long = contexts
    cut_short, cut_long = len(short) // 2, len(long) - 1
    runner.pool.resize(3, len(long))
    rows = [_row(slot) for slot in range(3)]
    first = Chunks([(rows[0], 0, cut_short), (rows[2], 0, cut_long)])
    runner.packed(first, [*short[:cut_short], *long[:cut_long]], [None, None], [0])
    runner.pool.fork([0], [1], cut_short)
    second = Chunks([(rows[1], cut_short, len(short)), (rows[2], cut_long, len(long))])
    return [
        runner.packed(
            second,
            [*short[cut_short:], *long[cut_long:]],
            [None, None],
            [len(short) - cut_short - 1, len(short) - cut_short],
        )
    ]


def _uniform(runner: Runner, contexts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Each in three forwards, forked between them; the last is of one token."""
    rows = []
    for context in contexts:
        runner.pool.resize(2, len(context))
        cut, last = len(context) // 2, len(context) - 1
        runner.uniform(Chunks([(_row(0), 0, cut)]), context[:cut], [None], [0])
        runner.pool.fork([0], [1], cut)
        for start, stop in ((cut, last), (last, last + 1)):
            if start < stop:
                chunks = Chunks((_row(slot), start, stop) for slot in (0, 1))
                tokens = [*context[start:stop]] * 2
                logits = runner.uniform(chunks, tokens, [None, None], [2 * (stop - start) - 1])
        rows.append(logits)
    return rows


def _snapshots(runner: Runner, contexts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Each begun beside another one and continued token by token: by other tokens first, then again
    from the same snapshot, as a fork beside those others, and for the last token beside one that
    was begun only then."""
    pair: list[Adapter | None] = [None, None]
    cuts = [max(len(context) // 2, len(context) - 6) for context in contexts]
    begun = []
    for context, cut in zip(contexts, cuts, strict=True):
        cache = runner.stateful(None, 0, [context[:cut], context[::-1][:cut]], pair, [cut - 1])[1]
        begun.append(Snapshot(cache, [b"", b""]))
    rows = []
    for context, cut, snapshot in zip(contexts, cuts, begun, strict=True):
        tail, other = context[cut:], context[::-1][cut:]
        for tails in ([other, other], [tail, other]):
            cache = joined([(snapshot, 0), (snapshot, 0)])
            for at in range(len(tail) - 1):
                tokens = [[after[at]] for after in tails]
                cache = runner.stateful(cache, cut + at, tokens, pair, [0])[1]
        fresh = runner.stateful(None, 0, [context[:-1]], [None], [0])[1]
        cache = joined([(Snapshot(fresh, [b""]), 0), (Snapshot(cache, [b"", b""]), 0)])
        tokens = [[context[-1]]] * 2
        rows.append(runner.stateful(cache, len(context) - 1, tokens, pair, [1])[0])
    return rows


def _plain(runner: Runner, contexts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Together, padded."""
    return [runner.plain(contexts, [None] * len(contexts), [1] * len(contexts))]


WAYS = {
    Reuse.SHARED: _shared,
    Reuse.PACKED: _packed,
    Reuse.UNIFORM: _uniform,
    Reuse.SNAPSHOTS: _snapshots,
    Reuse.NONE: _plain,
}
