"""Clauses on the beginning and the end of a model."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import importlib.metadata
import json
import os
import subprocess
import sys
import threading
import time
import tracemalloc
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from attrs import frozen

from genlm.conformance.advice import advise
from genlm.conformance.compare import Violation, brief, check
from genlm.conformance.driver import CALL_THREAD, Outcome, started
from genlm.conformance.model import IMPORT_SECONDS, imported
from genlm.conformance.scheduled import REBOUND_ADAPTER
from genlm.conformance.subject import Subject
from genlm.core.errors import ModelClosedError
from genlm.core.lm import AsyncLM

if TYPE_CHECKING:
    import torch

#: Modules that importing a plugin must not import, besides the engine's own distribution.
HEAVY_MODULES = frozenset({"jax", "mlx", "tensorflow", "torch", "transformers"})

#: Prints the top-level modules that looking at a backend imports, beyond those of the core.
LOOK_PROGRAM = """
import json, sys
from genlm.core.plugins import find_backend
before = set(sys.modules)
find_backend(sys.argv[1]).info()
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""


#: How many samples are made between two measurements of memory.
DRAWS_A_TURN = 24

#: The most bytes of Python objects that some hundred requests may leave and that are no leak: the
#: suite itself keeps some.
MAX_GROWTH_BYTES = 4 << 20

#: The part of the patience within which a closed model must have let go of everything.
SETTLING_PART = 1 / 12


@frozen
class Alive:
    """The objects that the process holds."""

    tensors: int  # bytes, each storage counted once
    threads: frozenset[str]
    files: int

    def check(self, before: Alive, tensors: float, left: str) -> None:
        """Raises: Violation: more is alive than ``before``; of tensors at least that many bytes."""
        # Threads are compared first, because they may hold the rest.
        threads = self.threads - before.threads
        check(not threads, f"threads that {left}: {', '.join(sorted(threads))}")
        grown = self.tensors - before.tensors
        check(grown < tensors, f"{grown} bytes of tensors {left}")
        files = self.files - before.files
        check(files <= 0, f"{files} open files {left}")


def alive() -> Alive:
    """Count what the process holds, after collecting what is no longer referred to."""
    gc.collect()
    return _holding(_tensors())


def _tensors() -> list[torch.Tensor]:
    """The tensors that the garbage collector looks at."""
    import torch

    # There may be a million objects, so each is looked at once, by its exact type.
    kinds = {torch.Tensor, torch.nn.Parameter}
    return [each for each in gc.get_objects() if type(each) in kinds]


def _holding(tensors: Iterable[torch.Tensor]) -> Alive:
    """The memory, threads and files that the process holds, given its tensors."""
    storages = {}
    for tensor in tensors:
        try:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        except (RuntimeError, NotImplementedError):
            continue  # The tensor has no memory.
    threads = frozenset(
        f"{thread.name} ({thread.ident})"
        for thread in threading.enumerate()
        if thread.name != CALL_THREAD
    )
    files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    return Alive(sum(storages.values()), threads, files)


class Census:
    """The tensors, threads and files that the process holds now, to compare with later.

    A process with an engine has a million objects, so they are looked through once. A later look is
    at newer objects and at the tensors of before, and at all objects only if there is too much.
    """

    def __init__(self) -> None:
        gc.collect()
        tensors = _tensors()
        self._before = _holding(tensors)
        self._tensors_before = [weakref.ref(tensor) for tensor in tensors]
        gc.freeze()

    def check(self, most: float, left: str) -> None:
        """Check that no threads and files are held beyond those of before, and of tensors fewer
        bytes than ``most``."""
        gc.collect()
        still = [tensor for each in self._tensors_before if (tensor := each()) is not None]
        with contextlib.suppress(Violation):
            return _holding([*still, *_tensors()]).check(self._before, most, left)
        # Earlier garbage may hold it: a cycle among objects that the collector skipped.
        gc.unfreeze()
        alive().check(self._before, most, left)

    def close(self) -> None:
        gc.unfreeze()


@contextlib.contextmanager
def _traced_memory() -> Iterator[Callable[[], int]]:
    """Inside the block, a function that returns how many bytes Python and NumPy have allocated in
    it and not freed. Objects that the garbage collector has not freed yet are counted."""

    def now() -> int:
        return tracemalloc.get_traced_memory()[0]

    ours = not tracemalloc.is_tracing()
    if ours:
        tracemalloc.start()
    try:
        yield now
    finally:
        if ours:
            tracemalloc.stop()


