"""The costs of the planner's decisions: tokens computed, positions moved, and memory.

The planner is deterministic, and its cost here is counted, not timed. A change that raises a figure
needs a reason; one that lowers a figure writes it down here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest

from genlm.kit.kv import trunks
from genlm.kit.kv.commands import Blank, Command, Copy, Fork, Join, NewTrunk, Resize, Shift
from genlm.kit.kv.planner import Planner
from genlm.kit.kv.sharing import Family, families_of
from genlm.kit.segments import Segment, Slot

from .test_planner import Wanted

pytestmark = pytest.mark.any_version

Program = Iterator[Sequence[Sequence[int]]]

#: The most batches, computed tokens, moved positions, and positions of memory.
Cost = tuple[int, int, int, int]


class Meter:
    """A table that holds nothing, and counts the moved positions. Without a budget, it keeps two
    and a half times what the largest batch took."""

    def __init__(self, budget: int) -> None:
        self.moved = 0
        self._budget = budget
        self._columns = self._largest = 0

    def limit(self, used: int) -> int:
        self._largest = max(self._largest, used)
        return self._budget or self._largest * 5 // 2

    def do(self, command: Command) -> None:
        match command:
            case Resize(_, columns, kept):
                self.moved += len(kept) * min(columns, self._columns)
                self._columns = columns
            case NewTrunk() | Blank():
                pass
            case Copy(_, targets, size):
                self.moved += len(targets) * size
            case Fork(sources, _, columns):
                self.moved += len(sources) * columns
            case Shift(slots, _, columns):
                self.moved += len(slots) * columns
            case Join(trunk, _, size):
                self.moved += trunk.size + size


def cost(program: Program, budget: int) -> Cost:
    meter = Meter(budget)
    planner: Planner[Wanted] = Planner(meter)
    batches = computed = most = 0
    for contexts in program:
        for batch in planner.batches([*{one.key: one for one in map(Wanted, contexts)}.values()]):
            batches += 1
            computed += sum(one.sequence.length - one.start for one in batch)
            planner.commit(batch)
            most = max(most, planner.tree.positions)
    planner.tree.check_integrity()
    return batches, computed, meter.moved, most


def some(rng: random.Random, count: int) -> tuple[int, ...]:
    """Tokens that contexts hardly have in common."""
    return tuple(rng.randrange(99) for _ in range(count))


def particles(prompt: int, every: int, steps: int = 60, count: int = 32) -> Program:
    """A sequential Monte Carlo: particles grow token by token, resampled now and then."""
    rng = random.Random(0)
    live = [(1,) * prompt] * count
    yield live
    for step in range(steps):
        if every and step % every == 0:
            live = rng.choices(live, k=count)
        live = [(*ids, rng.randrange(4)) for ids in live]
        yield live


def thresholds() -> Program:
    """Contexts on both sides of every threshold, which are extended and forked."""
    rng = random.Random(4)
    for length in sorted({at + by for at in (32, 64, 256, 512, 1024) for by in (-1, 0, 1)}):
        head = some(rng, length)
        yield [head]
        yield [(*head, 1), (*head, 2)]
        yield [(*head, 1, 1), (*head, 1, 2), (*head, 2, 1), (*head[: length // 2], 3)]


def drafts(count: int = 16, size: int = 4) -> Program:
    """Particles that ask for the rows at all places of a draft, and go on from one of them."""
    rng = random.Random(8)
    live = [(*some(rng, 20), at) for at in range(count)]
    for _ in range(10):
        drafted = [(ids, some(rng, size)) for ids in live]
        yield [(*ids, *draft[:at]) for ids, draft in drafted for at in range(size + 1)]
        live = [(*ids, *draft[: rng.randrange(size)], 100) for ids, draft in drafted]


def alike(common: int, count: int) -> Program:
    """Contexts that begin with the same new tokens, asked together, ten times."""
    rng = random.Random(7)
    for _ in range(10):
        start = some(rng, common)
        yield [(*start, 100 + at) for at in range(count)]


def uneven() -> Program:
    """More long contexts than may be set apart, beside short ones; then fewer."""
    rng = random.Random(5)
    for long, short in [(6, 12), (5, 5), (3, 9), (2, 4), (1, 1)]:
        sizes = [rng.randrange(60, 330) for _ in range(long)] + [rng.randrange(1, 40)] * short
        live = [some(rng, size) for size in sizes]
        for _ in range(5):
            yield live
            live = [(*ids, rng.randrange(4)) for ids in live]


def mixed() -> Program:
    """A few long contexts beside many short ones."""
    rng = random.Random(1)
    yield from grown([some(rng, n) for n in [1500, 400, *range(10, 40)]], rng, 40)


def turns() -> Program:
    """A conversation with several drafts of each answer, one of which is continued."""
    rng = random.Random(2)
    context: tuple[int, ...] = ()
    for _ in range(12):
        context += some(rng, 150)
        drafts = [context] * 4
        for _ in range(12):
            drafts = [(*ids, rng.randrange(99)) for ids in drafts]
            yield drafts
        context = drafts[0]


def long_prompts() -> Program:
    """Different long prompts: alone, beside many short contexts, then forked."""
    rng = random.Random(8)
    live = [some(rng, 700 + n) for n in range(12)]
    for step in range(30):
        if step == 10:
            live += [some(rng, n) for n in range(1, 41)]
        if step == 20:
            live = live[:12] * 4
        yield live
        live = [(*ids, rng.randrange(4)) for ids in live]


def grown(live: list[tuple[int, ...]], rng: random.Random, steps: int) -> Program:
    """Contexts that grow token by token."""
    for _ in range(steps):
        yield live
        live = [(*ids, rng.randrange(4)) for ids in live]


def documents() -> Program:
    """Long contexts of different lengths, which grow."""
    rng = random.Random(0)
    yield from grown([some(rng, rng.randrange(1600, 2400)) for _ in range(10)], rng, 30)


def chats() -> Program:
    """Long conversations, of which one is continued at a time."""
    rng = random.Random(9)
    live = [some(rng, rng.randrange(1500, 2500)) for _ in range(6)]
    for turn in range(60):
        yield [live[turn % 6]]
        live[turn % 6] += some(rng, 10)


def long_prompt() -> Program:
    """A prompt that fills most of the memory, then forks of it."""
    prompt = (1,) * 5000
    yield [prompt]
    live = [(*prompt, at) for at in range(8)]
    for _ in range(20):
        yield live
        live = [(*ids, 5) for ids in live]


def documents_and_forks() -> Program:
    """Long documents, a prompt that is forked in a step of its own, then all grow."""
    rng = random.Random(10)
    documents = [some(rng, 3000) for _ in range(5)]
    prompt = some(rng, 600)
    yield from ([one] for one in (*documents, prompt))
    forks = [(*prompt, at) for at in range(32)]
    yield forks
    yield from grown([(*ids, 5) for ids in (*documents, *forks)], rng, 3)


def one_grows_long() -> Program:
    """One of many short contexts becomes long at once."""
    rng = random.Random(11)
    live = [some(rng, 20) for _ in range(200)]
    yield live
    live[0] += some(rng, 1000)
    yield live[:1]
    yield from grown(live, rng, 3)


def some_get_long() -> Program:
    """Contexts of about one length, some of which become long enough for trunks."""
    rng = random.Random(12)
    live = [some(rng, n) for n in [505] * 40 + [430] * 60]
    yield from grown(live, rng, 20)


def alike_one_by_one() -> Program:
    """Long contexts with a common prefix arrive one after the other, beside short ones."""
    rng = random.Random(13)
    short, head = [some(rng, 60) for _ in range(32)], some(rng, 500)
    alike = [(*head, *some(rng, 900)) for _ in range(3)]
    yield from ([*short, one] for one in alike)
    yield from grown([*short, *alike], rng, 3)


def in_parts() -> Program:
    """A single long prompt, of which a part arrives first. It stays a slot."""
    rng = random.Random(14)
    prompt = some(rng, 2000)
    yield [prompt[:1023]]
    yield from grown([prompt], rng, 5)


def by_turns() -> Program:
    """Two programs with contexts of different length. A batch of the short ones must not evict the
    long ones."""
    rng = random.Random(6)
    groups = [[some(rng, n) for _ in range(32)] for n in (45, 20)]
    for step in range(12):
        live = groups[step % 2]
        yield live
        groups[step % 2] = [(*ids, rng.randrange(4)) for ids in live]


def lone_requests() -> Program:
    """A lone short context between the steps of a program: it must not drive out the program."""
    rng = random.Random(7)
    live = [some(rng, 60) for _ in range(32)]
    for step in range(12):
        yield live
        yield [(step, 5)]
        live = [(*ids, rng.randrange(4)) for ids in live]


#: Programs, each with the budget of positions and its cost.
COSTS: dict[str, tuple[Callable[[], Program], int, Cost]] = {
    "alike": (partial(alike, 10, 10), 10**6, (20, 199, 5829, 3840)),
    "alike, few": (partial(alike, 8, 4), 10**6, (10, 360, 1280, 1344)),
    "alike, one by one": (alike_one_by_one, 10**6, (6, 5289, 0, 6272)),
    "drafts": (drafts, 10**6, (10, 1120, 14738, 7953)),
    "drafts, little memory": (drafts, 4_000, (10, 1120, 30998, 3998)),
    "in parts": (in_parts, 10**6, (6, 2004, 1152, 2272)),
    "by turns": (by_turns, 0, (12, 2392, 2056, 6144)),
    "lone requests": (lone_requests, 0, (24, 2290, 2374, 4704)),
    "particles": (partial(particles, 20, 5), 10**6, (61, 1813, 23262, 13906)),
    "particles, little memory": (partial(particles, 20, 1), 4_000, (61, 1631, 62117, 4000)),
    "particles, long prompt": (partial(particles, 700, 5), 10**6, (61, 2493, 22394, 14586)),
    "long particles": (partial(particles, 200, 0, 300, 8), 10**6, (301, 2590, 10597, 4808)),
    "chats, little memory": (chats, 14_000, (60, 11849, 12668, 12174)),
    "documents, little memory": (documents, 21_500, (30, 20560, 0, 20750)),
    "documents and forks": (documents_and_forks, 78_000, (10, 15743, 60720, 18048)),
    "one grows long": (one_grows_long, 10**6, (5, 5600, 20, 10620)),
    "one grows long, little memory": (one_grows_long, 20_000, (5, 5600, 20, 10620)),
    "some get long, little memory": (some_get_long, 56_000, (20, 47900, 51200, 55808)),
    "long prompt, little memory": (long_prompt, 6_000, (21, 5160, 0, 5384)),
    "long prompts": (long_prompts, 10**6, (30, 10290, 13734, 16318)),
    "long prompts, little memory": (long_prompts, 11_000, (40, 14999, 2691, 10962)),
    "mixed, little memory": (mixed, 5_000, (40, 3883, 2048, 4972)),
    "thresholds": (thresholds, 10**6, (45, 5753, 8125, 10498)),
    "thresholds, little memory": (thresholds, 4_000, (45, 5753, 22365, 4000)),
    "uneven": (uneven, 10**6, (25, 3642, 20200, 18592)),
    "uneven, little memory": (uneven, 2_600, (27, 3644, 6721, 2597)),
    "a conversation": (turns, 10**6, (156, 2374, 6193, 2829)),
    "a conversation, little memory": (turns, 3_000, (156, 2374, 6193, 2829)),
}


@pytest.mark.parametrize("name", COSTS)
def test_program_costs_the_recorded_number_of_tokens(name: str) -> None:
    program, budget, expected = COSTS[name]
    assert cost(program(), budget) == expected


def test_short_contexts_fit_beside_long_pinned_ones() -> None:
    """A pinned slot would make all other slots as long."""
    rng = random.Random(1)
    planner: Planner[Wanted] = Planner(Meter(9_000))
    for length in (3000, 3000, 2000):
        prompt = Wanted(some(rng, length))
        for batch in planner.batches([prompt]):
            planner.commit(batch)
        assert planner.pin(prompt)
    assert planner.fits(511)


def test_all_slots_are_searched_only_after_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the budget is used up, every step with new slots needs room. The common prefixes of all
    slots are not searched for each time."""
    looked: list[int] = []

    def seen(slots: Sequence[Slot]) -> list[Family]:
        looked.append(len(slots))
        return families_of(slots)

    monkeypatch.setattr(trunks, "families_of", seen)
    kept = [(at, 5, 5) for at in range(200)]
    new_requests = [[(300 + step, 5, 5)] for step in range(40)]
    planner: Planner[Wanted] = Planner(Meter(200 * 32))
    for contexts in [kept, *new_requests]:
        for batch in planner.batches([Wanted(context) for context in contexts]):
            planner.commit(batch)
    assert len(looked) <= 3


def seen(looks: list[Segment], asked: Callable[[Segment], object], segment: Segment) -> object:
    looks.append(segment)
    return asked(segment)


def test_a_step_does_not_look_at_all_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU tens of thousands of slots are kept after some hours: to sort them, or to look for
    the longest, takes longer than a step."""
    rng = random.Random(1)
    planner: Planner[Wanted] = Planner(Meter(10**7))

    def step(contexts: Sequence[Sequence[int]]) -> None:
        for batch in planner.batches([Wanted(context) for context in contexts]):
            planner.commit(batch)

    step([some(rng, rng.randrange(10, 200)) for _ in range(2000)])
    live = [some(rng, 50) for _ in range(4)]
    step(live)
    looks: list[Segment] = []
    for name in ("key", "size"):
        asked = vars(Segment)[name].fget
        monkeypatch.setattr(Segment, name, property(partial(seen, looks, asked)))
    for _ in range(40):
        live = [(*ids, rng.randrange(99)) for ids in live]
        step([*live, some(rng, 50)])
    assert len(looks) < 40 * 100
