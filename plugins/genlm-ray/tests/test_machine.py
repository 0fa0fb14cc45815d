"""The fleet without Ray: two programs share replicas that die, hang and answer late, on a clock of
the test."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import hypothesis.strategies as st
from attrs import define, field
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from genlm.core import Adapter, Query, SamplingParams
from genlm.core.types import Request, SampleRequest, ScoreRequest, query_of
from genlm.ray.fleet import CANCELLED, Fleet
from genlm.ray.log import Entry
from genlm.ray.member import Call
from genlm.ray.placing import MAX_DEATHS
from genlm.ray.watch import PULSE_SECONDS
from genlm.ray.wire import Ask, Busy, Gone, adapter_key, ids_of

from .test_fleet import DESCRIPTION

#: A token whose request ends the process, a path whose adapter ends the process, and a path that
#: the last replica rejects.
POISON, KILLS, REFUSED = 66, "kills", "refused"

FRESH = itertools.count()


@define(eq=False)
class Asked:
    """A call that has reached a process."""

    program: Program
    call: Call
    method: str
    life: int
    arguments: tuple[Any, ...]

    @property
    def on_trial(self) -> bool:
        if self.method == "answer":
            return bool(self.arguments[1])
        return self.method in ("add_adapter", "pin")

    def kills(self) -> bool:
        if self.method == "answer":
            return any(POISON in ids_of(ask) for ask in self.arguments[0])
        return self.method == "add_adapter" and self.arguments[1] == KILLS


@define(eq=False)
class Process:
    """A replica's process: the programs that it knows, and its current calls."""

    alive: bool = True
    hangs: bool = False
    sessions: dict[str, int] = field(factory=dict)
    have: dict[str, set[Any]] = field(factory=dict)
    asked: list[Asked] = field(factory=list)


class World:
    """All processes, and the messages on their way back from them."""

    def __init__(self, replicas: int) -> None:
        self.now = 0.0
        self.processes = [Process(alive=False) for _ in range(replicas)]
        self.arriving: list[tuple[Asked, Any]] = []
        self.gone_paths = {REFUSED}  # adapters whose folders no longer exist

    def reply(self, process: Process, asked: Asked, outcome: Any) -> None:
        process.asked.remove(asked)
        self.arriving.append((asked, outcome))

    def die(self, process: Process) -> None:
        process.alive = False
        for asked in [*process.asked]:
            self.reply(process, asked, Gone("it has died"))

    def receive(self, process: Process, asked: Asked) -> None:
        mine = [each for each in process.asked if each.program is asked.program]
        if asked.method == "answer":
            beside = {each.on_trial for each in mine if each.method == "answer"}
            assert beside <= {asked.on_trial}, "suspects beside others"
        process.asked.append(asked)
        if not process.alive:
            self.die(process)
        elif not process.hangs and self.busy(process, asked):
            self.reply(process, asked, Busy())

    def busy(self, process: Process, asked: Asked) -> bool:
        """Whether another program tries something there."""
        beside = (each for each in process.asked if each.program is not asked.program)
        return asked.on_trial and any(each.on_trial for each in beside)

    def work(self, process: Process, asked: Asked) -> None:
        """A process finishes a call, or dies of it."""
        if process.hangs or asked.method == "beat" or asked not in process.asked:
            return
        name = asked.program.name
        if self.busy(process, asked):  # the messages arrived while it was stopped
            self.reply(process, asked, Busy())
        elif asked.method != "open" and process.sessions.get(name) != asked.life:
            self.reply(process, asked, Gone("it does not know the program", computing=False))
        elif asked.kills():
            self.die(process)
        elif asked.method == "open":
            self.forget(process, asked.program, but=asked)
            process.sessions[name], process.have[name] = asked.life, set()
            self.reply(process, asked, DESCRIPTION)
        else:
            self.reply(process, asked, self.result(process, asked))

    def result(self, process: Process, asked: Asked) -> Any:
        have, arguments = process.have[asked.program.name], asked.arguments
        if asked.method == "answer":
            return [self.answer(ask, have) for ask in arguments[0]]
        if asked.method == "add_adapter":
            has_it = arguments[1] == REFUSED and process is not self.processes[-1]
            if arguments[1] in self.gone_paths and not has_it:
                return OSError(arguments[1])
            have.add(arguments[0])
        elif asked.method == "pin":
            have.add(arguments[0])
        elif asked.method == "clear":
            have -= {each for each in have if isinstance(each, tuple)}
        else:
            assert asked.method in ("remove_adapter", "unpin")
            assert arguments[0] in have, "it has not got that"
            pinned = {each for each in have if isinstance(each, tuple) and each[1] == arguments[0]}
            have -= {arguments[0], *pinned}
        return None

    def answer(self, ask: Ask, have: set[Any]) -> Any:
        if ask[1] is not None and ask[1] not in have:
            return LookupError("the replica has no such adapter")
        return ("answer", ids_of(ask))

    def forget(self, process: Process, program: Program, but: Asked | None = None) -> None:
        """The session of a program ends."""
        process.sessions.pop(program.name, None)
        process.have.pop(program.name, None)
        for asked in [a for a in process.asked if a.program is program and a is not but]:
            self.reply(process, asked, Gone("the session is over", computing=False))

    def beat(self) -> None:
        """Time passes: the calls of the watch come back."""
        for process in self.processes:
            for asked in [a for a in process.asked if a.method == "beat" and not process.hangs]:
                known = process.sessions.get(asked.program.name) == asked.life
                self.reply(process, asked, None if known else Gone("unknown", computing=False))

    def deliver(self, index: int) -> None:
        """Messages are delivered in any order, but a death comes after the replica's earlier
        messages."""
        asked, outcome = self.arriving[index]
        if isinstance(outcome, Gone):
            members = [(each.program, each.call.member.index) for each, _ in self.arriving]
            index = members.index((asked.program, asked.call.member.index))
        asked, outcome = self.arriving.pop(index)
        under_way = asked.call.member.calls
        if asked.call in under_way and isinstance(outcome, Gone) and outcome.computing:
            asked.program.suspect(under_way)
        asked.program.fleet.take(asked.call, outcome)
        asked.program.check_answers()


