"""The live model as clauses see it: what they ask it, and what its rows should be."""

from __future__ import annotations

import asyncio
import functools
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Self, TypeVar

import pytest

from genlm.conformance.advice import check_excuses
from genlm.conformance.compare import (
    ROUNDING_ATOL,
    brief,
    raised,
    with_adapter,
    with_options,
)
from genlm.conformance.contexts import EDGES, Contexts
from genlm.conformance.declaration import Declaration
from genlm.conformance.driver import Driver, Outcome
from genlm.conformance.model import Model
from genlm.conformance.oracle import Adapters, Oracle, Several
from genlm.core.errors import GenlmError
from genlm.core.lm import AsyncLM

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

#: After this many calls that hung, no further clause is tried.
MAX_HANGS = 3

#: For how long a failing example is simplified, seconds.
SHRINKING_SECONDS = 20.0


class Subject(Driver):
    """Through it clauses ask the model, and compare its answers with the right ones.

    Args:
        suite: The class that was inherited, with what it says of the model.
    """

    def __init__(self, suite: Declaration) -> None:
        super().__init__(suite.patience)
        check_excuses(suite.excused)
        self.suite = suite
        self.until = time.monotonic() + suite.deadline * max(1.0, suite.effort)
        self.effort, self.seed = suite.effort, suite.seed
        self.model = Model(suite, self)
        self.gate, self.adapters = self.model.gate, self.model.adapters
        self.expect = Oracle(self.model, suite.atol)
        self.cold = self.expect.cold
        #: :data:`SHRINKING_SECONDS`, or 0 where nobody reads it.
        self.shrinking = SHRINKING_SECONDS
        #: The longest context that was looked at, in tokens; 0 where no clause was on lengths.
        self.looked = 0
        self._noted: dict[object, Any] = {}

    @property
    def lm(self) -> AsyncLM:
        """The model, in a clean state the first time that a clause asks for it."""
        return self.model.lm

    def begin(self, suite: Declaration) -> Self:
        """Begin another clause; skip it where too much has hung already."""
        self.suite = self.model.suite = suite
        if self.hangs >= MAX_HANGS:
            pytest.skip(
                f"given up: {self.hangs} times the model gave no answer; see the first failure"
            )
        if self.was_late:
            pytest.skip("given up: the time of the whole run was over; see the first failure")
        if self.is_late:
            raise self.late("this clause had not begun")
        self.model.is_clean = False
        self.story.clear()
        self.expect.deviation = 0.0
        return self

    def random(self, what: str) -> random.Random:
        """A source of chance for a clause: the same in every run with the same seed."""
        return random.Random(f"{what} {self.seed}")

    def scaled(self, most: int, least: int) -> int:
        """A number of examples: ``most`` at effort 1 and above, fewer below, at least ``least``."""
        return max(least, min(most, round(most * self.effort)))

    @functools.cached_property
    def longest(self) -> int:
        """The longest context that clauses on lengths ask, in tokens.

        At most one token more than 1,024. Less where ``max_context`` is less, or where the engine
        would need too long: the time of one cold row of 200 tokens tells.
        """
        self.looked = self._longest()
        return self.looked

    def _longest(self) -> int:
        limit = min(self.contexts.limit, max(self.contexts.lengths(1 << 20)))
        if self.suite.longest is not None:
            return min(limit, self.suite.longest)
        probe = self.contexts.long(min(200, limit))
        times = []
        # The first row may compile something, and other programs may use the machine.
        for _ in range(4):
            began = time.perf_counter()
            self.lm.next_token_logprobs_uncached(probe)
            times.append(time.perf_counter() - began)
        seconds = min(times) / len(probe)
        bearable = (edge + 1 for edge in reversed(EDGES) if seconds * edge <= 0.3)
        return min(limit, next(bearable, EDGES[0]))

    @functools.cached_property
    def contexts(self) -> Contexts:
        """Strategies for contexts that this model takes."""
        known = min(self.model.ids, len(self.lm.byte_vocab))
        return Contexts(self.lm.tokenizer, known, self.lm.max_context)

    @property
    def loras(self) -> list[str]:
        """The names of the given adapters; none where the engine has no LoRA."""
        return list(self.adapters) if self.lm.supports("genlm_add_lora") else []

    def noted(self, key: object, make: Callable[[], T]) -> T:
        """A value that clauses share, made when it is first needed."""
        if key not in self._noted:
            self._noted[key] = make()
        return self._noted[key]  # type: ignore[no-any-return]

    def close(self) -> None:
        """Close the model and end the threads, after all clauses."""
        self.until = math.inf  # The deadline is over for clauses only: closing gets its own time.
        self._loop.close()
        self.model.end()
        self.end_threads()

    def needs(self, hook: str) -> None:
        """Skip the clause unless the engine implements ``hook``."""
        if not self.lm.supports(hook):
            pytest.skip(f"the engine does not implement {hook}")

    def another(self) -> AsyncLM:
        """Another model of the backend, which the clause closes. Skip the clause where there is no
        room for it, or the backend rejects it and says so."""
        if not self.suite.second_model:
            pytest.skip(
                "this class says that there is no room for a second model (second_model = False)"
            )
        try:
            return self.model.loaded(self.suite.load)
        except Exception as error:
            pytest.skip(
                "the backend rejects another model while one is open "
                f"({type(error).__name__}: {error!s:.100})"
            )

    def needs_adapters(self, least: int = 1) -> list[str]:
        """The names of the adapters; skip the clause where there are fewer than ``least``."""
        self.needs("genlm_add_lora")
        if len(self.adapters) < least:
            pytest.skip(
                f"needs {least} LoRA adapters, and {len(self.adapters)} were given; give them by "
                "`adapters`, or by --adapter NAME=PATH for each"
            )
        return list(self.adapters)

    def needs_little_rounding(self) -> None:
        """Skip the clause where rounding may be so large that it changes samples, or the engine is
        excused from seeds."""
        if "seeds" in self.suite.excused:
            pytest.skip(f"excused from 'seeds': {self.suite.excused['seeds']}")
        if self.expect.atol > ROUNDING_ATOL:
            pytest.skip(
                f"rounding of this size (atol={self.expect.atol:g}) may change a draw; run it in "
                "float32"
            )

    def ask(self, token_ids: Sequence[int], adapter: str | None = None) -> torch.Tensor:
        """The row of a context, asked the usual way."""
        self.model.together = ""
        row = self.lm.next_token_logprobs(token_ids, lora_name=adapter)
        return self._answer(row, lambda: f"the row of {brief(token_ids)}{with_adapter(adapter)}")

    def sample(
        self, prompt: Sequence[int], most: int, stops: Sequence[int] = (), **options: Any
    ) -> list[int]:
        """The tokens of one sample."""
        drawn = self.lm.sample(prompt, most, stops, **options)
        how = with_options({**options, "stop_token_ids": brief(stops) if stops else None})
        return self._answer(drawn, lambda: f"a draw of {most} tokens after {brief(prompt)}{how}")

    def samples(self, prompts: Several, most: int, **options: Any) -> list[list[int]]:
        """The tokens of samples in one batch, without stop tokens."""
        drawn = self.lm.batch_sample(prompts, most, [], **options)
        what = f"a batch of {len(prompts)} draws of {most} tokens{with_options(options)}"
        return self._answer(drawn, lambda: what)

    def score(
        self, prompt: Sequence[int], tokens: Sequence[int], adapter: str | None = None
    ) -> torch.Tensor:
        """The scores of a continuation."""
        scores = self.lm.sequence_logprobs(prompt, tokens, lora_name=adapter)
        of = f"the scores of {len(tokens)} tokens after"
        return self._answer(scores, lambda: f"{of} {brief(prompt)}{with_adapter(adapter)}")

    def _answer(self, request: Coroutine[Any, Any, T], what: Callable[[], str]) -> T:
        """The answer to a valid request. An exception of the engine is a violation, which says what
        was asked for."""
        try:
            return self.run(request)
        except GenlmError as error:
            raise raised(error, what(), self.told()) from error

    def check_row(
        self, token_ids: Sequence[int], adapter: str | None = None, how: str = "asked for"
    ) -> None:
        """Ask for the row of a context, and check that it is the one of this context."""
        self.expect.row(self.ask(token_ids, adapter), token_ids, adapter, how)

    def check_rows(self, contexts: Several, adapters: Adapters = None, *, how: str) -> None:
        """Ask for rows together, and check that each is the one of its context."""
        self.expect.rows(self.gather(contexts, adapters), contexts, adapters, how=how)

    def gather(self, contexts: Several, adapters: Adapters = None) -> list[Outcome]:
        """The outcomes of requests asked together, each by a coroutine of its own."""
        asked = list(zip(contexts, adapters or [None] * len(contexts), strict=True))
        shown = ", ".join(f"{brief(ids)}{with_adapter(name)}" for ids, name in asked[:6])
        more = f", and {len(asked) - 6} more" if len(asked) > 6 else ""
        self.model.together = f"\n  asked together: {shown}{more}"

        async def together() -> list[Outcome]:
            rows = [self.lm.next_token_logprobs(ids, lora_name=name) for ids, name in asked]
            return await asyncio.gather(*rows, return_exceptions=True)

        return self.run(together())

    @asynccontextmanager
    async def after_each_call(
        self, happens: Callable[[], Coroutine[Any, Any, None]]
    ) -> AsyncIterator[None]:
        """Inside the block, something happens in this event loop at the end of each call of the
        engine, which waits for it: what is asked then is there for the next call."""
        self.gate.on_call = self.here(happens)
        try:
            yield
        finally:
            self.gate.on_call = None
            # A call may still be under way and wait for this loop.
            await self.all_done([asyncio.wrap_future(self.thread(self.lm.clear_kv_cache))])
