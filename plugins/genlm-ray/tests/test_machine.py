"""The fleet without Ray: replicas that die, hang and answer late, as a test on a clock of its own
says, for two programs that share them."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis.strategies as st
from attrs import define, field
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, precondition, rule

from genlm.core import Adapter, Query, SamplingParams
from genlm.core.mock import ByteTokenizer
from genlm.core.types import Request, SampleRequest, ScoreRequest, query_of
from genlm.ray.fleet import CANCELLED, Fleet
from genlm.ray.log import Entry
from genlm.ray.member import Call
from genlm.ray.placing import DEATHS
from genlm.ray.watch import PULSE
from genlm.ray.wire import Ask, Busy, Description, Gone, adapter_key

DESCRIPTION = Description(frozenset(), ByteTokenizer(), 258, None)

#: A token whose request, a path whose adapter ends the process; a path that is refused.
POISON, KILLS, REFUSED = 66, "kills", "refused"

LIFETIMES = itertools.count()


class Gentle(Exception):
    """What a replica raises for an adapter that it refuses."""


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
        return self.method in ("add_adapter", "pin") or (
            self.method == "answer" and self.arguments[1]
        )

    def kills(self) -> bool:
        if self.method == "answer":
            return any(POISON in ask[0] for ask in self.arguments[0])
        return self.method == "add_adapter" and self.arguments[1] == KILLS

    def subject(self) -> object:
        """What would be blamed for a death: a single request, or an entry."""
        if self.method == "answer":
            return self.call.jobs[0].request
        return self.call.entry


@define(eq=False)
class Process:
    """A replica's process: the programs that it knows, and the calls that it is at work on."""

    alive: bool = True
    hangs: bool = False
    loaded: bool = False
    sessions: dict[str, int] = field(factory=dict)
    have: dict[str, set[Any]] = field(factory=dict)
    asked: list[Asked] = field(factory=list)