@define
class Line:
    world: World
    program: Program
    index: int
    shared: bool
    process: Process | None = None

    def start(self) -> None:
        if self.process is not None and self.process.alive:
            self.give_up(self.process)
        if not self.world.processes[self.index].alive:
            self.world.processes[self.index] = Process()
        self.process = self.world.processes[self.index]

    def give_up(self, process: Process) -> None:
        """Give up a hanging replica. A program ends only its own replicas."""
        self.program.suspect(each.call for each in process.asked if each.program is self.program)
        if not self.shared:
            self.world.die(process)

    def send(self, call: Call, method: str, token: tuple[str, int], *arguments: Any) -> None:
        assert self.process is not None
        asked = Asked(self.program, call, method, token[1], arguments)
        self.world.receive(self.process, asked)

    def cancel(self, call: Call) -> None:
        assert self.process is not None
        for asked in [each for each in self.process.asked if each.call is call]:
            self.world.reply(self.process, asked, CANCELLED)


class Program:
    """One program: its requests, and their expected outcomes."""

    def __init__(self, name: str, world: World, *, shared: bool) -> None:
        self.name, self.world = name, world
        self.flying: list[Request] = []
        self.versions = itertools.count(1)
        self.adapters: dict[Adapter, Entry] = {}
        self.pins: list[Entry] = []
        self.deaths: Counter[Entry | Request] = Counter()
        self.changing: tuple[Entry | None, Adapter | None] | None = None
        lines = [Line(world, self, index, shared) for index in range(len(world.processes))]
        self.fleet = Fleet(name, lines, (None, "mock", "mock", {}), 1e9, world.now, shared=shared)

    @property
    def idle(self) -> bool:
        return self.changing is None and self.fleet.started

    def newest_adapter(self) -> Adapter | None:
        return next(reversed(self.adapters), None)

    def check_answers(self) -> None:
        answers, self.fleet.answers = self.fleet.answers, []
        for request, result in answers:
            place = next(i for i, each in enumerate(self.flying) if each is request)
            del self.flying[place]  # so that it is answered only once
            query = query_of(request)
            if query.adapter and "add it again" in str(result):
                assert self.may_lack(self.adapters[query.adapter]), result
            elif f"{MAX_DEATHS} replicas died" in str(result):
                assert self.may_blame(request), result
            else:
                assert result == ("answer", tuple(query.token_ids)), result
                assert POISON not in query.token_ids

    def suspect(self, calls: Iterable[Call]) -> None:
        """A replica died during these calls: it may be by an entry, or by a request that was tried
        alone."""
        tried: list[Request] = []
        for call in calls:
            if call.entry is not None and call.entry.applied_by(call.action):
                self.deaths[call.entry] += 1
            tried += [job.request for job in call.jobs if call.on_trial]
        wanted = [request for request in tried if request in self.flying]
        if len(wanted) == 1:
            self.deaths[wanted[0]] += 1

    def may_blame(self, suspect: Entry | Request) -> bool:
        """An entry that was present whenever a replica died cannot be told from one that kills
        it."""
        return self.deaths[suspect] >= MAX_DEATHS

    def may_lack(self, entry: Entry) -> bool:
        """Whether a restarted replica may lack the entry."""
        return entry.apply[-1] in self.world.gone_paths or self.may_blame(entry)

    def step(self, new_requests: list[Request], dropped: list[Request]) -> None:
        self.flying = [r for r in self.flying if all(r is not d for d in dropped)] + new_requests
        self.fleet.step(new_requests, dropped)
        self.check_answers()

    def changed(self, error: Exception | None) -> None:
        assert self.changing is not None
        (entry, adapter), self.changing = self.changing, None
        path = adapter and adapter.path
        if f"{MAX_DEATHS} replicas died" in str(error):
            assert self.may_blame(entry), error
        elif path != REFUSED:  # the replica that rejects the path may be away
            assert (error is not None) == (path in self.world.gone_paths), error
            assert path != KILLS
        if error is None and adapter is not None:
            assert entry is not None
            self.adapters[adapter] = entry
        elif error is None and entry is not None:
            self.pins.append(entry)

    def check_state(self) -> None:
        """Check that every replica has all entries that were added and not lost."""
        added = [*self.adapters.values(), *self.pins]
        lost = {entry.version for entry in self.adapters.values() if self.may_lack(entry)}
        kept = [each for each in added if each.version not in lost and not self.may_lack(each)]
        must, may = ({entry.apply[1] for entry in entries} for entries in (kept, added))
        haves = [process.have[self.name] for process in self.world.processes]
        assert must <= haves[0] <= may, (must, haves)
        assert all(have == haves[0] for have in haves), haves


