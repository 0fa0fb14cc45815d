"""The reuse modes as the probe runs them: the rows of a short context and of a long one, computed
in several forwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from genlm.core.context import Context, as_context
from genlm.core.types import Adapter
from genlm.hf.graphs import recorder_for
from genlm.hf.layout import Chunks
from genlm.hf.operators import Operators
from genlm.hf.reuse import ReuseMode
from genlm.hf.runner import Runner
from genlm.hf.snapshots import Snapshot, joined
from genlm.hf.static import StaticShape, StaticStep
from genlm.kit.prefixes import key_of
from genlm.kit.segments import Slot, Trunk

#: Computes the rows of a short context and of a long one.
Trial = Callable[[Runner, Sequence[Sequence[int]]], list[torch.Tensor]]


def _slot(index: int, parent: Trunk | None = None, start: int = 0) -> Slot:
    return Slot(Context((0,)), 0, start, parent, index=index)


def _shared(runner: Runner, contexts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The short context runs in a slot. The long one runs through two trunks, the first of them
    copied from a slot, into a slot of its own. Beside it, a third context leaves the first trunk
    earlier."""
    short, long = contexts
    half, first, second = len(short) // 2, len(long) // 3, len(long) - 2
    runner.pool.resize(3, len(long))
    slots: list[Slot] = [_slot(0), _slot(1)]
    none: list[Adapter | None] = [None, None, None]
    # The pool knows the shape of a trunk only after a forward.
    chunks = Chunks([(slots[0], 0, half), (slots[1], 0, first)])
    runner.packed(chunks, [*short[:half], *long[:first]], none[:2], [0])
    copied = runner.pool.new_trunk(first)
    copied.copy_front(runner.pool.slot(1), first)
    below = Trunk(as_context(long[:first]), layers=copied)
    above = Trunk(
        as_context(long[:second]), 0, first, below, layers=runner.pool.new_trunk(second - first)
    )
    slots[1:] = [_slot(1, below, first - 1), _slot(2, above, second)]
    chunks = Chunks([(slots[1], first - 1, first + 1), (above, first, second)])
    runner.packed(chunks, [*short[:2], *long[first:second]], none[:2], [0])
    ends = [(slots[1], first + 1, first + 2), (slots[2], second, len(long))]
    chunks = Chunks([(slots[0], half, len(short)), *ends])
    tokens = [*short[half:], short[0], *long[second:]]
    return [runner.packed(chunks, tokens, none, [len(short) - half - 1, len(tokens) - 1])]


