"""Clauses on the process that a model lives in: it is the program's, and not the engine's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import psutil
import pytest

from genlm.conformance.advice import advise
from genlm.conformance.compare import check
from genlm.conformance.driver import Outcome, started
from genlm.conformance.settings import set_generators
from genlm.conformance.subject import Subject

#: Processes that Python itself starts for the whole program.
PYTHON_PROCESSES = ("resource_tracker", "forkserver")

#: Tokens of the sample that is under way when processes are killed.
DRAWN_TOKENS = 30


class ProcessClauses:
    """Side effects on the process, and the processes of the engine's own."""

    @advise(
        "torch.manual_seed, random.seed or np.random.seed with the seed of a request; use a "
        "Generator of its own",
        "unseeded_after_seeded",
        capability="process",
    )
    def test_seeded_draw_sets_no_generator(self, live: Subject) -> None:
        """A seeded sample, a row and a score do not seed the global generators of Python, NumPy and
        PyTorch. (They may take numbers from them.)"""
        prompt, tokens = live.contexts.stem[:4], live.contexts.tokens[:2]
        asked: dict[str, Callable[[], object]] = {
            "a draw with seed 5": lambda: live.sample(prompt, 3, seed=5),
            "a batch of draws with seed 5": lambda: live.samples([prompt] * 3, 3, seed=5),
            "a row": lambda: live.ask(prompt),
            "a score": lambda: live.score(prompt, tokens),
        }
        for what, ask in asked.items():

            def ask_anew(ask: Callable[[], object] = ask) -> None:
                live.model.clear()
                ask()

            found = set_generators(ask_anew)
            check(
                not found,
                f"{what} sets {' and '.join(found)} generator: the program's own random numbers "
                "repeat after it; draw from a generator of the request's own",
            )

    @advise(
        "the engine, or a library that it imports, changes settings of the process; restore "
        "them after loading",
        "seeded_draw_sets_no_generator",
        capability="process",
    )
    def test_process_is_as_it_was(self, live: Subject) -> None:
        """After a model was loaded, used and closed, the process has its former default dtype and
        device, threads, signal handlers, environment variables and working directory, and its
        generators were not seeded. (An engine may add variables.)"""
        live.lm  # noqa: B018  (loads the model where no clause before has)
        found = live.model.changed_settings
        check(not found, f"since the model was loaded: {'; '.join(found[:4])}")
        prompt = live.contexts.stem[:4]

        def load_and_close() -> None:
            with contextlib.closing(live.another()) as lm:
                live.run(lm.sample(prompt, 3, [], seed=3))

        generators = set_generators(load_and_close)
        found = live.model.changed_settings
        what = "a model that is loaded, asked and closed"
        check(not found, f"after {what}: {'; '.join(found[:4])}")
        check(
            not generators,
            f"{what} sets {' and '.join(generators)} generator: keep its state and put it back "
            "(genlm.kit.randomness)",
        )

    @advise(
        "a step waits for a message without checking that the sender is alive; raise "
        "EngineDeadError",
        "close_fails_what_is_pending",
        capability="death",
    )
    def test_death_of_the_engines_processes(self, live: Subject) -> None:
        """If the processes of a second model are killed, pending and later requests are answered or
        raise, and the model can be closed."""
        before = _children()
        contexts = live.contexts.many(16)
        with contextlib.closing(live.another()) as lm:
            own = [one for one in _children() if one not in before]
            if not own:
                pytest.skip("the engine has no processes of its own below this one")
            live.run(lm.next_token_logprobs(contexts[0]))

            async def ask(some: range, kill: bool) -> list[Outcome]:
                asked = await started(
                    *(lm.next_token_logprobs(contexts[i]) for i in some),
                    lm.sample(contexts[0], DRAWN_TOKENS, [], seed=some[0]),
                )
                if kill:
                    live.note(f"the engine's own processes were killed ({len(own)})")
                for one in own if kill else ():
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
                return await asyncio.gather(*asked, return_exceptions=True)

            for when, some, kill in (("before", range(1, 8), True), ("after", range(8, 12), False)):
                how = f"asked for {when} the engine's own processes were killed"
                *rows, _ = live.run(ask(some, kill))
                for i, row in zip(some, rows, strict=True):
                    if not isinstance(row, Exception):
                        live.expect.row(row, contexts[i], how=how)


def _children() -> list[psutil.Process]:
    """The processes below this one."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if not any(name in " ".join(one.cmdline()) for name in PYTHON_PROCESSES):
                found.append(one)
    return found
