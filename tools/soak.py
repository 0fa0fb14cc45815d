"""Random operations on a model, from several threads and event loops, for some time.

Rows are compared with cold ones, nothing may hang or get lost, and memory must stay flat. It prints
one line of figures. A finding is printed with the operations before it, which ``--replay`` runs
again, one after the other.

The time is divided into rounds, each with a model of its own. What a closed model leaves behind
must not grow from round to round. So a cache that fills up does not count as a leak, even in a
short run.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import faulthandler
import gc
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from attrs import define, field

from genlm.core import (
    AsyncLM,
    ModelClosedError,
    QueriesResetError,
    UnknownAdapterError,
    load_model_by_name,
)
from tools.tiny import write_adapter, write_model

#: An operation hangs if nothing ends for PATIENCE seconds, or if it
#: alone takes MOST_WAITS times that.
PATIENCE, MOST_WAITS = 180.0, 10

#: How many models are loaded and closed one after the other. What the first leaves behind is for
#: the process: libraries, compiled code, memory pools.
ROUNDS = 4

#: How much more the last may leave behind than the second: bytes, and a share.
GROWTH, GROWTH_SHARE = 64 << 20, 0.05

#: Seconds from one line of progress to the next.
PROGRESS = 60.0

#: Tokens whose log-probability is within this of the greatest are compared, nats.
LIKELY = 8.0

#: How often each kind of operation is chosen.
KINDS = {
    "extend": 40,
    "fork": 10,
    "drop": 8,
    "start": 8,
    "sample": 6,
    "score": 6,
    "cancel": 6,
    "timeout": 4,
    "sync": 4,
    "pin": 1,
    "clear": 1,
    "clear_state": 1,
    "reset": 1,
    "rebind": 1,
    "second": 0.05,
    "reload": 0.05,
}


@define
class Operation:
    """One operation; all that it needs to be run again."""

    worker: int
    kind: str
    contexts: list[list[int]] = field(factory=list)
    adapter: str | None = None
    number: int = 0
    compare: bool = False


class Finding(Exception):
    """Something that must not happen."""


@define
class Soak:
    """A model under random operations."""

    options: argparse.Namespace
    adapters: dict[str, str]
    lm: AsyncLM = field(init=False)
    counts: Counter[str] = field(factory=Counter)
    history: deque[Operation] = field(factory=lambda: deque(maxlen=2_000))
    findings: list[str] = field(factory=list)
    lock: threading.Lock = field(factory=threading.Lock)
    loading: threading.Lock = field(factory=threading.Lock)
    stopping: threading.Event = field(factory=threading.Event)
    asked: int = 0
    ended: int = 0

    def __attrs_post_init__(self) -> None:
        self.lm = self.load()

    def load(self) -> AsyncLM:
        options = dict(self.options.option)
        lm = load_model_by_name(self.options.model, backend=self.options.backend, llm_opts=options)
        for name, path in self.adapters.items():
            lm.add_new_lora(path, name)
        return lm

    # --- what is done -----------------------------------------------------------------------------

    async def run(self, operation: Operation) -> None:
        """Carry out one operation, and check what it gives."""
        lm = self.lm
        with self.lock:
            self.history.append(operation)
            self.counts[operation.kind] += 1
        try:
            method: Callable[[AsyncLM, Operation], Awaitable[None]] = getattr(
                self, f"do_{operation.kind}"
            )
            await self.patiently(method(lm, operation))
            with self.lock:
                self.asked += len(operation.contexts)
        except QueriesResetError:
            self.counts["reset requests"] += 1
        except ModelClosedError as error:
            if lm is self.lm and not self.loading.locked():
                raise Finding("the model is closed, and nothing has closed it") from error
            self.counts["closed requests"] += 1
            await asyncio.to_thread(self.wait_for_load)
        except UnknownAdapterError as error:
            if operation.adapter != "rebound":
                raise Finding(f"an adapter is lost: {error}") from error
        except TimeoutError as error:
            raise Finding(f"{operation.kind} did not end: {error}") from error
        finally:
            with self.lock:
                self.ended += 1

    async def patiently(self, work: Awaitable[None]) -> None:
        """Wait for an operation; on a slow machine for as long as others end meanwhile."""
        task = asyncio.ensure_future(work)
        try:
            for _ in range(MOST_WAITS):
                before = self.ended, self.counts["rows"]
                await asyncio.wait({task}, timeout=PATIENCE)
                if task.done():
                    return task.result()
                if before == (self.ended, self.counts["rows"]):
                    raise TimeoutError(f"nothing has ended for {PATIENCE:.0f} s")
            raise TimeoutError(f"others have, for {MOST_WAITS * PATIENCE:.0f} s")
        finally:
            task.cancel()

    async def do_extend(self, lm: AsyncLM, operation: Operation) -> None:
        rows = await asyncio.gather(
            *(
                lm.next_token_logprobs(ids, lora_name=operation.adapter)
                for ids in operation.contexts
            )
        )
        for row in rows:
            self.check_row(lm, row)
        compared = [operation.number % len(rows)] if operation.compare else []
        if self.options.replay:
            compared = list(range(len(rows)))
        for i in compared:
            await self.compare(lm, operation.contexts[i], operation.adapter, rows[i])

    do_start = do_fork = do_drop = do_extend

    async def do_sync(self, lm: AsyncLM, operation: Operation) -> None:
        rows = await asyncio.to_thread(
            lm.batch_next_token_logprobs_sync, operation.contexts, lora_name=operation.adapter
        )
        for row in rows:
            self.check_row(lm, row)

    async def do_sample(self, lm: AsyncLM, operation: Operation) -> None:
        most = 1 + operation.number % 6
        draws = await asyncio.gather(
            *(
                lm.sample(ids, most, [], seed=operation.number, lora_name=operation.adapter)
                for ids in operation.contexts
            )
        )
        for drawn in draws:
            if len(drawn) != most or not all(0 <= i < len(lm.byte_vocab) for i in drawn):
                raise Finding(f"a draw of {most} tokens gave {drawn}")

    async def do_score(self, lm: AsyncLM, operation: Operation) -> None:
        ids = operation.contexts[0]
        middle = max(1, len(ids) - 1 - operation.number % 4)
        context, continuation = ids[:middle], ids[middle:]
        if not continuation:
            return
        scores = await lm.sequence_logprobs(context, continuation, lora_name=operation.adapter)
        if scores.shape != (len(continuation),) or bool(scores.isnan().any()):
            raise Finding(f"scores of {len(continuation)} tokens are {scores}")
        if operation.compare and operation.adapter != "rebound":
            for i, token_id in enumerate(continuation):
                cold = await self.cold(lm, ids[: middle + i], operation.adapter)
                likely = float(cold[token_id]) > float(cold.max()) - LIKELY
                if likely and abs(float(scores[i] - cold[token_id])) > self.options.atol:
                    raise Finding(f"the score {scores[i]} of token {i} is {cold[token_id]} cold")
            self.counts["compared"] += len(continuation)

    async def do_cancel(self, lm: AsyncLM, operation: Operation) -> None:
        tasks = [
            asyncio.ensure_future(lm.next_token_logprobs(ids, lora_name=operation.adapter))
            for ids in operation.contexts
        ]
        for _ in range(operation.number % 4):
            await asyncio.sleep(0)
        left = tasks[len(tasks) // 2 :]
        for task in left:
            task.cancel()
        kept = await asyncio.gather(*tasks[: len(tasks) // 2])
        await asyncio.gather(*left, return_exceptions=True)
        for row in kept:
            self.check_row(lm, row)

    async def do_timeout(self, lm: AsyncLM, operation: Operation) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout((operation.number % 20) / 1000):
                await asyncio.gather(
                    *(
                        lm.next_token_logprobs(ids, lora_name=operation.adapter)
                        for ids in operation.contexts
                    )
                )

    async def do_pin(self, lm: AsyncLM, operation: Operation) -> None:
        await asyncio.to_thread(lm.cache_kv, operation.contexts[0][:64])

    async def do_clear(self, lm: AsyncLM, operation: Operation) -> None:
        lm.clear_cache()

    async def do_clear_state(self, lm: AsyncLM, operation: Operation) -> None:
        await asyncio.to_thread(lm.clear_kv_cache)

    async def do_reset(self, lm: AsyncLM, operation: Operation) -> None:
        lm.reset_async_queries()

    async def do_rebind(self, lm: AsyncLM, operation: Operation) -> None:
        if "rebound" in self.adapters:
            path = list(self.adapters.values())[operation.number % 2]
            await asyncio.to_thread(lm.add_new_lora, path, "rebound")

    async def do_second(self, lm: AsyncLM, operation: Operation) -> None:
        """Another model beside this one."""
        if self.options.alone:
            return

        def ask() -> None:
            with self.loading, self.load() as second:
                self.check_row(second, second.next_token_logprobs_sync(operation.contexts[0]))

        await asyncio.to_thread(ask)

    async def do_reload(self, lm: AsyncLM, operation: Operation) -> None:
        """Close the model while others use it, and load it again."""

        def again() -> None:
            with self.loading:
                if lm is self.lm:
                    lm.close()
                    self.lm = self.load()

        await asyncio.to_thread(again)

    def wait_for_load(self) -> None:
        """Wait until the model that is being loaded is there."""
        with self.loading:
            pass

    # --- what must hold ---------------------------------------------------------------------------

    def check_row(self, lm: AsyncLM, row: torch.Tensor) -> None:
        if row.shape != (len(lm.byte_vocab),) or row.dtype != torch.float32:
            raise Finding(f"a row is {row.dtype} {tuple(row.shape)}")
        if not abs(float(row.logsumexp(0))) < 1e-3:
            raise Finding(f"a row is not normalised: {float(row.logsumexp(0))}")
        self.counts["rows"] += 1

    async def compare(
        self, lm: AsyncLM, ids: list[int], adapter: str | None, row: torch.Tensor
    ) -> None:
        """Compare a row with one computed alone, from its tokens."""
        # A name that is bound again and again has one of two adapters.
        names = list(self.adapters)[:2] if adapter == "rebound" else [adapter]
        far = []
        for name in names:
            cold = await self.cold(lm, ids, name)
            far.append(difference(row, cold))
        self.counts["compared"] += 1
        self.counts["worst difference, 1e-9"] = max(
            self.counts["worst difference, 1e-9"], int(min(far) * 1e9)
        )
        if min(far) > self.options.atol:
            raise Finding(
                f"a row of {len(ids)} tokens with adapter {adapter} is {min(far):.3g} off its "
                f"cold row: {ids}"
            )

    async def cold(self, lm: AsyncLM, ids: list[int], adapter: str | None) -> torch.Tensor:
        return await asyncio.to_thread(lm.next_token_logprobs_uncached, ids, lora_name=adapter)

    # --- who does it ------------------------------------------------------------------------------

    async def work(self, worker: int, number: int, until: float) -> None:
        """One worker: a population of contexts and a stream of operations."""
        generator = random.Random(f"{self.options.seed}-{number}-{worker}")
        chooser = Chooser(generator, worker, len(self.lm.byte_vocab), self.options, self.adapters)
        while time.monotonic() < until and not self.stopping.is_set():
            operation = chooser.next()
            try:
                await self.run(operation)
            except Exception as error:
                self.found(operation, error)
                return

    def found(self, operation: Operation, error: Exception) -> None:
        with self.lock:
            text = "".join(traceback.format_exception(error)).rstrip()
            self.findings.append(f"worker {operation.worker}, {operation.kind}:\n{text}")
        self.stopping.set()

    def thread(self, first: int, number: int, until: float) -> None:
        """One event loop with several workers."""

        async def all_workers() -> None:
            workers = range(first, first + self.options.workers)
            await asyncio.gather(*(self.work(worker, number, until) for worker in workers))

        asyncio.run(all_workers())


@define
class Chooser:
    """Chooses the operations of one worker; they depend on the seed alone."""

    generator: random.Random
    worker: int
    vocab_size: int
    options: argparse.Namespace
    adapters: dict[str, str]
    population: list[list[int]] = field(factory=list)

    def next(self) -> Operation:
        generator, population = self.generator, self.population
        kind = generator.choices(list(KINDS), list(KINDS.values()))[0]
        if len(population) < 2 or kind == "start":
            population.append(self.prompt())
        if kind == "fork":
            population.append([*generator.choice(population), self.token()])
        if kind == "drop" and len(population) > 4:
            del population[generator.randrange(len(population))]
        if kind == "extend":
            for ids in generator.sample(population, generator.randint(1, len(population))):
                ids += [self.token() for _ in range(generator.choice((1, 1, 1, 2, 5)))]
        self.trim()
        chosen = generator.sample(population, generator.randint(1, min(16, len(population))))
        adapter = generator.choice([None, None, *self.adapters]) if self.adapters else None
        return Operation(
            worker=self.worker,
            kind=kind,
            contexts=[list(ids) for ids in chosen],
            adapter=adapter,
            number=generator.randrange(1_000),
            compare=generator.random() < 0.2,
        )

    def trim(self) -> None:
        """Keep the population small, and contexts short enough for the model."""
        self.population[:] = [ids for ids in self.population if len(ids) < self.options.longest]
        del self.population[:-24]
        if not self.population:
            self.population.append(self.prompt())

    def prompt(self) -> list[int]:
        """A new context; half of them share the beginning of another."""
        if self.population and self.generator.random() < 0.5:
            known = self.generator.choice(self.population)
            return [*known[: self.generator.randint(1, len(known))], self.token()]
        return [self.token() for _ in range(self.generator.choice((1, 2, 3, 5, 8, 17, 40)))]

    def token(self) -> int:
        return self.generator.randrange(self.vocab_size)


def soak(options: argparse.Namespace, adapters: dict[str, str]) -> bool:
    """Run it; returns whether nothing was found."""
    unfinished = pending_work()  # of others in this process; held until the end
    one = Soak(options, adapters)
    signal.signal(signal.SIGTERM, lambda *_: stop_early(one))
    start = time.monotonic()
    memory, left = [resident()], []
    for number in range(ROUNDS):
        if number:
            one.lm = one.load()
        memory += one_round(one, number, start)
        finish(one)
        left.append(settled())
        if one.stopping.is_set():
            break
    took = time.monotonic() - start
    check_leftovers(one, left, {*map(id, unfinished)})
    return report(one, took, memory, left)


def stop_early(one: Soak) -> None:
    """Let the operations under way end, and report. What was done is told now, because a slow model
    may be killed before they end."""
    one.stopping.set()
    asked, findings = one.asked, len(one.findings)
    print(f"soak: stopped early: {asked:,} requests, {findings} findings so far", flush=True)


def one_round(one: Soak, number: int, start: float) -> list[int]:
    """Work for one of the rounds; the memory of the process, now and then."""
    options, memory = one.options, []
    until = start + 60 * options.minutes * (number + 1) / ROUNDS
    workers = range(0, options.threads * options.workers, options.workers)
    threads = [
        threading.Thread(target=one.thread, args=(first, number, until)) for first in workers
    ]
    for thread in threads:
        thread.start()
    told = time.monotonic()
    ended, since = one.ended, told
    while any(thread.is_alive() for thread in threads):
        threads[0].join(timeout=1.0)
        for thread in threads[1:]:
            thread.join(timeout=0.01)
        memory.append(resident())
        if one.ended != ended:
            ended, since = one.ended, time.monotonic()
        elif time.monotonic() > since + 2 * PATIENCE:
            end_stuck(one)
        if time.monotonic() > told + PROGRESS:
            told = time.monotonic()
            minutes = (told - start) / 60
            print(f"{minutes:.1f} minutes: {one.asked:,} requests", file=sys.stderr, flush=True)
    return memory


def end_stuck(one: Soak) -> None:
    """End the process: nothing ends, and no event loop says so, so they hang themselves."""
    faulthandler.dump_traceback()
    asked = one.asked
    print(f"soak: after {asked:,} requests the event loops hang; see the threads above", flush=True)
    os._exit(1)


def finish(one: Soak) -> None:
    """The model still works; then it ends."""
    try:
        one.check_row(one.lm, one.lm.next_token_logprobs_sync([1, 2, 3]))
        one.lm.clear_kv_cache()
    except Exception as error:
        one.findings.append(f"the model does not work at the end: {error!r}")
    one.lm.close()


def pending_work() -> list[Any]:
    """The futures of this process that are not done, and the engine threads that are alive."""
    gc.collect()
    futures = [
        found for found in gc.get_objects() if issubclass(type(found), asyncio.Future | Future)
    ]
    threads = [thread for thread in threading.enumerate() if "genlm-" in thread.name]
    return [*(future for future in futures if not future.done()), *threads]


def check_leftovers(one: Soak, left: list[int], before: set[int]) -> None:
    if waiting := [found for found in pending_work() if id(found) not in before]:
        one.findings.append(
            f"{len(waiting)} futures or engine threads are left at the end: {waiting[:3]}"
        )
    if len(left) == ROUNDS and left[-1] > left[1] * (1 + GROWTH_SHARE) + GROWTH:
        one.findings.append(f"closed models leave ever more MiB: {[n >> 20 for n in left]}")


def report(one: Soak, took: float, memory: list[int], left: list[int]) -> bool:
    options, counts = one.options, one.counts
    done = sum(counts[kind] for kind in KINDS)
    print(
        f"soak: {options.backend}, seed {options.seed}: {one.asked:,} requests in {done:,} "
        f"operations, {took / 60:.1f} minutes, {counts['rows']:,} rows checked, "
        f"{counts['compared']:,} compared with cold ones (worst "
        f"{counts['worst difference, 1e-9'] / 1e9:.1g}), {max(memory) >> 20} MiB at most, "
        f"{' '.join(str(n >> 20) for n in left)} MiB after each round, "
        f"{len(one.findings)} findings"
    )
    if not one.findings:
        return True
    for finding in one.findings:
        print(finding)
    file = Path(options.operations)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as lines:
        for operation in one.history:
            lines.write(json.dumps([getattr(operation, name) for name in FIELDS]) + "\n")
    print(f"the operations are in {file}")
    print(f"--replay {file} runs them again, one by one, and compares every row")
    return False


FIELDS = ("worker", "kind", "contexts", "adapter", "number", "compare")


def replay(options: argparse.Namespace, adapters: dict[str, str]) -> bool:
    """Run recorded operations, one after the other."""
    one = Soak(options, adapters)
    lines = Path(options.replay).read_text().splitlines()

    async def all_operations() -> None:
        for line in lines:
            operation = Operation(*json.loads(line))
            try:
                await one.run(operation)
            except Exception as error:
                one.found(operation, error)

    start = time.monotonic()
    asyncio.run(all_operations())
    finish(one)
    options.operations = os.devnull
    return report(one, time.monotonic() - start, [resident()], [settled()])


def difference(row: torch.Tensor, cold: torch.Tensor) -> float:
    """The greatest difference between two rows, nats, among the tokens that are likely in one."""
    likely = (row > row.max() - LIKELY) | (cold > cold.max() - LIKELY)
    return float((row - cold)[likely].abs().max())


def settled() -> int:
    """The memory of this process without garbage, and without free memory that is kept."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:  # the GNU C library has it
        trim(0)
    return resident()