def _packed(runner: Runner, contexts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Both contexts run in two forwards; the short one is forked between them."""
    short, long = contexts
    cut_short, cut_long = len(short) // 2, len(long) - 1
    runner.pool.resize(3, len(long))
    slots = [_slot(index) for index in range(3)]
    first = Chunks([(slots[0], 0, cut_short), (slots[2], 0, cut_long)])
    runner.packed(first, [*short[:cut_short], *long[:cut_long]], [None, None], [0])
    runner.pool.fork([0], [1], cut_short)
    second = Chunks([(slots[1], cut_short, len(short)), (slots[2], cut_long, len(long))])
    return [
        runner.packed(
            second,
            [*short[cut_short:], *long[cut_long:]],
            [None, None],
            [len(short) - cut_short - 1, len(short) - cut_short],
        )
    ]


def _uniform(runner: Runner, contexts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Each context runs in three forwards and is forked after the first. The last forward has one
    token."""
    rows = []
    for context in contexts:
        runner.pool.resize(2, len(context))
        cut, last = len(context) // 2, len(context) - 1
        runner.uniform(Chunks([(_slot(0), 0, cut)]), context[:cut], [None], [0])
        runner.pool.fork([0], [1], cut)
        for start, stop in ((cut, last), (last, last + 1)):
            if start < stop:
                chunks = Chunks((_slot(index), start, stop) for index in (0, 1))
                tokens = [*context[start:stop]] * 2
                logits = runner.uniform(chunks, tokens, [None, None], [2 * (stop - start) - 1])
        rows.append(logits)
    return rows


def _snapshots(runner: Runner, contexts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Contexts are continued from their middle by several tokens, and at last by two: see
    :func:`_continued`."""
    cuts = [len(context) // 2 for context in contexts]
    lasts = [max(len(context) - 2, cut + 1) for context, cut in zip(contexts, cuts, strict=True)]
    ends = zip(cuts, lasts, map(len, contexts), strict=True)
    return [
        _continued(runner, context, sorted({*stops}))
        for context, stops in zip(contexts, ends, strict=True)
    ]


def _stepwise(runner: Runner, contexts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The last few tokens run one by one: see :func:`_continued`."""
    cuts = [max(len(context) // 2, len(context) - 6) for context in contexts]
    return [
        _continued(runner, context, range(cut, len(context) + 1))
        for context, cut in zip(contexts, cuts, strict=True)
    ]


def ragged(runner: Runner, contexts: Sequence[Sequence[int]]) -> torch.Tensor:
    """The last two tokens of contexts of unequal length run together. Then the last token of each
    runs again alone. Returns the rows of all contexts, twice."""
    none: list[Adapter | None] = [None] * len(contexts)
    longest = max(map(len, contexts))
    empty = [longest - len(context) for context in contexts]
    begun = [
        Snapshot(
            runner.stateful(None, 0, [context[:-2]], [None], [0])[1], [key_of(0, context[:-2])]
        )
        for context in contexts
    ]
    cache = joined([(each, 0) for each in begun])
    tokens = [context[-2:-1] for context in contexts]
    cache = runner.stateful(cache, longest - 2, tokens, none, [0], empty)[1]
    both = Snapshot(cache, [key_of(0, context[:-1]) for context in contexts])
    cache = joined([(both, at) for at in range(len(contexts))])
    tokens = [context[-1:] for context in contexts]
    rows = [runner.stateful(cache, longest - 1, tokens, none, [*range(len(none))], empty)[0]]
    for at, context in enumerate(contexts):
        cache = joined([(both, at)])
        rows.append(runner.stateful(cache, len(context) - 1, [context[-1:]], [None], [0])[0])
    return torch.cat(rows)


def _continued(runner: Runner, context: Sequence[int], stops: Sequence[int]) -> torch.Tensor:
    """The row of a context that is begun beside another one and continued up to each stop. It is
    continued by other tokens first, then from the same snapshot by its own, beside those others. Up
    to the last stop it runs beside a copy that was begun only then."""
    pair: list[Adapter | None] = [None, None]
    other = context[::-1]
    begin, last = stops[0], stops[-2]
    cache = runner.stateful(None, 0, [context[:begin], other[:begin]], pair, [begin - 1])[1]
    begun = Snapshot(cache, [b"", b""])
    for both in ([*context[:begin], *other[begin:]], [*context]):
        cache = joined([(begun, 0), (begun, 0)])
        for start, stop in pairwise(stops[:-1]):
            tokens = [both[start:stop], other[start:stop]]
            cache = runner.stateful(cache, start, tokens, pair, [0])[1]
    fresh = runner.stateful(None, 0, [context[:last]], [None], [0])[1]
    cache = joined([(Snapshot(fresh, [b""]), 0), (Snapshot(cache, [b"", b""]), 0)])
    tokens = [context[last:], context[last:]]
    return runner.stateful(cache, last, tokens, pair, [2 * len(tokens[0]) - 1])[0]


def static(runner: Runner, contexts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """A step of constant shape is recorded at the beginning of both contexts, and replayed at their
    ends with the rows in another order."""
    short, long = contexts
    runner.pool.resize(3, len(long))
    slots, none = [_slot(index) for index in range(3)], [None, None]
    begin, last = len(long) // 3, len(long) - 1
    runner.packed(Chunks([(slots[2], 0, begin)]), long[:begin], none[:1], [0])
    step = StaticStep(runner, StaticShape.of(runner, 3, len(long)), None)
    inputs = [short[0], short[0], long[begin]], [0, 0, begin], [0, 1, 2]
    step.run(*inputs)  # run once, because allocations of the first forward must not be recorded
    # `Operators` finds unsuitable operators first, before CUDA would fail at them.
    for recorder in (Operators(), recorder_for(runner.device)):
        if recorder is not None:
            step.record(recorder)
    step.run(*inputs)
    rest = [(slots[0], 1, len(short) - 1), (slots[1], 1, len(short) - 1)]
    rest = [*(one for one in rest if one[1] < one[2]), (slots[2], begin + 1, last)]
    tokens = [*short[1:-1], *short[1:-1], *long[begin + 1 : last]]
    runner.packed(Chunks(rest), tokens, [None] * len(rest), [0])
    ends = [last, len(short) - 1, len(short) - 1]
    rows = step.run([long[-1], short[-1], short[-1]], ends, [2, 1, 0])
    return [rows[1:2], rows[:1]]


def _plain(runner: Runner, contexts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Both contexts run whole, padded, in one forward."""
    return [runner.plain(contexts, [None] * len(contexts))]


def _in_slots(trial: Trial) -> Trial:
    """The trial, with a :class:`ValueError` if the model keeps its state outside the slots."""

    def checked(runner: Runner, contexts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        rows = trial(runner, contexts)
        if not runner.pool.layers:
            raise ValueError("its state is not in the cache's slots")
        return rows

    return checked


TRIALS: dict[ReuseMode, Trial] = {
    ReuseMode.SHARED: _in_slots(_shared),
    ReuseMode.PACKED: _in_slots(_packed),
    ReuseMode.UNIFORM: _in_slots(_uniform),
    ReuseMode.SNAPSHOTS: _snapshots,
    ReuseMode.STEPWISE: _stepwise,
    ReuseMode.NONE: _plain,
}
