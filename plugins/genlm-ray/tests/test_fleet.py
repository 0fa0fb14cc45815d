"""Decisions of the fleet, with fake lines on which nothing happens by itself."""

from __future__ import annotations

import pytest
from attrs import Factory, define

from genlm.core import Adapter, EngineDeadError, EngineError, Query
from genlm.core.mock import ByteTokenizer
from genlm.core.types import query_of
from genlm.ray.fleet import Fleet
from genlm.ray.log import Change, Entry, Log
from genlm.ray.member import Call, Job, Member, State
from genlm.ray.placing import LIMITS, MAX_DEATHS, MAX_TRIALS, Placing
from genlm.ray.watch import MAX_REFUSED_STARTS, Watch
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
        """It comes back all the same: cancelling came too late."""

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


def test_free_replica_takes_over_waiting_requests() -> None:
    fleet, (stuck, free) = started(2)
    fleet.step([Query((1, at)) for at in range(2000)], [])
    answered = 0
    while (call := free.next("answer")) is not None:
        answered += len(call.jobs)
        fleet.take(call, ["row"] * len(call.jobs))
    size, calls = LIMITS[Query]
    assert sum(len(call.jobs) for call in stuck.calls) == size * calls
    assert answered == len(fleet.answers) == 2000 - size * calls


def test_request_equal_to_a_dropped_one_in_flight_is_sent_again() -> None:
    """The first request was dropped while it was answered, so its next caller got that answer. Then
    another caller made an equal request."""
    fleet, (line,) = started(1)
    for new_requests, dropped in ([Query((1,))], []), ([], [Query((1,))]), ([Query((1,))], []):
        fleet.step(new_requests, dropped)
        if not fleet.answers:
            fleet.take(line.next("answer"), ["row"])
    fleet.step([Query((1,))], [])
    for row in ("crossed", "row"):
        fleet.take(line.next("answer"), [row])
    assert fleet.answers == [(Query((1,)), "row")] * 2