class World:
    """All processes, and what is on its way back from them."""

    def __init__(self, replicas: int) -> None:
        self.now = 0.0
        self.processes = [Process(alive=False) for _ in range(replicas)]
        self.arriving: list[tuple[Asked, Any]] = []
        self.gone_paths = {REFUSED}  # adapters whose folders are gone; this one, on the last node
        self.harmed: dict[object, int] = {}  # deaths that something on trial was not to blame for

    def reply(self, asked: Asked, outcome: Any) -> None:
        self.arriving.append((asked, outcome))

    def die(self, process: Process, *, by: Asked | None = None) -> None:
        process.alive = False
        for asked in process.asked:
            self.reply(asked, Gone("it has died"))
            if asked.on_trial and asked is not by:
                self.harm(asked)
        process.asked.clear()

    def receive(self, process: Process, asked: Asked) -> None:
        if asked.method == "answer":
            beside = [a for a in process.asked if a.method == "answer"]
            assert all(
                a.on_trial == asked.on_trial for a in beside if a.program is asked.program
            ), "suspects beside others"
        if process.alive and not process.hangs and self.busy(process, asked):
            self.reply(asked, Busy())
        elif process.alive:
            process.asked.append(asked)
        else:
            self.reply(asked, Gone("it was dead"))
            if asked.on_trial:
                self.harm(asked)

    def harm(self, asked: Asked) -> None:
        self.harmed[asked.subject()] = self.harmed.get(asked.subject(), 0) + 1

    def busy(self, process: Process, asked: Asked) -> bool:
        others = (each for each in process.asked if each.program is not asked.program)
        return asked.on_trial and any(each.on_trial for each in others)

    def work(self, process: Process, asked: Asked) -> None:
        """A process finishes a call, or dies of it."""
        if not process.alive or process.hangs or asked.method == "beat":
            return
        if asked not in process.asked:
            return
        if self.busy(process, asked):  # they came while it was stopped
            process.asked.remove(asked)
            return self.reply(asked, Busy())
        name = asked.program.name
        if asked.method != "open" and process.sessions.get(name) != asked.life:
            process.asked.remove(asked)
            self.reply(asked, Gone("it does not know the program", computing=False))
        elif asked.kills():
            self.die(process, by=asked)
        else:
            process.asked.remove(asked)
            self.reply(asked, self.result(process, asked))

    def result(self, process: Process, asked: Asked) -> Any:
        name, arguments = asked.program.name, asked.arguments
        have = process.have.setdefault(name, set())
        if asked.method == "open":
            for other in [a for a in process.asked if a.program is asked.program]:
                process.asked.remove(other)
                self.reply(other, Gone("the session is over", computing=False))
            process.sessions[name], process.have[name] = asked.life, set()
            return DESCRIPTION
        if asked.method == "answer":
            return [self.answer(ask, have) for ask in arguments[0]]
        if asked.method == "add_adapter":
            there = arguments[1] == REFUSED and process is not self.processes[-1]
            if arguments[1] in self.gone_paths and not there:
                return Gentle(arguments[1])
            have.add(arguments[0])
        elif asked.method == "pin":
            have.add(arguments[0])
        elif asked.method == "clear":
            have -= {each for each in have if isinstance(each, tuple)}
        else:
            assert asked.method in ("remove_adapter", "unpin")
            assert arguments[0] in have, "it has not got that"
            dropped = {a for a in have if isinstance(a, tuple) and a[1] == arguments[0]}
            have -= {arguments[0], *dropped}
        return None

    def answer(self, ask: Ask, have: set[Any]) -> Any:
        if ask[1] is not None and ask[1] not in have:
            return LookupError("the replica has no such adapter")
        return ("answer", ask[0])

    def forget(self, process: Process, program: Program) -> None:
        """As when it has not heard of a program for too long."""
        if process.alive and not process.hangs and process.sessions.pop(program.name, None):
            process.have.pop(program.name)
            for asked in [a for a in process.asked if a.program is program]:
                process.asked.remove(asked)
                self.reply(asked, Gone("not heard of", computing=False))

    def beat(self) -> None:
        """Time passes: the calls of the watch come back."""
        for process in self.processes:
            for asked in [a for a in process.asked if a.method == "beat"]:
                if process.alive and not process.hangs:
                    process.asked.remove(asked)
                    known = process.sessions.get(asked.program.name) == asked.life
                    self.reply(asked, None if known else Gone("unknown", computing=False))

    def deliver(self, index: int) -> None:
        asked, outcome = self.arriving.pop(index)
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
        if self.process is not None and not self.shared and self.process.alive:
            self.world.die(self.process)
        if not self.world.processes[self.index].alive:
            self.world.processes[self.index] = Process()
        self.process = self.world.processes[self.index]

    def send(self, call: Call, method: str, token: tuple[str, int], *arguments: Any) -> None:
        assert self.process is not None
        asked = Asked(self.program, call, method, token[1], arguments)
        self.world.receive(self.process, asked)

    def cancel(self, call: Call) -> None:
        assert self.process is not None
        for asked in [a for a in self.process.asked if a.call is call]:
            self.process.asked.remove(asked)
            self.world.reply(asked, CANCELLED)