def resident() -> int:
    """The memory of this process, bytes; 0 where it cannot be read."""
    file = Path("/proc/self/statm")
    if not file.exists():
        return 0
    return int(file.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def adapters_of(options: argparse.Namespace, folder: Path) -> dict[str, str]:
    """Two adapters, and a name that is bound to one and the other."""
    if options.no_adapters:
        return {}
    if options.backend == "mock":
        paths = ["first", "second"]
    else:
        paths = [write_adapter(options.model, folder / name, len(name)) for name in ("a", "bb")]
    return {"first": paths[0], "second": paths[1], "rebound": paths[0]}


def named_value(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    return name, json.loads(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="mock")
    parser.add_argument("--model", default="mock", help="a folder, or a name as the backend takes")
    parser.add_argument(
        "--tiny", action="store_true", help="a small random model with the tokenizer of --model"
    )
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="threads with an event loop each")
    parser.add_argument("--workers", type=int, default=4, help="workers in each event loop")
    parser.add_argument("--longest", type=int, default=120, help="the longest context, tokens")
    parser.add_argument("--atol", type=float, default=0.01, help="the tolerance of rows, nats")
    parser.add_argument("--no-adapters", action="store_true")
    parser.add_argument("--alone", action="store_true", help="load no second model")
    parser.add_argument(
        "--option", type=named_value, action="append", default=[], metavar="NAME=JSON"
    )
    parser.add_argument("--replay", help="a file of operations, instead of random ones")
    parser.add_argument("--operations", help="where to write the operations of a finding")
    options = parser.parse_args()
    options.operations = options.operations or f"build/soak-{options.backend}-{options.seed}.jsonl"
    with tempfile.TemporaryDirectory() as folder:
        if options.tiny:
            options.model = write_model(options.model, Path(folder) / "tiny")
        adapters = adapters_of(options, Path(folder))
        sound = (replay if options.replay else soak)(options, adapters)
    sys.exit(0 if sound else 1)


if __name__ == "__main__":
    main()
