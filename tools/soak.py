"""Random use of a model by many at once, for as long as you like.

The model is that of a conformance suite. Users, several in each of several event loops, have random
programs: rows, samples and scores of contexts that grow and fork. Some leave, some change what the
model keeps. Answers are compared with cold rows, nobody may hang, and memory must stay flat. The
same seed gives each user the same program; how they meet depends on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import faulthandler
import gc
import itertools
import os
import random
import signal
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from attrs import define, field

from genlm.conformance import ConformanceSuite
from genlm.conformance.compare import ATOL, TOP_FACTOR
from genlm.conformance.contexts import Contexts
from genlm.conformance.driver import LoopThread
from genlm.conformance.lifecycle import alive
from genlm.core import AsyncLM, ModelClosedError
from genlm.core.cli.model import parsed
from tools.tiny import write_adapter, write_model
from tools.users import User, Usual

#: How many models are loaded and closed, one after the other. What the first one leaves behind
#: belongs to the process: libraries, compiled code, memory pools.
ROUNDS = 4

#: The parts of a round, as shares of its time. After the first two, the users leave; in the third,
#: the model is closed while users are active.
PARTS = (0.45, 0.45, 0.1)

#: The share of answers that are compared with cold rows.
COMPARED = 0.2

#: The most bytes by which each kind of memory may grow. Threads, files and futures may not grow.
SLACK = {"memory": 32 << 20, "tensors": 1 << 20}

#: The C library of the process.
LIBC = ctypes.CDLL(None) if os.name == "posix" else None
GLIBC = LIBC if hasattr(LIBC, "malloc_trim") else None
M_ARENA_MAX = -8  # the value from GNU's malloc.h

Usage = dict[str, int]


@define(eq=False)
class Soak:
    """A model under random use.

    Args:
        suite: Names the backend, the model and its adapters.
        minutes: For how long users work.
        loops: Event loops, each in a thread of its own.
        users: In each loop.
        longest: The longest context, in tokens.
    """

    suite: ConformanceSuite
    minutes: float
    loops: int = 2
    users: int = 4
    longest: int = 120
    counts: Counter[str] = field(factory=Counter)
    findings: list[str] = field(factory=list)
    deviation: float = 0.0
    programs: list[Usual] = field(factory=list)  # the programs of the active users
    used: list[list[Usage]] = field(factory=list)  # for each model, the usage after each part
    left: list[Usage] = field(factory=list)  # the usage after each model
    leaving: threading.Event = field(factory=threading.Event)  # set when users must leave
    stopped: threading.Event = field(factory=threading.Event)

    def run(self) -> bool:
        """Soak for the time given; whether nothing was found."""
        for number in range(ROUNDS):
            self.one_round(number)
            self.left.append(usage())
            if self.stopped.is_set():
                break
        else:
            self.must_not_grow("closed models leave", self.left[1:])
            for used in self.used[1:]:
                self.must_not_grow("a model with empty caches holds", used)
        print(self)
        return not self.findings

    def __str__(self) -> str:
        held = [each["memory"] >> 20 for used in self.used for each in used]
        left = [each["memory"] >> 20 for each in self.left]
        return (
            f"soak: {self.suite.backend}, seed {self.suite.seed}: "
            f"{self.counts['requests']:,} requests, {self.counts['answers']:,} compared with cold "
            f"rows (off by {self.deviation:.1g} at most), MiB held {held}, left {left}, "
            f"{len(self.findings)} findings"
        )

    def must_not_grow(self, what: str, each: Sequence[Usage]) -> None:
        for kind, first in each[0].items():
            if each[-1][kind] > first + SLACK.get(kind, 0):
                self.found(f"{what} ever more {kind}: {[held[kind] for held in each]}")

    def one_round(self, number: int) -> None:
        """Use a model until its users leave, a second time, and then until it is closed while they
        are active."""
        violations: list[Exception] = []
        lm = self.suite.load(check=violations.append)
        self.used.append([])
        for part, share in enumerate(PARTS):
            closes = part == len(PARTS) - 1
            seconds = 60 * self.minutes / ROUNDS * share
            with ended_if_it_hangs(seconds + 4 * self.suite.patience):
                self.one_part(lm, f"{self.suite.seed}-{number}-{part}", seconds, closes)
                if not closes:
                    lm.clear_cache()
                    lm.clear_kv_cache()
            if not closes:
                self.used[-1].append(usage())
        for violation in violations:
            self.found(violation)
        if failed := lm.stats.failed_calls:
            self.found(f"{failed} calls of the engine failed, though nothing wrong was asked")
        self.counts["requests"] += lm.stats.requests
        print(self, file=sys.stderr, flush=True)

    def one_part(self, lm: AsyncLM, seed: str, seconds: float, closes: bool) -> None:
        """All users at work for some time. Beside the last of them, whose model is closed, is
        another model that is closed, too."""
        self.leaving.clear()
        loops = [LoopThread() for _ in range(self.loops)]
        names = [f"{seed}-{user}" for user in range(self.loops * self.users)]
        users = [
            threading.Thread(target=self.use, args=(lm, name, loop, closes))
            for name, loop in zip(names, itertools.cycle(loops), strict=False)
        ]
        second = self.suite.load() if closes and self.suite.second_model else None
        if second is not None:
            args = (second, f"{seed}-second", loops[0], True)
            users.append(threading.Thread(target=self.use, args=args))
        for user in users:
            user.start()
        self.stopped.wait(seconds)
        if closes:
            lm.close()
        if second is not None:
            second.close()
        self.leaving.set()
        for user in users:
            user.join()
        for loop in loops:
            loop.close()
        while self.programs:
            program = self.programs.pop()
            self.counts += program.counts
            self.deviation = max(self.deviation, program.deviation)

    def use(self, lm: AsyncLM, name: str, loop: LoopThread, closes: bool) -> None:
        """Run the program of a user, until all are to leave or the model closes."""
        user = User(lm, loop, name, self.suite.patience)
        try:
            program = self.program(user, name)
            self.programs.append(program)
            program.adapt()
            while not self.leaving.is_set():
                program.run(2)
            program.leave()
        except ModelClosedError as closed:
            if not closes:
                self.found(closed)
        except Exception as error:
            error.add_note(f"in the program of user {name}")
            self.found(error)
        user.leave()

    def program(self, user: User, name: str) -> Usual:
        """The program of one user."""
        lm = user.lm
        contexts = Contexts(lm.tokenizer, len(lm.byte_vocab), lm.max_context)
        return Usual(
            engine=user,
            source=random.Random(name),
            longest=min(self.longest, contexts.limit),
            adapters={each: os.fspath(path) for each, path in self.suite.adapters.items()},
            atol=TOP_FACTOR * self.suite.atol,
            share=COMPARED,
            may_lack_room=True,
            contexts=contexts,
        )

    def found(self, what: str | Exception) -> None:
        """Print a finding at once, since the end may hang, and let all users leave."""
        text = what if isinstance(what, str) else "".join(traceback.format_exception(what)).rstrip()
        self.findings.append(text)
        print(text, flush=True)
        self.stopped.set()

    def stop(self, *_: object) -> None:
        """Let users finish, and print what was done so far, since finishing may take long."""
        self.stopped.set()
        print(f"{self}, stopped early", flush=True)


@contextmanager
def ended_if_it_hangs(seconds: float) -> Iterator[None]:
    """Inside the block, end the process after a limit of time. Users notice hanging requests
    themselves; any other hang is noticed here."""
    hangs = threading.Timer(seconds, show_and_end)
    hangs.daemon = True
    hangs.start()
    try:
        yield
    finally:
        hangs.cancel()
        hangs.join()  # otherwise its objects would count as left behind


def show_and_end() -> None:
    """Print where each thread is, and end the process, which would otherwise wait for hanging
    threads.

    This holds the interpreter's lock. `dump_traceback_later` does not, and may crash while a thread
    runs.
    """
    faulthandler.dump_traceback(file=2)
    os._exit(1)


def usage() -> Usage:
    """The resources that the process holds, without garbage and without free memory it keeps."""
    now = alive()  # this collects garbage
    futures = [each for each in gc.get_objects() if issubclass(type(each), asyncio.Future | Future)]
    if GLIBC is not None:
        GLIBC.malloc_trim(0)
    statm = Path("/proc/self/statm")
    pages = int(statm.read_text().split()[1]) if statm.exists() else 0
    return {
        "memory": pages * (os.sysconf("SC_PAGE_SIZE") if pages else 0),
        "tensors": now.tensors,
        "threads": len(now.threads),
        "files": now.files,
        "pending futures": sum(not future.done() for future in futures),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--backend", default="mock")
    add("--model", default="mock", help="a folder, or a name as the backend takes")
    add("--tiny", action="store_true", help="a small random model with the tokenizer of --model")
    add("--minutes", type=float, default=1.0)
    add("--seed", type=int, default=1)
    add("--threads", type=int, default=2, help="threads with an event loop each")
    add("--workers", type=int, default=4, help="users in each event loop")
    add("--longest", type=int, default=120, help="the longest context, tokens")
    add("--atol", type=float, default=ATOL["float32"], help="the tolerance of probabilities")
    add("--no-adapters", action="store_true")
    add("--alone", action="store_true", help="load no second model")
    add("--option", action="append", default=[], metavar="NAME=JSON")
    given = parser.parse_args()
    if GLIBC is not None:
        # With one heap for each thread, the memory that threads free and keep would grow from round
        # to round.
        GLIBC.mallopt(M_ARENA_MAX, 1)
    suite = ConformanceSuite()
    suite.backend, suite.seed, suite.atol = given.backend, given.seed, given.atol
    suite.second_model = not given.alone
    suite.options = dict(parsed("--option", option) for option in given.option)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        suite.model = write_model(given.model, folder / "tiny") if given.tiny else given.model
        for seed, adapter in enumerate(() if given.no_adapters else ("first", "second")):
            path = adapter
            if suite.backend != "mock":
                path = write_adapter(str(suite.model), folder / adapter, seed)
            suite.adapters = {**suite.adapters, adapter: path}
        soak = Soak(suite, given.minutes, given.threads, given.workers, given.longest)
        signal.signal(signal.SIGTERM, soak.stop)
        sys.exit(not soak.run())


if __name__ == "__main__":
    main()