class Program:
    """One program: what it has asked, and what must become of it."""

    def __init__(self, name: str, world: World, *, shared: bool) -> None:
        self.name = name
        self.flying: list[Request] = []
        self.versions = itertools.count(1)
        self.adapters: list[Adapter] = []
        self.pins: list[Entry] = []
        self.changing: tuple[Entry | None, Adapter | None] | None = None
        lines = [Line(world, self, index, shared) for index in range(len(world.processes))]
        self.world = world
        self.fleet = Fleet(name, lines, (None, "mock", "mock", {}), 1e9, world.now, shared=shared)

    def check_answers(self) -> None:
        answers, self.fleet.answers = self.fleet.answers, []
        for request, result in answers:
            place = next(i for i, each in enumerate(self.flying) if each is request)
            del self.flying[place]  # so it is answered once
            query = query_of(request)
            lost = query.adapter is not None and query.adapter.path in self.world.gone_paths
            if lost and "add it again" in str(result):
                continue
            if POISON in query.token_ids:
                assert "3 replicas died" in str(result), result
            else:
                assert result == ("answer", tuple(query.token_ids)), result

    def step(self, newcomers: list[Request], dropped: list[Request]) -> None:
        self.flying = [r for r in self.flying if all(r is not d for d in dropped)] + newcomers
        self.fleet.step(newcomers, dropped)
        self.check_answers()

    def changed(self, error: Exception | None) -> None:
        assert self.changing is not None
        (entry, adapter), self.changing = self.changing, None
        if adapter is not None and adapter.path == REFUSED and error is None:
            self.adapters.append(adapter)  # who refuses it was away, and it will be lost
        elif adapter is not None and adapter.path in (KILLS, *self.world.gone_paths):
            assert error is not None
            if adapter.path == KILLS:
                assert f"{DEATHS} replicas died" in str(error)
        else:
            assert error is None, error
            if adapter is not None:
                self.adapters.append(adapter)
            elif entry is not None and entry.pinned:
                self.pins.append(entry)


REPLICA = st.integers(0, 2)
PROGRAM = st.integers(0, 1)