REPLICA = st.integers(0, 2)
PROGRAM = st.integers(0, 1)


class Machine(RuleBasedStateMachine):
    @initialize(replicas=st.integers(1, 3), programs=st.integers(1, 2))
    def start(self, replicas: int, programs: int) -> None:
        self.world = World(replicas)
        self.programs = [Program(f"p{i}", self.world, shared=programs > 1) for i in range(programs)]

    def program(self, index: int) -> Program:
        return self.programs[index % len(self.programs)]

    def process(self, index: int) -> Process:
        return self.world.processes[index % len(self.world.processes)]

    # --- what programs do -------------------------------------------------------------------------

    @rule(program=PROGRAM, kinds=st.lists(st.integers(0, 3), min_size=1, max_size=12))
    def ask(self, program: int, kinds: list[int]) -> None:
        asking = self.program(program)
        if asking.idle:
            asking.step([self.request(asking, kind) for kind in kinds], [])

    @rule(program=PROGRAM, kind=st.integers(0, 3))
    def ask_poison(self, program: int, kind: int) -> None:
        asking = self.program(program)
        if asking.idle:
            asking.step([self.request(asking, kind, POISON)], [])

    def request(self, program: Program, kind: int, *poison: int) -> Request:
        adapter = program.newest_adapter() if kind == 3 else None
        query = Query((next(FRESH) % 50, next(FRESH), *poison), adapter)
        params = SamplingParams(max_tokens=3)
        return (query, SampleRequest(query, params), ScoreRequest(query, (1,)), query)[kind]

    @rule(program=PROGRAM, which=st.integers(0, 100))
    def drop(self, program: int, which: int) -> None:
        dropping = self.program(program)
        if dropping.flying:
            dropping.step([], [dropping.flying[which % len(dropping.flying)]])

    def changing(self, program: int) -> Program | None:
        """A program that may change its state: nothing is in flight, as the core sees to."""
        found = self.program(program)
        return found if found.idle and not found.flying else None

    @rule(program=PROGRAM, path=st.sampled_from(["a", "b", "c", REFUSED, KILLS]))
    def add(self, program: int, path: str) -> None:
        if adding := self.changing(program):
            adapter = Adapter(path, path, next(adding.versions))
            key = adapter_key(adapter.version, adding.name)
            entry = Entry(("add_adapter", key, path), ("remove_adapter", key), adapter.version)
            adding.changing = (entry, adapter)
            adding.fleet.add(entry, adding.changed)

    @rule(program=PROGRAM, adapted=st.booleans())
    def pin(self, program: int, adapted: bool) -> None:
        if pinning := self.changing(program):
            adapter = pinning.newest_adapter() if adapted else None
            if adapter is None or not pinning.may_lack(pinning.adapters[adapter]):
                version = adapter and adapter.version
                key = adapter and adapter_key(adapter.version, pinning.name)
                asked: Ask = ((0,), key, False, None, None, None)
                entry = Entry(("pin", asked), ("unpin", asked), version)
                pinning.changing = (entry, None)
                pinning.fleet.add(entry, pinning.changed)

    @rule(program=PROGRAM)
    def clear(self, program: int) -> None:
        if clearing := self.changing(program):
            clearing.pins.clear()
            clearing.changing = (None, None)
            clearing.fleet.clear(Entry(("clear",)), clearing.changed)

    @rule(program=PROGRAM)
    def remove(self, program: int) -> None:
        removing = self.changing(program)
        if removing and removing.adapters:
            version = removing.adapters.popitem()[0].version
            removing.pins = [pin for pin in removing.pins if pin.version != version]
            removing.changing = (None, None)
            removing.fleet.remove_adapter(version, removing.changed)

    # --- what replicas do -------------------------------------------------------------------------

    @rule(replica=REPLICA, which=st.integers(0, 100))
    def work(self, replica: int, which: int) -> None:
        process = self.process(replica)
        if process.asked:
            self.world.work(process, process.asked[which % len(process.asked)])

    @rule(which=st.integers(0, 1000))
    def deliver(self, which: int) -> None:
        if self.world.arriving:
            self.world.deliver(which % len(self.world.arriving))

    @rule()
    def go_on(self) -> None:
        """Everything that can be done is done, once."""
        for process in self.world.processes:
            for asked in [*process.asked]:
                self.world.work(process, asked)
        while self.world.arriving:
            self.world.deliver(0)

    @rule(seconds=st.sampled_from([0.5, 2.0, PULSE_SECONDS]))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds
        if seconds == PULSE_SECONDS:
            self.world.beat()
        for program in self.programs:
            program.fleet.tick(self.world.now)
            program.check_answers()

    # --- what goes wrong --------------------------------------------------------------------------

    def may_kill(self, process: Process) -> bool:
        """A replica is not killed at every start, because that would be a replica that cannot
        start."""
        members = [member for program in self.programs for member in program.fleet.members]
        return process.alive and not any(member.failures for member in members)

    @rule(replica=REPLICA)
    def kill(self, replica: int) -> None:
        process = self.process(replica)
        if self.may_kill(process):
            self.world.die(process)

    @rule()
    def kill_all(self) -> None:
        for index in range(len(self.world.processes)):
            self.kill(index)

    @rule(replica=REPLICA, hangs=st.booleans())
    def hang(self, replica: int, hangs: bool) -> None:
        if not hangs or self.may_kill(self.process(replica)):
            self.process(replica).hangs = hangs

    @rule(replica=REPLICA, program=PROGRAM)
    def forget(self, replica: int, program: int) -> None:
        """A session ends, such as after the program was stopped for long."""
        process, forgotten = self.process(replica), self.program(program)
        known = forgotten.name in process.sessions and not process.hangs
        if known and forgotten.fleet.started and self.may_kill(process):
            self.world.forget(process, forgotten)

    @rule(path=st.sampled_from(["a", "b"]))
    def folder_gone(self, path: str) -> None:
        if not any(program.changing for program in self.programs):
            self.world.gone_paths.add(path)

    # --- what must come of it ---------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for index, process in enumerate(self.world.processes):
            alone = len(self.programs) == 1  # then the program itself ends a hanging replica
            if not (alone and self.programs[0].fleet.members[index].loaded):
                process.hangs = False
        for _ in range(400):
            self.wait(2.0)
            self.wait(PULSE_SECONDS)
            self.go_on()
            if self.at_rest():
                break
        for program in self.programs:
            assert not program.flying, "a request was never answered"
            assert program.changing is None, "a change never ended"
            assert program.fleet.started
            program.check_state()

    def at_rest(self) -> bool:
        under_way = [asked.method for process in self.world.processes for asked in process.asked]
        members = [member for program in self.programs for member in program.fleet.members]
        return (
            {*under_way} == {"beat"}
            and all(member.ready for member in members)
            and not any(process.hangs for process in self.world.processes)
            and not any(program.flying or program.changing for program in self.programs)
        )


Machine.TestCase.settings = settings(
    max_examples=300,
    stateful_step_count=60,
    deadline=None,
    # Random findings would concern another change; `costly_machine.py` looks for them.
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestFleet = Machine.TestCase