def test_contexts_that_grow_together_stay_on_their_replicas() -> None:
    fleet, lines = started(2)

    def placed(contexts: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
        fleet.step(list(map(Query, contexts)), [])
        calls = [line.next("answer") for line in lines]
        for call in calls:
            fleet.take(call, ["row"] * len(call.jobs))
        return [[query_of(job.request).token_ids for job in call.jobs] for call in calls]

    left, right = placed([(at,) * 200 for at in range(16)])
    for token_id in range(5):
        left, right = ([(*ids, token_id) for ids in contexts] for contexts in (left, right))
        assert placed(left + right) == [left, right]


def test_a_fleet_that_was_ended_is_dead() -> None:
    """It restarts none of its replicas, not even one that was starting."""
    fleet, (line, starting) = started(2)
    fleet.take(starting.next("beat"), Gone("it died"))
    with pytest.raises(EngineDeadError, match="the fleet has been ended; load the model again"):
        fleet.take(line.next("beat"), Gone("it says goodbye", ended=True))
    assert line.next("open") is None


def test_only_consecutive_deaths_count_against_an_entry() -> None:
    entry = Entry(("add_adapter", "a"), ("remove_adapter", "a"), deaths=2)
    log = Log(change=Change(entry, lambda error: None))
    log.worked(entry)
    assert entry.deaths == 0
    assert entry in log.entries


def test_only_adding_entries_are_blamed_for_a_death() -> None:
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
def test_last_replica_tries_suspects_in_turn(
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


def test_endless_failed_restarts_do_not_end_the_fleet() -> None:
    fleet, (well, lost) = started(2)
    fleet.take(lost.next("beat"), Gone("it died"))
    now = 0.0
    for _ in range(1100):
        fleet.take(lost.next("open"), ValueError("it does not load"))
        while not lost.calls:
            now += fleet.pulse / 2
            fleet.take(well.next("beat"), None)
            fleet.tick(now)


def test_replica_that_finally_loads_is_not_lost() -> None:
    """The number of failed loads does not matter, because only consecutive ones count."""
    fleet, (line,) = started(1)
    now = 0.0

    def opening() -> Call:
        nonlocal now
        while (call := line.next("open")) is None:  # the replica rests first
            now += 1.0
            fleet.tick(now)
        return call

    for _ in range(2):
        fleet.take(line.next("beat"), Gone("it died"))
        for _ in range(MAX_REFUSED_STARTS - 1):
            fleet.take(opening(), OSError("not just now"))
        fleet.take(opening(), DESCRIPTION)
    fleet.take(line.next("beat"), Gone("it died"))
    for _ in range(MAX_REFUSED_STARTS):
        fleet.take(opening(), OSError("not any more"))
    with pytest.raises(EngineDeadError, match="all 1 replicas are lost"):
        fleet.tick(now)


@pytest.mark.parametrize(("replicas", "trying"), [(2, 1), (MAX_TRIALS + 2, MAX_TRIALS)])
def test_some_replicas_are_kept_free_of_suspects(replicas: int, trying: int) -> None:
    placing = Placing()
    for index in range(replicas):
        placing.join(Member(index, line=None, state=State.READY))
    for token_id in range(replicas):
        placing.split([Job(Query((token_id,)))])
    tried = 0
    while (portion := placing.next(coming=False)) is not None:
        member, jobs, on_trial = portion
        assert on_trial
        member.calls.add(Call(member, ("answer",), jobs, on_trial=True))
        tried += 1
    assert tried == trying


def test_suspects_avoid_replicas_where_another_program_tries_its_own() -> None:
    """They would be rejected there, come back, and move again, for ever."""
    placing = Placing()
    refusing, *answering = (Member(index, line=None, state=State.READY) for index in range(3))
    for member in (refusing, *answering):
        placing.join(member)
    for at, member in enumerate(answering):
        member.calls.add(Call(member, ("answer",), [Job(Query((at,)))], on_trial=False))
    placing.split([Job(Query((2,)))])
    member, jobs, _ = placing.next(coming=False)
    assert member is refusing
    placing.postpone(refusing, jobs)
    assert placing.next(coming=False) is None


def test_requests_that_fail_together_are_retried_separately() -> None:
    fleet, (line,) = started(1)
    fleet.step([Query((at,)) for at in range(20)], [])
    fleet.take(line.next("answer"), MemoryError("no room for all rows"))
    for now in range(1, 10):
        while (call := line.next("answer")) is not None:
            assert len(call.jobs) < 20
            fleet.take(call, ["row"] * len(call.jobs))
        fleet.tick(float(now))
    assert len(fleet.answers) == 20


def test_requests_of_an_idle_lost_replica_move_without_suspicion() -> None:
    fleet, lines = started(2)
    fleet.step([Query((1,))], [])
    (asked,) = [line for line in lines if len(line.calls) > 1]
    (other,) = [line for line in lines if line is not asked]
    fleet.take(asked.next("beat"), Gone("it does not know the program", computing=False))
    call = other.next("answer")
    assert call is not None
    assert not call.on_trial
    fleet.take(call, ["row"])
    assert len(fleet.answers) == 1


def test_restarted_replica_is_not_preferred_for_its_former_contexts() -> None:
    fleet, lines = started(2)

    def asked() -> Line:
        fleet.step([Query((1,))], [])
        ((line, call),) = [(line, call) for line in lines if (call := line.next("answer"))]
        fleet.take(call, ["row"])
        return line

    first = asked()
    assert asked() is first
    fleet.take(first.next("beat"), Gone("it died", computing=False))
    fleet.take(first.next("open"), DESCRIPTION)
    assert asked() is not first


def applied(lines: list[Line], fleet: Fleet) -> list[str]:
    """Let all replicas follow the log, and return the called methods."""
    called = []
    while True:
        due = [(line, call) for line in lines for call in line.calls if call.entry is not None]
        for line, call in due:
            line.calls.remove(call)
            called.append(call.action[0])
            fleet.take(call, None)
        if not due:
            return called


def test_prompt_that_replicas_have_pinned_is_not_pinned_again() -> None:
    fleet, lines = started(2)
    outcomes: list[Exception | None] = []
    for _ in range(2):
        fleet.add(Entry(("pin", "prompt"), ("unpin", "prompt")), outcomes.append)
        called = applied(lines, fleet)
    assert called == []
    fleet.add(Entry(("pin", "another"), ("unpin", "another")), outcomes.append)
    assert applied(lines, fleet) == ["pin", "pin"]
    assert outcomes == [None] * 3


def test_a_replica_that_starts_again_has_nothing_to_clear() -> None:
    fleet, lines = started(1)
    outcomes: list[Exception | None] = []
    fleet.clear(Entry(("clear",)), outcomes.append)
    assert applied(lines, fleet) == ["clear"]
    fleet.take(lines[0].next("beat"), Gone("it died"))
    fleet.take(lines[0].next("open"), DESCRIPTION)
    assert applied(lines, fleet) == []
    assert outcomes == [None]


def test_a_replica_that_starts_during_a_clearing_keeps_no_pinned_prompt() -> None:
    fleet, lines = started(2)
    steady, starting = lines
    outcomes: list[Exception | None] = []
    for name in ("one", "two"):
        fleet.add(Entry(("pin", name), ("unpin", name)), outcomes.append)
        applied(lines, fleet)
    fleet.take(starting.next("beat"), Gone("it died"))
    fleet.take(starting.next("open"), DESCRIPTION)
    fleet.take(starting.next("pin"), None)
    fleet.clear(Entry(("clear",)), outcomes.append)
    assert applied([steady], fleet) == ["clear"]
    assert outcomes == [None] * 3
    assert applied([starting], fleet) == ["pin", "unpin", "unpin"]


def test_removing_an_adapter_keeps_prompts_of_the_base_model() -> None:
    fleet, lines = started(1)
    outcomes: list[Exception | None] = []
    for entry in (
        Entry(("pin", "prompt"), ("unpin", "prompt")),
        Entry(("add_adapter", "a"), ("remove_adapter", "a"), version=1),
        Entry(("pin", "adapted"), ("unpin", "adapted"), version=1),
    ):
        fleet.add(entry, outcomes.append)
        applied(lines, fleet)
    fleet.remove_adapter(1, outcomes.append)
    assert applied(lines, fleet) == ["remove_adapter"]
    fleet.take(lines[0].next("beat"), Gone("it died"))
    fleet.take(lines[0].next("open"), DESCRIPTION)
    assert applied(lines, fleet) == ["pin"]
    assert outcomes == [None] * 4


def test_only_requests_with_a_lost_adapter_fail() -> None:
    fleet, (line,) = started(1)
    adapter = Adapter("a", "folder", version=1)
    added = Entry(("add_adapter", "a"), ("remove_adapter", "a"), version=1)
    fleet.add(added, lambda error: None)
    applied([line], fleet)
    fleet.take(line.next("beat"), Gone("it died"))
    waiting, other = Query((1,), adapter), Query((1,))
    fleet.step([waiting, other], [])
    fleet.take(line.next("open"), DESCRIPTION)
    fleet.take(line.next("add_adapter"), OSError("the folder has gone"))
    fleet.step([late := Query((2,), adapter)], [])
    told = dict(fleet.answers)
    assert set(told) == {waiting, late}
    for error in told.values():
        assert isinstance(error, EngineError)
        assert "adapter 'a' could not be loaded when" in str(error)
        assert "the folder has gone; add it again" in str(error)
    call = line.next("answer")
    assert call is not None
    fleet.take(call, ["row"])
    assert fleet.answers[-1] == (other, "row")


def test_prompt_that_kills_replicas_is_given_up() -> None:
    fleet, (line,) = started(1)
    outcomes: list[Exception | None] = []
    fleet.add(Entry(("pin", "prompt"), ("unpin", "prompt")), outcomes.append)
    for _ in range(MAX_DEATHS):
        assert outcomes == []
        fleet.take(line.next("beat"), Gone("it died"))
        fleet.take(line.next("open"), DESCRIPTION)
    (error,) = outcomes
    assert f"{MAX_DEATHS} replicas died, one after the other" in str(error)
    assert line.next("pin") is None


def test_entry_that_exists_is_added_at_once() -> None:
    entry, another = Entry(("pin", 1), ("unpin", 1)), Entry(("pin", 2), ("unpin", 2))
    log = Log(entries={entry: None}, change=Change(another, lambda error: None))
    assert not log.failed(entry, OSError())
    assert entry not in log.entries
    assert log.failed(another, OSError())


def test_starting_replica_is_awaited_for_a_limited_time() -> None:
    member = Member(0, line=None)
    watch = Watch([member], 100.0, 0.0)
    found = {}
    for state in State:
        watch.enter(member, state)
        found[state] = watch.awaited(member, 10.0)
    assert {state for state, awaited in found.items() if awaited} == {State.STARTING, State.LOADED}
    watch.enter(member, State.STARTING)
    assert not watch.awaited(member, 0.0)