class Machine(RuleBasedStateMachine):
    requests = Bundle("requests")

    @initialize(replicas=st.integers(1, 3), programs=st.integers(1, 2))
    def start(self, replicas: int, programs: int) -> None:
        self.world = World(replicas)
        self.fresh_poisons = 0
        self.programs = [Program(f"p{i}", self.world, shared=programs > 1) for i in range(programs)]

    # --- what programs do -------------------------------------------------------------------------

    def program(self, index: int) -> Program:
        return self.programs[index % len(self.programs)]

    def idle(self, program: Program) -> bool:
        return program.changing is None and program.fleet.started

    @rule(program=PROGRAM, kinds=st.lists(st.integers(0, 3), min_size=1, max_size=12))
    def ask(self, program: int, kinds: list[int]) -> None:
        asking = self.program(program)
        if self.idle(asking):
            asking.step([self.request(asking, kind) for kind in kinds], [])

    @precondition(lambda self: self.fresh_poisons < DEATHS - 1)
    @rule(program=PROGRAM, kind=st.integers(0, 3))
    def ask_poison(self, program: int, kind: int) -> None:
        asking = self.program(program)
        if self.idle(asking):
            self.fresh_poisons += 1
            asking.step([self.request(asking, kind, POISON)], [])

    def request(self, program: Program, kind: int, *poison: int) -> Request:
        adapter = program.adapters[-1] if kind == 3 and program.adapters else None
        query = Query((next(LIFETIMES) % 50, next(LIFETIMES), *poison), adapter)
        params = SamplingParams(max_tokens=3)
        return (query, SampleRequest(query, params), ScoreRequest(query, (1,)), query)[kind]

    @rule(program=PROGRAM, which=st.integers(0, 100))
    def drop(self, program: int, which: int) -> None:
        dropping = self.program(program)
        if dropping.flying:
            dropping.step([], [dropping.flying[which % len(dropping.flying)]])

    @rule(program=PROGRAM, path=st.sampled_from(["a", "b", "c", REFUSED, KILLS]), pin=st.booleans())
    def add(self, program: int, path: str, pin: bool) -> None:
        adding = self.program(program)
        if not self.idle(adding) or adding.flying:  # as the core does it
            return
        if pin:
            adapter = adding.adapters[-1] if adding.adapters and path == "a" else None
            key = adapter and adapter_key(adapter.version, adding.name)
            asked: Ask = ((0,), key, False, None, None)
            version = adapter and adapter.version
            entry = Entry(("pin", asked), ("unpin", asked), version)
            if adapter and adapter.path in self.world.gone_paths:
                return
            adding.changing = (entry, None)
        else:
            adapter = Adapter(path, path, next(adding.versions))
            key = adapter_key(adapter.version, adding.name)
            entry = Entry(("add_adapter", key, path), ("remove_adapter", key), adapter.version)
            adding.changing = (entry, adapter)
        adding.fleet.add(entry, adding.changed)

    @rule(program=PROGRAM, clear=st.booleans())
    def remove(self, program: int, clear: bool) -> None:
        removing = self.program(program)
        if not self.idle(removing) or removing.flying:
            return
        removing.changing = (None, None)
        if clear:
            removing.pins.clear()
            removing.fleet.clear(Entry(("clear",)), removing.changed)
        elif removing.adapters:
            version = removing.adapters.pop().version
            removing.pins = [pin for pin in removing.pins if pin.version != version]
            removing.fleet.remove_adapter(version, removing.changed)
        else:
            removing.changing = None

    # --- what replicas do -------------------------------------------------------------------------

    def process(self, index: int) -> Process:
        return self.world.processes[index % len(self.world.processes)]

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
            for asked in list(process.asked):
                self.world.work(process, asked)
        while self.world.arriving:
            self.world.deliver(0)

    @rule(seconds=st.sampled_from([0.5, 2.0, PULSE]))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds
        if seconds == PULSE:
            self.world.beat()
        for program in self.programs:
            program.fleet.tick(self.world.now)
            program.check_answers()

    # --- what goes wrong --------------------------------------------------------------------------

    def may_kill(self, process: Process) -> bool:
        """A replica that is killed whenever it starts, and a request whose replica is killed
        whenever it is tried, cannot be told from what is broken."""
        if any(m.failures for program in self.programs for m in program.fleet.members):
            return False
        subjects = {request for program in self.programs for request in program.flying}
        subjects |= {program.changing[0] for program in self.programs if program.changing}
        harm = max((self.world.harmed.get(each, 0) for each in subjects), default=0)
        return harm + self.fresh_poisons + self.unnoticed() < DEATHS - 1

    def unnoticed(self) -> int:
        """Processes that are dead, and a program does not know it."""
        return sum(not process.alive for process in self.world.processes)

    @rule(replica=REPLICA)
    def kill(self, replica: int) -> None:
        process = self.process(replica)
        if process.alive and self.may_kill(process):
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
        started = self.program(program).fleet.started
        if started and self.may_kill(self.process(replica)):
            self.world.forget(self.process(replica), self.program(program))

    @rule(path=st.sampled_from(["a", "b"]))
    def folder_gone(self, path: str) -> None:
        if not any(program.changing for program in self.programs):
            self.world.gone_paths.add(path)

    # --- what must come of it ---------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for index, process in enumerate(self.world.processes):
            alone = len(self.programs) == 1  # then the program itself ends what hangs
            if not (alone and self.programs[0].fleet.members[index].loaded):
                process.hangs = False
        for _ in range(400):
            self.go_on()
            self.wait(2.0)
            self.wait(PULSE)
            if self.at_rest():
                break
        for program in self.programs:
            assert not program.flying, "a request was never answered"
            assert program.changing is None, "a change never ended"
            assert program.fleet.started
            self.check_state(program)

    def at_rest(self) -> bool:
        return not self.world.arriving and all(
            not program.flying and not program.changing and m.ready
            for program in self.programs
            for m in program.fleet.members
        )

    def check_state(self, program: Program) -> None:
        """Every replica has what was added, less what was lost with its folder."""
        kept = {a.version for a in program.adapters if a.path not in self.world.gone_paths}
        must = {adapter_key(version, program.name) for version in kept}
        must |= {p.apply[1] for p in program.pins if p.version is None or p.version in kept}
        may = must | {adapter_key(a.version, program.name) for a in program.adapters}
        may |= {pin.apply[1] for pin in program.pins}
        haves = [process.have[program.name] for process in self.world.processes]
        assert all(must <= have <= may for have in haves), (must, haves)
        assert all(have == haves[0] for have in haves), haves


Machine.TestCase.settings = settings(
    max_examples=300,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestFleet = Machine.TestCase
