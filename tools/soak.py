"""Random use of a model by many at once, for as long as you like.

The model, its oracle and the requests are those of the conformance suite. Users, several in each of
several event loops, ask for rows, draws and scores of contexts that grow and fork. Some leave, some
change what the model keeps. Answers are compared with cold rows, nobody may hang, and memory must
stay flat. The same seed gives each user the same actions; how they meet depends on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import faulthandler
import gc
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from attrs import define, field

from genlm.conformance import ConformanceSuite
from genlm.conformance.compare import ATOL, Violation
from genlm.conformance.lifecycle import alive
from genlm.core import AsyncLM, ModelClosedError, QueriesResetError
from genlm.core.cli.model import parsed
from tools.tiny import write_adapter, write_model
from tools.users import Live, User

#: How many models are loaded and closed, one after the other. What the first leaves behind is for
#: the process: libraries, compiled code, memory pools.
ROUNDS = 4

#: The parts of a round, as shares of its time. Twice its users leave; the third time, the model is
#: closed under them.
PARTS = (0.45, 0.45, 0.1)

#: By how much what is held may grow, in bytes; threads, files and futures may not.
SLACK = {"memory": 32 << 20, "tensors": 1 << 20}

#: The GNU C library, where it is the one in use.
LIBC = ctypes.CDLL(None) if os.name == "posix" else None
GLIBC = LIBC if hasattr(LIBC, "malloc_trim") else None
M_ARENA_MAX = -8  # of its malloc.h

Held = dict[str, int]


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
    live: Live = field(init=False)
    counts: Counter[str] = field(factory=Counter)
    findings: list[str] = field(factory=list)
    deviation: float = 0.0
    used: list[list[Held]] = field(factory=list)  # of each model, after each part
    left: list[Held] = field(factory=list)  # after each model
    stopped: threading.Event = field(factory=threading.Event)

    def run(self) -> bool:
        """Soak for the time given; whether nothing was found."""
        for number in range(ROUNDS):
            try:
                self.one_round(number)
            except Violation as hangs:
                self.found(hangs)
                show_and_end()
            self.left.append(held())
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
            f"{self.counts['requests']:,} requests, {self.counts['compared']:,} compared with cold "
            f"rows (off by {self.deviation:.1g} at most), MiB held {held}, left {left}, "
            f"{len(self.findings)} findings"
        )

    def must_not_grow(self, what: str, each: Sequence[Held]) -> None:
        for kind, first in each[0].items():
            if each[-1][kind] > first + SLACK.get(kind, 0):
                self.found(f"{what} ever more {kind}: {[held[kind] for held in each]}")

    def one_round(self, number: int) -> None:
        """Use a model until its users leave, and again, and then until it is closed under them."""
        self.live = live = Live(self.suite, self.counts)
        lm = live.lm  # loads it
        if live.adapters:
            live.bind_moving(next(iter(live.adapters)))
        self.used.append([])
        for part, share in enumerate(PARTS):
            live.closing = part == len(PARTS) - 1
            seconds = 60 * self.minutes / ROUNDS * share
            self.one_part(f"{self.suite.seed}-{number}-{part}", seconds, beside=part == 0)
            if not live.closing:
                lm.clear_cache()
                lm.clear_kv_cache()
                self.used[-1].append(held())
        for violation in live.contract_violations:
            self.found(violation)
        if failed := lm.stats.failed_calls:
            self.found(f"{failed} calls of the engine failed, though nothing wrong was asked")
        self.deviation = max(self.deviation, live.deviation)
        live.close()
        del self.live
        print(self, file=sys.stderr, flush=True)

    def one_part(self, seed: str, seconds: float, beside: bool) -> None:
        """All users at work for some time, and another model beside them."""
        # A request that hangs is noticed by who asks. If anything else does, show where, and end.
        hangs = threading.Timer(seconds + 4 * self.suite.patience, show_and_end)
        hangs.daemon = True
        hangs.start()
        self.live.leaving.clear()
        loops = [
            threading.Thread(target=asyncio.run, args=(self.one_loop(f"{seed}-{number}"),))
            for number in range(self.loops)
        ]
        for loop in loops:
            loop.start()
        if beside and self.suite.second_model:
            self.second_model()
        self.stopped.wait(seconds)
        if self.live.closing:
            self.live.lm.close()
        self.live.leaving.set()
        for loop in loops:
            loop.join()
        hangs.cancel()
        hangs.join()  # what it holds would count as left behind

    async def one_loop(self, seed: str) -> None:
        users = [
            User(self.live, random.Random(f"{seed}-{number}"), self.longest)
            for number in range(self.users)
        ]
        try:
            await asyncio.gather(*(user.work() for user in users))
        except Exception as error:
            self.found(error)

    def second_model(self) -> None:
        """Load another model, ask it, and close it while it is at work."""
        context = self.live.contexts.stem[:5]
        try:
            with self.suite.load() as second:
                work = threading.Thread(target=self.until_closed, args=(second,))
                work.start()
                with suppress(QueriesResetError):
                    row, cold = second.next_token_logprobs_sync(context), self.live.cold(context)
                    self.live.expect_row(row, cold, f"{list(context)}, asked of a second model")
            work.join()
        except Exception as error:
            self.found(error)

    def until_closed(self, lm: AsyncLM) -> None:
        """Ask rows of all beginnings of a context, again and again."""
        context = self.live.contexts.long(self.longest)
        try:
            while True:
                lm.clear_cache()
                lm.batch_next_token_logprobs_sync([context[: n + 1] for n in range(len(context))])
        except ModelClosedError:
            pass
        except Exception as error:
            self.found(error)

    def found(self, what: str | Exception) -> None:
        """Print a finding at once, since the end may hang, and let all users leave."""
        text = what if isinstance(what, str) else "".join(traceback.format_exception(what)).rstrip()
        self.findings.append(text)
        print(text, flush=True)
        self.stopped.set()

    def stop(self, *_: object) -> None:
        """Let users end what they do, and say what was done so far: it may take long."""
        self.stopped.set()
        print(f"{self}, stopped early", flush=True)


def random_work(suite: ConformanceSuite, seconds: float, longest: int = 120) -> str:
    """Rounds until the time is over; what they were.

    Raises:
        AssertionError: something was found.
    """
    until, number = time.monotonic() + seconds, 0
    each = min(seconds, 15.0)
    soak = Soak(suite, each * ROUNDS / 60, longest=longest)
    while number == 0 or time.monotonic() < until:
        soak.one_round(number)
        number += 1
        assert not soak.findings, soak.findings
    assert soak.counts["compared"], "nothing was compared"
    return str(soak)


def show_and_end() -> None:
    """Print where each thread stands, and end the process, which would wait for those that hang.

    With the interpreter's lock: `dump_traceback_later` takes none, and crashes where a thread runs.
    """
    faulthandler.dump_traceback(file=2)
    os._exit(1)


def held() -> Held:
    """What the process holds, without garbage, and without free memory that is kept."""
    now = alive()  # it collects garbage
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
        # With a heap for each thread, what they free and keep grows from round to round.
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