class LifecycleClauses:
    """A model leaves nothing behind, and a plugin is imported at no cost."""

    @advise("state, weights or a process are kept at module level", "nothing_is_left_after_close")
    def test_two_models_in_one_process(self, live: Subject) -> None:
        """Two more models of the same backend draw differently without a seed, keep their own
        adapters and state, and closing one does not affect the others."""
        prompt = live.contexts.stem[:4]
        length = min(24, live.contexts.limit - 5)
        live.cold(prompt)
        names = live.loras[:2]
        with contextlib.ExitStack() as stack:
            models = [stack.enter_context(contextlib.closing(live.another())) for _ in range(2)]
            drawn = [live.run(lm.sample(prompt, length, [], temperature=100.0)) for lm in models]
            check(
                drawn[0] != drawn[1],
                f"without a seed, two models draw the same {length} tokens after loading: "
                f"{brief(drawn[0])}",
            )
            adapted = list(zip(models, names, strict=False))
            for lm, name in adapted:
                lm.add_new_lora(live.adapters[name], "mine")
            longer = (*prompt, live.contexts.tokens[0])
            long = live.contexts.long(min(300, live.longest), 4)
            how = "of one of two models"
            for lm in models:
                live.expect.row(lm.next_token_logprobs_sync(long), long, how=how)
            for lm, name in adapted:
                row = lm.next_token_logprobs_sync(long, lora_name="mine")
                live.expect.row(row, long, name, how=how)
            for lm in models:
                lm.cache_kv(prompt)
                live.expect.row(lm.next_token_logprobs_sync(longer), longer, how=how)

            def check_adapters(adapted: list[tuple[AsyncLM, str]], how: str) -> None:
                for lm, name in adapted:
                    row = lm.next_token_logprobs_sync(prompt, lora_name="mine")
                    live.expect.row(row, prompt, name, how)

            check_adapters(adapted, "under a name that another model has for another")
            models[0].close()
            models[1].clear_cache()  # The engine itself must answer.
            check_adapters(adapted[1:], "after another model was closed")
            row = models[1].next_token_logprobs_sync(prompt)
            live.expect.row(row, prompt, how="after another model was closed")
        live.lm.clear_cache()
        live.check_row(prompt, how="after two other models were closed")

    @advise(
        "a list or dictionary of requests, rows or states is never emptied",
        "removed_adapters_leave_nothing",
        capability="memory",
    )
    def test_nothing_grows(self, live: Subject) -> None:
        """After ``clear_cache`` and ``clear_kv_cache``, the bytes of tensors, the threads and the
        open files are as many as before the same amount of work."""
        contexts = live.contexts.many(live.scaled(200, 60))
        third = len(contexts) // 3
        row = len(live.lm.byte_vocab) * 4

        def work_and_clear(turn: int) -> None:
            live.gather(contexts[turn * third : (turn + 1) * third])
            live.samples([contexts[0]] * DRAWS_A_TURN, 3, seed=0)
            live.lm.cache_kv(contexts[turn])
            live.model.clear()

        work = f"of {third} rows and {DRAWS_A_TURN} draws, after both clears"
        work_and_clear(0)  # The first turn may leave objects that are made once per process.
        # Inside the block everything takes several times as long.
        with _traced_memory() as traced:
            work_and_clear(1)
            with contextlib.closing(Census()) as before:
                held = traced()
                work_and_clear(2)
                before.check(third * row / 2, f"are left {work}")
                grown = traced() - held
        check(
            grown < MAX_GROWTH_BYTES,
            f"{grown} bytes of Python objects and NumPy arrays are left {work}",
        )

    @advise(
        "references to weights, threads or files of a removed adapter remain",
        "nothing_grows",
        capability="memory",
    )
    def test_removed_adapters_leave_nothing(self, live: Subject) -> None:
        """An adapter that is bound, asked for a row and removed again and again leaves no tensors,
        threads or open files."""
        name, *_ = live.needs_adapters(1)
        row = len(live.lm.byte_vocab) * 4

        def come() -> None:
            live.model.bind(REBOUND_ADAPTER, name)
            live.gather([live.contexts.stem[:4]], [REBOUND_ADAPTER])

        def go() -> None:
            live.model.remove(REBOUND_ADAPTER)
            live.model.clear()

        come()
        go()  # The first adapter may leave objects that are made once per process.
        left = "are left of 6 adapters that were removed"
        with contextlib.closing(Census()) as before:
            for _ in range(6):
                come()
                go()
            with contextlib.suppress(Violation):
                return before.check(3 * row, left)
            # An adapter may be large, and two of them may be kept for their next use.
            without = alive()
            come()
            one = alive().tensors - without.tensors
            go()
            before.check(max(2 * one, 3 * row), left)

    @advise(
        "genlm_close does not end threads and processes, or something at module level refers to "
        "the engine",
        "nothing_grows",
        capability="memory",
    )
    def test_nothing_is_left_after_close(self, live: Subject) -> None:
        """A model that has been used and closed leaves no tensors, threads or open files."""
        contexts = live.contexts.many(30)

        def use() -> None:
            lm = live.another()
            lm.batch_next_token_logprobs_sync(contexts)
            live.run(lm.sample(contexts[0], 3, [], seed=0))
            lm.cache_kv(contexts[1])
            lm.close()

        def check_what_is_left() -> None:
            most = len(contexts) * len(live.lm.byte_vocab) * 4 / 2
            with contextlib.closing(Census()) as before:
                use()
                until = time.monotonic() + live.patience * SETTLING_PART
                # Connections to processes that have ended go a while later.
                while True:
                    try:
                        return before.check(most, "are left of a closed model")
                    except Violation:
                        if time.monotonic() > until:
                            raise
                    time.sleep(0.2)

        # A leak occurs each time; objects that are made once per process do not.
        for _ in range(2):
            with contextlib.suppress(Violation):
                return check_what_is_left()
        check_what_is_left()

    @advise(
        "genlm_close waits for requests that no step advances any more",
        "death_of_the_engines_processes",
        capability="closing",
    )
    def test_close_fails_what_is_pending(self, live: Subject) -> None:
        """``close`` gives every waiting caller a ``ModelClosedError`` and returns, also while
        requests are in flight; these may still get their answers."""
        stem = live.contexts.stem
        live.cold(stem[:2])
        live.model.reset()
        lm = live.lm

        async def say_goodbye() -> tuple[list[Outcome], list[Outcome]]:
            live.gate.hold()
            taken = await started(lm.next_token_logprobs(stem[:2]))
            await live.gate.until_held()
            waiting = await started(*(lm.next_token_logprobs(stem[:n]) for n in (3, 4, 4)))
            closing = asyncio.wrap_future(live.thread(lm.close))
            # These requests must end while the engine is still busy with the first one.
            ended = await live.soon(asyncio.gather(*waiting, return_exceptions=True))
            live.gate.release()
            rest = asyncio.gather(*taken, closing, return_exceptions=True)
            return ended, await live.soon(rest)

        try:
            waiting, (taken, closed) = live.run(say_goodbye())
        finally:
            live.model.end(closed=True)
        for outcome in waiting:
            check(
                isinstance(outcome, ModelClosedError),
                f"a request that was pending when the model was closed ended in {outcome!r:.200} "
                "instead of a ModelClosedError",
            )
        check(
            closed is None,
            f"close() failed while the engine computed a request: {closed!r:.200}",
        )
        if not isinstance(taken, ModelClosedError):
            live.expect.row(taken, stem[:2], how="computed while the model was closed")

    @advise("genlm_load does not call genlm.core.options.refuse_unknown")
    def test_unknown_option_is_refused(self, live: Subject) -> None:
        """An option that the backend does not have is rejected before the model is loaded."""
        other = copy.copy(live.suite)
        other.options = {**other.options, "no_such_option": 1}
        try:
            lm = live.model.loaded(other.load)
        except ValueError as error:
            check(
                "no_such_option" in str(error),
                f"the error for the option no_such_option=1 does not name it: {error}",
            )
        else:
            lm.close()
            raise Violation("the option no_such_option=1 was accepted")

    @advise("the plugin module imports the engine at its top; import it in genlm_load")
    def test_import_of_plugin_imports_no_engine(self, live: Subject) -> None:
        """Importing the plugin module and asking what the backend is imports no engine and no
        tensor library."""
        look = [sys.executable, "-c", LOOK_PROGRAM, live.suite.backend]
        patience = max(live.patience, IMPORT_SECONDS)
        try:
            looked = subprocess.run(look, capture_output=True, text=True, timeout=patience)
        except subprocess.TimeoutExpired:
            raise Violation(
                f"importing the plugin module and asking genlm_backend_info took more than "
                f"{patience:g} s: it hangs"
            ) from None
        check(
            looked.returncode == 0,
            "importing the plugin module or asking genlm_backend_info failed: "
            f"{looked.stderr[-500:]}",
        )
        brought = set(json.loads(looked.stdout.splitlines()[-1]))
        backend = imported(live.suite.backend, live)
        engine = backend.info().engine
        own = backend.entry_point.dist.name if backend.entry_point.dist else None
        modules = importlib.metadata.packages_distributions().items()
        forbidden = {module for module, names in modules if engine in names and engine != own}
        found = sorted(brought & (forbidden | HEAVY_MODULES))
        check(
            not found,
            f"importing {backend.entry_point.value} and asking genlm_backend_info imports "
            f"{', '.join(found)}",
        )
