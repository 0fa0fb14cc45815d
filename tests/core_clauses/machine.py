"""The clause on everything at once: any order of operations on one live model, and every answer is
the oracle's."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import hypothesis
from attrs import asdict, define
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from genlm.conformance.compare import check
from genlm.conformance.driver import Outcome, started, submitted
from genlm.conformance.subject import Subject
from genlm.core.adapters import UNSET, LoraName
from genlm.core.errors import EngineError, QueriesResetError, UnknownAdapterError
from genlm.core.types import TokenIds

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

Expected: TypeAlias = "torch.Tensor | type[Exception]"

#: Operations in one example.
STEPS = 50

DEFAULT = "(default)"  # the caller gives no lora_name


def drawn(attribute: str) -> st.SearchStrategy[Any]:
    """Something out of a list that the machine has."""
    return st.runner().flatmap(lambda machine: st.sampled_from(getattr(machine, attribute)))


class MachineClauses:
    """Any order of operations."""

    def test_any_order_of_operations(self, live: Subject) -> None:
        """Ask, gather, cancel, pin, clear, bind, select, remove, fail and reset, from several
        loops."""
        machine = hypothesis.seed(live.seed)(functools.partial(Operations, live))
        settings = live.settings(30, stateful_step_count=STEPS)
        live.explained(lambda: run_state_machine_as_test(machine, settings=settings))  # type: ignore[arg-type]


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self, live: Subject) -> None:
        self._live, self._loop = live, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What a coroutine gives that runs there; that it hangs is a violation."""
        return self._live.wait(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@define(eq=False)
class Asked:
    """A request on its way."""

    what: str
    loop: Loop
    task: asyncio.Future[torch.Tensor]
    expected: Expected
    excuses: tuple[type[BaseException], ...] = ()  # what it may end in instead
    looked_at: bool = False


class Operations(RuleBasedStateMachine):
    """The engine is held while requests gather, and let go by an operation that needs an answer."""

    def __init__(self, live: Subject) -> None:
        super().__init__()
        self.live = live
        live.reset()
        self.names = live.loras[:2]
        self.loras = [DEFAULT, None, *self.names]
        tokens = live.contexts.tokens[:2]
        ones = [(token,) for token in tokens]
        self.contexts = ones + [(*context, token) for context in ones for token in tokens]
        self.bound = {name: name for name in self.names}  # name -> whose adapter it stands for
        self.default: str | None = None
        self.rows = {
            (context, name): live.cold(context, name)
            for context in self.contexts
            for name in [None, *self.names]
        }
        self.asked: list[Asked] = []
        self.loops = [Loop(live), Loop(live)]
        self.stats = live.lm.stats

    # --- requests --------------------------------------------------------------------------------

    @rule(context=drawn("contexts"), lora=drawn("loras"), loop=st.integers(0, 1))
    def ask(self, context: TokenIds, lora: str | None, loop: int) -> None:
        """Ask in one of the loops; the answer is looked at later."""
        where, what = self.loops[loop], f"{list(context)} with {lora}"
        expected = self._expected(context, lora)
        self.live.gate.hold()
        row = self.live.lm.next_token_logprobs(context, lora_name=_given(lora))
        (task,) = where.run(started(row))
        self.asked.append(Asked(what, where, task, expected))

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 3))
    def cancel(self, which: int) -> None:
        """One of the callers leaves."""
        asked = self.asked[which % len(self.asked)]

        async def leave() -> None:
            asked.task.cancel()
            await submitted()

        asked.loop.run(leave())
        asked.excuses += (asyncio.CancelledError,)

    @precondition(lambda self: self.asked)
    @rule()
    def gather(self) -> None:
        """Look at all the answers."""
        self.live.gate.release()
        asked, self.asked = self.asked, []
        for request in asked:
            self._look(request)

    @rule(context=drawn("contexts"), lora=drawn("loras"), uncached=st.booleans())
    def ask_blocking(self, context: TokenIds, lora: str | None, uncached: bool) -> None:
        lm = self.live.lm
        method = lm.next_token_logprobs_uncached if uncached else lm.next_token_logprobs_sync
        self.live.gate.release()
        call = functools.partial(method, context, lora_name=_given(lora))
        outcome = self.live.outcome(self.live.thread(call))
        self._compare(f"{list(context)} with {lora}", outcome, self._expected(context, lora))

    @rule(contexts=st.lists(drawn("contexts"), min_size=1, max_size=3))
    def fail(self, contexts: list[TokenIds]) -> None:
        """The engine fails on one context, asked together with others."""
        self.gather()
        self.live.suite.poison.token_ids = contexts[0]
        for context in contexts:
            self.ask(context, None, loop=0)
            if context == contexts[0]:
                self.asked[-1].excuses += (EngineError,)  # or a cache has its row
        self.gather()
        self.live.suite.poison.token_ids = None

    @rule()
    def reset(self) -> None:
        """All requests that the engine has not taken end in an error."""
        self.live.lm.reset_async_queries()
        for asked in self.asked:
            asked.excuses += (QueriesResetError,)

    # --- state ------------------------------------------------------------------------------------

    @rule(context=drawn("contexts"), lora=drawn("loras"))
    def pin(self, context: TokenIds, lora: str | None) -> None:
        if not isinstance(self._expected(context, lora), type):
            self.live.gate.release()
            self.live.lm.cache_kv(context, lora_name=_given(lora))

    @rule(state=st.booleans())
    def clear(self, state: bool) -> None:
        """Clear the rows, or the key/value state."""
        if state:
            self.live.gate.release()
            self.live.lm.clear_kv_cache()
        else:
            self.live.lm.clear_cache()

    @rule(name=drawn("names"), adapter=drawn("names"))
    def bind(self, name: str, adapter: str) -> None:
        """Bind a name, perhaps anew: what was asked before is answered with what it stood for."""
        self.live.gate.release()
        self.live.bind(name, self.live.adapters[adapter])
        self.bound[name] = adapter

    @precondition(lambda self: self.bound)
    @rule(name=drawn("names"))
    def remove(self, name: str) -> None:
        if name in self.bound:
            self.live.gate.release()
            self.live.remove(name)
            del self.bound[name]

    @rule(lora=drawn("loras"))
    def select(self, lora: str | None) -> None:
        """Make an adapter the default, or the base model."""
        if lora in self.bound:
            self.live.lm.set_lora(str(lora))
            self.default = lora
        elif lora is None:
            self.live.lm.clear_lora()
            self.default = None

    # --- what must hold ---------------------------------------------------------------------------

    @invariant()
    def all_is_well(self) -> None:
        before, self.stats = self.stats, self.live.lm.stats
        for name, now in asdict(self.stats).items():
            was = getattr(before, name)
            check(now >= was, f"stats.{name} went from {was} to {now}")
        # They stay in the list: it decides which rules come next, so it must not depend on timing.
        for asked in self.asked:
            if asked.task.done():
                self._look(asked)

    def teardown(self) -> None:
        try:
            self.gather()
        finally:
            self.live.suite.poison.token_ids = None
            self.live.gate.reset()
            for loop in self.loops:
                loop.close()

    def _stands_for(self, lora: str | None) -> str | None:
        name = self.default if lora == DEFAULT else lora
        return None if name is None else self.bound[name]

    def _expected(self, context: TokenIds, lora: str | None) -> Expected:
        try:
            return self.rows[context, self._stands_for(lora)]
        except KeyError:
            return UnknownAdapterError

    def _look(self, asked: Asked) -> None:
        if asked.looked_at:
            return
        asked.looked_at = True
        outcome = asked.loop.run(_outcome(asked.task))
        if not isinstance(outcome, asked.excuses):
            self._compare(asked.what, outcome, asked.expected)

    def _compare(self, what: str, outcome: Outcome, expected: Expected) -> None:
        if isinstance(expected, type):
            as_expected = isinstance(outcome, expected)
            check(as_expected, f"{what}: {outcome!r:.200} instead of {expected.__name__}")
        else:
            self.live.expect_row(outcome, expected, what)


async def _outcome(task: asyncio.Future[torch.Tensor]) -> Outcome:
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    return outcome


def _given(lora: str | None) -> LoraName:
    return UNSET if lora == DEFAULT else lora
