"""What the fleet decides, against lines on which nothing happens by itself."""

from __future__ import annotations

import pytest
from attrs import Factory, define

from genlm.core import EngineDeadError, Query
from genlm.core.mock import ByteTokenizer
from genlm.ray.fleet import Fleet
from genlm.ray.log import Change, Entry, Log
from genlm.ray.member import Call, Job, Member, State
from genlm.ray.placing import LIMITS, Placing
from genlm.ray.watch import STARTS
from genlm.ray.wire import Description, Gone

DESCRIPTION = Description(frozenset(), ByteTokenizer(), 258, None)


@define(eq=False)
class Line:
    """Holds the calls that have not come back."""

    calls: list[Call] = Factory(list)

    def start(self) -> None:
        self.calls.clear()

    def send(self, call: Call, *arguments: object) -> None:
        self.calls.append(call)

    def cancel(self, call: Call) -> None:
        raise AssertionError("nothing is dropped here")

    def next(self, method: str) -> Call | None:
        """Take the oldest call of a method."""
        found = next((call for call in self.calls if call.action[0] == method), None)
        if found is not None:
            self.calls.remove(found)
        return found


def started(replicas: int) -> tuple[Fleet, list[Line]]:
    lines = [Line() for _ in range(replicas)]
    fleet = Fleet("p", lines, (None, "mock", "mock", {}), 100.0, 0.0, shared=True)
    for line in lines:
        fleet.take(line.next("open"), DESCRIPTION)
    assert fleet.started
    return fleet, lines


def test_a_free_replica_takes_over_what_waits_at_another() -> None:
    fleet, (stuck, free) = started(2)
    fleet.step([Query((1, at)) for at in range(2000)], [])
    answered = 0
    while (call := free.next("answer")) is not None:
        answered += len(call.jobs)
        fleet.take(call, ["row"] * len(call.jobs))
    size, calls = LIMITS[Query]
    assert sum(len(call.jobs) for call in stuck.calls) == size * calls
    assert answered == len(fleet.answers) == 2000 - size * calls


def test_a_fleet_that_was_ended_is_dead() -> None:
    fleet, (line,) = started(1)
    fleet.step([Query((1,))], [])
    fleet.take(line.next("beat"), Gone("it says goodbye", ended=True))
    assert line.next("open") is None
    with pytest.raises(EngineDeadError, match="the fleet has been ended"):
        fleet.tick(1.0)


def test_only_deaths_one_after_the_other_count_against_an_entry() -> None:
    entry = Entry(("add_adapter", "a"), ("remove_adapter", "a"), deaths=2)
    log = Log(change=Change(entry, lambda error: None))
    log.worked(entry)
    assert entry.deaths == 0
    assert entry in log.entries


def test_only_what_adds_something_is_to_blame_for_a_death() -> None:
    adapter = Entry(("add_adapter", "a"), ("remove_adapter", "a"))
    order = Entry(("clear",))
    blamed = [
        adapter.applied_by(adapter.apply),
        adapter.applied_by(("remove_adapter", "a")),
        order.applied_by(order.apply),
    ]
    assert blamed == [True, False, False]


def test_a_replica_whose_watch_fails_is_started_again() -> None:
    fleet, (line,) = started(1)
    fleet.take(line.next("beat"), RuntimeError("it cannot be called"))
    assert line.next("open") is not None


@pytest.mark.parametrize(
    ("suspect_first", "coming", "tried"),
    [(True, False, True), (True, True, False), (False, False, False), (False, True, False)],
)
def test_the_last_replica_tries_suspects_in_their_turn_if_no_other_will(
    suspect_first: bool, coming: bool, tried: bool
) -> None:
    placing, suspects, others = Placing(), [Job(Query((1,)))], [Job(Query((2,)))]
    placing.join(Member(0, line=None, state=State.READY))
    if suspect_first:
        placing.split(suspects)
    placing.add(others)
    placing.split([] if suspect_first else suspects)
    portion = placing.next(coming)
    assert portion is not None
    assert portion[1:] == ((suspects, True) if tried else (others, False))


def test_a_replica_that_loads_in_the_end_is_not_lost() -> None:
    """However often: only refusals one after the other count."""
    fleet, (line,) = started(1)
    now = 0.0
    for _ in range(STARTS + 1):
        fleet.take(line.next("beat"), Gone("it died"))
        fleet.take(line.next("open"), OSError("not just now"))
        while (opening := line.next("open")) is None:  # it rests
            now += 1.0
            fleet.tick(now)
        fleet.take(opening, DESCRIPTION)


def test_one_replica_is_left_for_what_is_not_suspect() -> None:
    placing = Placing()
    for index in range(2):
        placing.join(Member(index, line=None, state=State.READY))
    for token_id in range(2):
        placing.split([Job(Query((token_id,)))])
    member, _, on_trial = placing.next(coming=False) or (None, [], False)
    assert on_trial
    assert member is not None
    member.calls.add(Call(member, ("answer",), [Job(Query((7,)))], on_trial=True))
    assert placing.next(coming=False) is None
