"""The planner of KV caches, with a table that knows the content of each position.

The state of a position is represented by a number for the context up to there, including its
adapter. So wherever a sequence starts, the test can check that the state belongs to its own tokens.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import random
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from genlm.core.context import Context
from genlm.core.errors import PluginError
from genlm.kit.kv import history
from genlm.kit.kv.commands import Blank, Command, Copy, Fork, Join, NewTrunk, Resize, Shift
from genlm.kit.kv.placement import Placement
from genlm.kit.kv.planner import Planner
from genlm.kit.kv.sequence import TokenSequence
from genlm.kit.kv.sharing import BatchCost, SharingCosts
from genlm.kit.prefixes import key_of, length_of
from genlm.kit.segments import Segment, Slot, Trunk

pytestmark = pytest.mark.any_version

#: The costs of hf on a CPU, of mlx, and of hf on other devices; and some small ones, which short
#: contexts reach.
SHARING_COSTS = (
    SharingCosts(),
    SharingCosts(sharing=512, waste=2.0),
    SharingCosts(2, 2, 4, 2, 6, 1.25, 1, 2, 2, 3, each=2),
    SharingCosts(1, 1, 1, 1, 1, 1.0, 0, 1, 1, 2, each=1),
    SharingCosts(4, 9, 16, 8, 12, 2.0, 4, 4, 4, 6, each=3),
    SharingCosts(2, 2, 4, 2, 6, 1.25, 1, 2, 2, 3, 60, each=2),
    SharingCosts(waiting=1024, plenty=2**18),
)

#: Lengths on both sides of every threshold, and of the chunks in which long prompts are computed.
AROUND = sorted({at + by for at in (32, 64, 256, 512, 1024, 2048) for by in (-1, 0, 1)})

#: The content of positions written by a failed forward.
POISON = -1


#: The outcomes of a batch: its forward fails; it is NaN for some sequences; it is never settled; a
#: command fails; or the command that would give up a batch fails.
FATES = st.sampled_from(["works"] * 5 + ["fails", "breaks", "is lost", "table", "cannot blank"])


class BrokenTableError(Exception):
    """A command was not carried out."""


class Wanted(TokenSequence):
    """A sequence of a version of an adapter."""

    def __init__(self, tokens: Sequence[int], version: int = 0, keep: int = 1) -> None:
        super().__init__(tokens, None, keep)
        self.version = version


@functools.lru_cache(1024)
def cells_of(key: bytes) -> list[int]:
    """The content of each position of a context: a number for the context up to there."""
    version, *tokens = array("I", key)
    numbers = itertools.accumulate(tokens, lambda at, token: hash((at, token)), initial=~version)
    return list(numbers)[1:]


class Cells:
    """A table of such numbers; 0 means no state."""

    def __init__(self, budget: int, spare: int | None) -> None:
        self.slots: list[list[int]] = []
        self.fail_at: int | None = None  # after this many commands
        self.can_blank = True
        self.failed: Command | None = None
        self._budget = budget
        self._spare = spare

    def limit(self, used: int) -> int:
        return self._budget if self._spare is None else used + self._spare

    def own(self, segment: Segment) -> list[int]:
        """The cells of a segment."""
        return self.slots[segment.index] if isinstance(segment, Slot) else segment.layers[0]

    def read(self, segment: Segment | None, stop: int) -> list[int]:
        """The first positions of the context that a segment ends."""
        if segment is None:
            return []
        own = self.own(segment)[: max(stop - segment.start, 0)]
        return self.read(segment.parent, min(stop, segment.start)) + own

    def do(self, command: Command) -> None:
        if isinstance(command, Blank) and not self.can_blank:
            raise BrokenTableError
        if self.fail_at is not None and not isinstance(command, Blank):  # Blank needs no memory
            self.fail_at -= 1
            if self.fail_at < 0:
                self.fail_at = None
                self.failed = command
                self._spoil(command)
                raise BrokenTableError
        match command:
            case Resize():
                slots = [self.slots[index][: command.columns] for index in command.kept]
                slots += [[] for _ in range(command.slots - len(slots))]
                self.slots = [slot + [0] * (command.columns - len(slot)) for slot in slots]
            case NewTrunk(trunk):
                assert not trunk.layers
                trunk.layers = [[0] * trunk.size]
            case Copy(source, targets, size):
                trunks = [one for one in targets if isinstance(one, Trunk)]
                assert len(targets) == 1 if trunks else isinstance(source, Trunk)
                for target in targets:
                    assert source.start == target.start
                    assert 0 < size <= len(self.own(target))
                    self.own(target)[:size] = self._valid(source, size)
            case Fork(sources, targets, columns):
                assert not set(sources) & set(targets)
                for source, target in zip(sources, targets, strict=True):
                    assert target.index not in {slot.index for slot in sources}
                    self.own(target)[:columns] = self.own(source)[:columns]
            case Shift(slots, by, columns):
                for slot in slots:
                    assert by < slot.size <= by + columns
                    self._valid(slot, slot.size)
                    own = self.own(slot)
                    moved = own[by : by + columns]
                    own[: len(moved)] = moved
            case Join(trunk, below, size):
                trunk.layers = [self._valid(below, size) + trunk.layers[0]]
            case Blank(slot, first):
                own = self.own(slot)
                own[first:] = [0] * len(own[first:])

    def _valid(self, source: Segment, size: int) -> list[int]:
        """Check that the first cells of a segment are those of its context."""
        cells = self.own(source)[:size]
        assert cells == cells_of(source.key)[source.start :][:size]
        return cells

    def _spoil(self, command: Command) -> None:
        """Write only a part of what a command writes."""
        match command:
            case Resize():
                self.slots = []
            case Shift(slots, _, columns):
                self.own(slots[0])[:columns] = [0] * columns
            case Fork(_, targets, columns):
                self.own(targets[0])[:columns] = [0] * columns


class PlannerMachine(RuleBasedStateMachine):
    """Contexts are asked, computed, lost, pinned and dropped, and some commands fail."""

    @initialize(
        costs=st.sampled_from(SHARING_COSTS),
        budget=st.sampled_from([0, 1, 7, 40, 100, 300, 1000, 5000, 20_000, 10**9]),
        spare=st.sampled_from([None, None, None, 0, 50, 3000]),
        shares=st.sampled_from([True, True, True, False]),
        seed=st.integers(0, 2**32),
    )
    def begin(
        self, costs: SharingCosts, budget: int, spare: int | None, shares: bool, seed: int
    ) -> None:
        self.table = Cells(budget, spare)
        self.planner: Planner[Wanted] = Planner(self.table, costs, shares)
        self.bounded = budget if spare is None else None
        self.long = costs.step == SharingCosts().step
        self.random = random.Random(seed)
        self.live: list[Wanted] = [Wanted((1,))]
        self.pinned: dict[bytes, Wanted] = {}
        self.lost = False  # whether the last batch has not been settled

    # --- what is asked ----------------------------------------------------------------------------

    @rule(count=st.integers(1, 12), fate=FATES)
    def ask_any(self, count: int, fate: str) -> None:
        """Contexts that extend, truncate, fork and repeat others, and new ones."""
        self._run([self._any() for _ in range(count)], fate)

    @rule(steps=st.integers(0, 9), fork=st.booleans(), fate=FATES)
    def grow(self, steps: int, fork: bool, fate: str) -> None:
        """All live contexts grow token by token, perhaps resampled first."""
        if fork:
            self.live = self.random.choices(self.live, k=len(self.live))
        for _ in range(steps):
            self._run([self._longer(one, 1) for one in self.live])
        self._run([self._longer(one, 1) for one in self.live], fate)

    @rule(chunk=st.sampled_from([3, 16, 512, 2048]), fate=FATES)
    def ask_in_chunks(self, chunk: int, fate: str) -> None:
        """A long context in chunks, each beside growing contexts."""
        whole = self._longer(self.random.choice(self.live), self._size() * 2)
        for stop in range(chunk, whole.length, max(chunk, whole.length // 5)):
            beside = [self._longer(one, 1) for one in self.live[:3]]
            self._run([Wanted(whole.tokens[:stop], whole.version), *beside])
        self._run([whole], fate)

    def _any(self) -> Wanted:
        source = self.random.choice(self.live)
        kind = self.random.randrange(6)
        if kind == 0:
            return Wanted(self._new_tokens(self._size()), self.random.choice([0, 0, 1, 2]))
        if kind == 1:
            return source
        if kind < 4:
            cut = self.random.choice([self.random.randint(1, source.length), self._size()])
            source = Wanted(source.tokens.first(cut), source.version)
        return self._longer(source, self.random.choice([0, 1, 1, 2, self._size()]))

    def _longer(self, one: Wanted, more: int) -> Wanted:
        most = 2500 if self.long else 60
        tokens = one.tokens.first(most)
        if new := self._new_tokens(more)[: most - len(tokens)]:
            tokens = tokens.followed_by(new)
        if self.random.random() < 0.3:
            tokens = Context(tokens.token_ids)  # a context that knows no parent
        keep = self.random.choice([1, 1, 1, 2, 9, len(tokens)])
        return Wanted(tokens, one.version, min(keep, len(tokens)))

    def _new_tokens(self, count: int) -> tuple[int, ...]:
        """Tokens with few different values, so that contexts often share prefixes."""
        return (self.random.randrange(3), *[self.random.randrange(2)] * count)[:count]

    def _size(self) -> int:
        if self.long:
            return self.random.choice([*range(1, 8), *AROUND])
        return self.random.choice([*range(1, 9), 12, 13, 20])

    # --- what becomes of it -----------------------------------------------------------------------

    def _run(self, asked: Sequence[Wanted], fate: str = "works") -> None:
        """Place, compute, and settle, until all are answered."""
        # Not found by their keys, since a sequence without a key must be found too.
        self.live = left = [*{(one.version, one.tokens): one for one in asked}.values()]
        left = [one for one in left if self.planner.fits(one.length)]
        while left:
            with self._failing(fate == "table"):
                self.lost = False
                batch = self.planner.place(left)
                assert batch, "each of them fits"
                self._compute(batch)
                self._settle(batch, fate)
            if fate in ("is lost", "table", "cannot blank"):
                return
            done = [index for one in batch for index in one.indices()]
            assert len(done) == len({*done})
            left = [one for at, one in enumerate(left) if at not in done]

    @contextmanager
    def _failing(self, fails: bool) -> Iterator[None]:
        """Let some command fail."""
        self.table.fail_at = self.random.randrange(8) if fails else None
        self.table.failed = None
        try:
            yield
        except BrokenTableError:
            assert not self.planner.tree.running, "nothing stays of a batch that was not placed"
            self._let_go(self.table.failed)
        self.table.fail_at = None

    def _let_go(self, command: Command | None) -> None:
        """Forget the state that a failed command may have lost."""
        if isinstance(command, Resize):
            self.pinned.clear()
        if isinstance(command, Shift):
            self._unpin(lambda one: any(slot.key.startswith(one.key) for slot in command.slots))

    def _unpin(self, lost: Callable[[Wanted], bool]) -> None:
        self.pinned = {key: one for key, one in self.pinned.items() if not lost(one)}

    def _compute(self, batch: Sequence[Placement[Wanted]]) -> None:
        for one in batch:
            cells = cells_of(one.sequence.key)
            assert 0 <= one.start <= one.sequence.latest_start
            assert self.table.read(one.end, one.start) == cells[: one.start]
            for inner in one.inside:
                assert cells[: inner.sequence.length] == cells_of(inner.sequence.key)
                assert one.start <= inner.sequence.latest_start
                assert not inner.inside
        for one in batch:
            cells = cells_of(one.sequence.key)
            stop = one.start
            for segment, first, last in one.segments(one.start, one.sequence.length):
                assert first == stop < last
                own, offset = self.table.own(segment), segment.start
                assert last - offset <= len(own)
                own[first - offset : last - offset] = cells[first:last]
                stop = last
            assert stop == one.sequence.length
        for one in batch:  # checked once all have written, so that no two write to one place
            cells = cells_of(one.sequence.key)
            assert self.table.read(one.end, len(cells)) == cells, "it attends to its own tokens"

    def _settle(self, batch: Sequence[Placement[Wanted]], fate: str) -> None:
        if fate in ("is lost", "cannot blank"):
            for one in batch:
                self._poison(one)
            self.lost = True
            if fate == "cannot blank":
                self._give_up_in_vain(batch)
            return
        share = {"fails": 1.0, "breaks": 0.5}.get(fate, 0.0)
        broken = [one for one in batch if self.random.random() < share]
        for one in broken:
            self._poison(one)
        good = [one for one in batch if one not in broken]
        cut = {one.slot for one in broken if one.continued}  # a part of its former content is lost
        self.planner.commit(good)
        for one in good:
            for each in (one, *one.inside) if one.kept or one.found not in cut else ():
                assert self.planner.known(each.sequence) == each.sequence.latest_start

    def _give_up_in_vain(self, batch: Sequence[Placement[Wanted]]) -> None:
        """If giving up a batch fails, all state is dropped."""
        self.table.can_blank = False
        self.planner.abandon()
        self.table.can_blank = True
        self.lost = False
        if any(one.slot is not None for one in batch):
            assert self.planner.tree.positions == 0
            self.pinned.clear()

    def _poison(self, one: Placement[Wanted]) -> None:
        """Replace the positions that a forward wrote, from the first unknown one on, by NaN."""
        for segment, first, last in one.segments(one.start, one.sequence.length):
            own = self.table.own(segment)
            own[first - segment.start : last - segment.start] = [POISON] * (last - first)
        if one.continued and one.slot is not None:  # its former content is lost
            key = one.slot.key
            self._unpin(lambda pinned: pinned.length > one.start and key.startswith(pinned.key))

    # --- what stays and what goes -----------------------------------------------------------------

    @rule(fails=st.sampled_from([False, False, False, True]))
    def pin(self, fails: bool) -> None:
        self._run(self.live)  # their state may be lost
        one = self.random.choice(self.live)
        self.lost = False
        with self._failing(fails):
            known = self.planner.known(Wanted((*one.tokens, 0), one.version)) >= one.length
            assert self.planner.pin(one) == known
            if known:
                self.pinned[one.key] = one
        self._run([*self.live, self._longer(one, self._size())])

    @rule(fails=st.sampled_from([False, False, True]))
    def drop_unpinned(self, fails: bool) -> None:
        self.lost = False
        with self._failing(fails):
            self.planner.drop_unpinned()

    @rule(version=st.sampled_from([0, 1, 2]))
    def drop_adapter(self, version: int) -> None:
        self.lost = False
        self.planner.drop_adapter(version)
        self._unpin(lambda one: one.version == version)
        for one in self.live:
            assert one.version != version or self.planner.known(one) == 0

    @rule()
    @precondition(lambda self: self.random.random() < 0.2)
    def clear(self) -> None:
        self.lost = False
        self.planner.clear()
        self.pinned.clear()
        assert self.planner.tree.positions == 0

    # --- what must be true ------------------------------------------------------------------------

    @invariant()
    def everything_kept_is_what_it_says(self) -> None:
        tree = self.planner.tree
        tree.check_integrity()
        for one in () if self.lost else tree.kept:
            size = length_of(one.key)
            assert self.table.read(one, size) == cells_of(one.key)
        for pinned in self.pinned.values():
            assert self.planner.known(pinned) == pinned.latest_start

    @invariant()
    def the_table_is_as_large_as_it_may_be_and_holds_numbers(self) -> None:
        tree, slots = self.planner.tree, self.table.slots
        assert self.bounded is None or tree.positions <= self.bounded
        assert len(slots) == tree.allocated
        assert {len(slot) for slot in slots} <= {tree.columns}
        # Masked columns take part in products.
        assert self.lost or not any(POISON in slot for slot in slots)


def test_any_sequence_of_plans_keeps_the_state_that_it_names() -> None:
    """It takes long because all that is kept is read and compared after every step of 250
    programs."""
    some = settings(
        max_examples=250,
        stateful_step_count=50,
        deadline=None,
        # Random findings would concern another change. To look for them, set the variable and
        # --hypothesis-seed.
        derandomize="GENLM_FUZZ_SEED" not in os.environ,
        suppress_health_check=[*HealthCheck],
    )
    run_state_machine_as_test(PlannerMachine, settings=some)


class Kept(Planner[Wanted]):
    """A planner over a table whose cells can be written."""

    def __init__(
        self, budget: int, costs: SharingCosts = SHARING_COSTS[2], spare: int | None = None
    ) -> None:
        self.cells = Cells(budget, spare)
        super().__init__(self.cells, costs)


def ask(planner: Kept, *contexts: Sequence[int]) -> None:
    for batch in planner.batches([Wanted(tokens) for tokens in contexts]):
        for one in batch:
            cells = cells_of(key_of(one.sequence.version, one.sequence.tokens))
            for segment, first, last in one.segments(one.start, one.sequence.length):
                offset = segment.start
                planner.cells.own(segment)[first - offset : last - offset] = cells[first:last]
        planner.commit(batch)


def test_least_recently_used_is_evicted_first() -> None:
    kept = Kept(budget=12)
    for first in (1, 2, 3):
        ask(kept, [first] * 3)
    ask(kept, [1, 1, 1])
    ask(kept, [4] * 3)
    assert [kept.known(Wanted([first] * 3)) for first in (1, 2, 3, 4)] == [2, 0, 2, 2]


def test_a_context_may_take_the_whole_budget() -> None:
    kept = Kept(budget=4)
    assert [kept.fits(length) for length in (4, 5)] == [True, False]
    ask(kept, [1] * 4)
    assert kept.known(Wanted([1] * 5)) == 4
    with pytest.raises(PluginError, match="a context of 5 tokens does not fit into the table"):
        ask(kept, [2] * 3, [3] * 5)


def test_a_trunk_that_two_sequences_compute_is_kept_once() -> None:
    """Both want so many rows that waiting saves nothing, and one of them wants rows of known
    tokens."""
    kept = Kept(budget=1000)
    prompt = [1] * 20
    ask(kept, prompt[:5])
    whole, longer = Wanted(prompt, keep=20), Wanted([*prompt, 2, 3], keep=17)
    batch = kept.place([whole, longer, Wanted([*prompt, 4])])
    assert [one.trunk and one.trunk.stop for one in batch] == [20, 20]
    kept.commit(batch)
    kept.tree.check_integrity()
    assert sum(bool(one.trunk and one.trunk.layers) for one in batch) == 1, "one has memory"
    assert kept.known(Wanted([*prompt, 2, 3, 4])) == 22
    kept.drop_unpinned()  # and the slot no longer takes a place of its own
    assert kept.tree.positions == 0


def test_drop_unpinned_keeps_the_pinned_contexts() -> None:
    kept = Kept(budget=1000)
    ask(kept, [1] * 30, [2] * 30)
    assert kept.pin(Wanted([1] * 30))
    ask(kept, [1] * 55)  # it is placed on the pinned trunk, and not joined with it
    kept.drop_unpinned()
    assert [kept.known(Wanted([first] * 30)) for first in (1, 2)] == [29, 0]
    assert kept.tree.positions == 30


def test_a_pinned_context_that_is_computed_whole_takes_no_more_afterwards() -> None:
    """It was pinned a second time, as a trunk that takes all its positions, and contexts that fit
    before fitted no more."""
    kept = Kept(budget=70, costs=SHARING_COSTS[4])
    prompt = [1] * 29
    for pinned in (prompt, [*prompt, 2, 3, 4]):  # the second prompt is a slot of three tokens
        ask(kept, pinned)
        assert kept.pin(Wanted(pinned))
    (batch,) = kept.batches([Wanted(pinned, keep=32)])  # beside the pinned slot it needs a trunk
    assert [one.trunk and one.trunk.size for one in batch] == [32]
    kept.commit(batch)
    kept.tree.check_integrity()
    kept.drop_unpinned()
    assert kept.tree.positions == 29 + 4
    assert kept.fits(37)


def test_room_beside_a_trunk_is_used() -> None:
    """The limit is given besides the used positions, which include a pinned trunk."""
    kept = Kept(budget=0, spare=20)
    ask(kept, [1] * 100)
    assert kept.pin(Wanted([1] * 100))
    ask(kept, [2] * 4)
    ask(kept, [3] * 4)
    assert [kept.known(Wanted([first] * 4)) for first in (2, 3)] == [3, 3]


@pytest.mark.parametrize("known", [True, False])
def test_few_trunks_are_made_while_memory_is_plenty(known: bool) -> None:
    prompt = [1] * 600

    def trunks(budget: int, forks: int) -> int:
        kept = Kept(budget, SharingCosts(plenty=10_000))
        if known:
            ask(kept, prompt)
        ask(kept, *([*prompt, token] for token in range(forks)))
        return sum(isinstance(one, Trunk) for one in kept.tree.kept)

    assert trunks(budget=10**6, forks=8) == 0
    assert trunks(budget=10**6, forks=40) == 1
    assert trunks(budget=9000, forks=8) == 1, "eight slots take more than half of it"


def test_few_contexts_copy_a_pinned_trunk_while_memory_is_plentiful() -> None:
    prompt = [1] * 600

    def standing(budget: int, forks: int) -> int:
        kept = Kept(budget, SharingCosts(plenty=10_000))
        ask(kept, prompt)
        kept.pin(Wanted(prompt))
        contexts = [[*prompt, token] for token in range(forks)]
        ask(kept, *contexts)
        ask(kept, *([*context, 5] for context in contexts))
        (trunk,) = (one for one in kept.tree.kept if isinstance(one, Trunk))
        return len(trunk.children)

    assert standing(budget=10**6, forks=8) == 0
    assert standing(budget=10**6, forks=40) == 40
    assert standing(budget=9000, forks=8) == 8


@pytest.mark.parametrize(
    ("size", "then"),
    [(600, [[2]] * 5), (400, [[1] * 400 + [at, more] for at in range(16) for more in range(3)])],
    ids=["others come", "each is forked"],
)
def test_slots_share_their_prompt_when_half_of_the_room_is_taken(
    size: int, then: list[list[int]]
) -> None:
    """Not a trunk for each slot."""
    kept = Kept(24_100, SharingCosts(plenty=10_000))
    ask(kept, [1] * size)
    ask(kept, *([*[1] * size, at] for at in range(16)))
    assert kept.tree.trunk_positions == 0
    ask(kept, *[[*one, at] for at, one in enumerate(then)])
    assert kept.tree.trunk_positions == size


def test_forks_share_their_prompt_beside_a_longer_context() -> None:
    """With slots as long as that one, they would take more than half of the room."""
    kept = Kept(30_000, SharingCosts(plenty=10_000))
    ask(kept, [1] * 600)
    ask(kept, *([*[1] * 600, at] for at in range(8)), [2] * 2000)
    assert kept.tree.trunk_positions == 600 + 2000


def test_all_waiting_sequences_are_counted() -> None:
    """While one leader is computed, the sequences that wait for another have no rows yet."""
    kept = Kept(15_000, SharingCosts(plenty=10_000))
    asked = [Wanted([*[prompt] * 600, at]) for prompt in (1, 2) for at in range(8)]
    assert [one.trunk and one.trunk.size for one in kept.place(asked)] == [600, 600]
    kept.abandon()
    kept.clear()
    assert [one.trunk for one in kept.place(asked[:8])] == [None]


def test_known_sequence_is_not_inside_one_that_starts_after_it() -> None:
    """Otherwise its last position would be computed without being used."""
    kept = Kept(budget=1000)
    ask(kept, [1, 2, 3])
    ask(kept, [1, 2, 3, 4, 5])
    asked = [Wanted([1, 2, 3]), Wanted([1, 2, 3, 4, 5, 6, 7]), Wanted([1, 2, 3, 4, 5, 6])]
    batch = kept.place(asked)
    assert [(one.index, one.start, len(one.inside)) for one in batch] == [(0, 2, 0), (1, 5, 1)]


def test_sequence_inside_a_waiting_one_waits_with_it() -> None:
    kept = Kept(budget=10_000, costs=SharingCosts())
    start = [*range(100)]
    asked = [Wanted([*start, at, at][:length]) for at in (7, 8, 9) for length in (101, 102)]
    rounds = []
    for batch in kept.batches(asked):
        rounds.append({whole.index: [one.index for one in whole.inside] for whole in batch})
        kept.commit(batch)
    assert rounds == [{1: [0]}, {3: [2], 5: [4]}]


@pytest.mark.parametrize("least", [40, 1024])
def test_prefix_of_another_sequence_costs_a_step_nothing(least: int) -> None:
    cost: BatchCost[str] = BatchCost(least, nests=True)
    text = [*range(20)]
    cost.add(Wanted(text), 4, "text")
    assert cost.leader(Wanted(text[:9]), 4) == ("text", 9)
    assert cost.leader(Wanted([*text, 1, 2]), 4) == ("text", 20)
    assert cost.leader(Wanted([*text[:19], 1, 2]), 4) == (None, 4), "too few to wait for"
    assert cost.leader(Wanted(text[:4]), 3) == (None, 3), "it is known but for its last token"
    cost.add(Wanted(text[:18]), 17, "one token")
    assert cost.leader(Wanted([*text[:18], 99]), 4) == (None, 4), "no key is made of that"


def test_slot_that_gave_way_to_an_equal_trunk_is_not_split_again() -> None:
    """Several parts are split at once. The trunk of one part was equal to a slot of another part,
    and took its place; the dropped slot was then split all the same, and its trunk kept a child
    that nothing could evict."""
    kept = Kept(budget=150)
    ask(kept, [0, 0, 1])
    ask(kept, [0], [0, 0, 1, 1])
    ask(kept, [0, 0, 1, 1, 0], [0, 0, 0], [0, 0, 1], [0, 0, 1, 1])
    kept.tree.check_integrity()
    ask(kept, *([token] * 9 for token in range(2, 18)))  # as many as there is room for
    kept.drop_unpinned()
    assert kept.tree.positions == 0


@pytest.mark.parametrize("call", ["place", "pin"])
def test_batch_given_up_by_a_later_call_cannot_be_committed(call: str) -> None:
    kept = Kept(budget=1000)
    given = Wanted([2] * 3)
    batch = kept.place([given])
    kept.place([Wanted([3] * 3)]) if call == "place" else kept.pin(given)
    kept.commit(batch)
    assert kept.known(given) == 0
    kept.tree.check_integrity()


def test_memory_is_free_at_once_when_all_is_dropped() -> None:
    """This must not need a garbage collection, although a trunk and its slots refer to each
    other."""
    kept = Kept(budget=1000)
    gc.disable()
    try:
        ask(kept, *([*range(1, 20), at] for at in range(3)))
        trunks = [weakref.ref(one) for one in kept.tree.kept if isinstance(one, Trunk)]
        assert trunks
        kept.clear()
        assert [trunk() for trunk in trunks] == [None] * len(trunks)
    finally:
        gc.enable()


def test_the_last_commands_are_kept_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_last", None)
    last = history.keep()
    kept = Kept(budget=10_000, costs=SharingCosts())
    ask(kept, [1] * 9)
    ask(kept, [1] * 9 + [2], [1] * 9 + [3])
    assert last[-1] == "Fork: 9 columns of slots 0 to slots 1"
    kept.cells.fail_at = 0
    with pytest.raises(BrokenTableError):
        ask(kept, [1] * 9 + [4], [1] * 9 + [5])
    assert any(words.endswith(", which failed") for words in last)
