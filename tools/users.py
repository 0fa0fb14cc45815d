"""The users of a soak: streams of requests and disturbances, whose answers are compared."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch
from attrs import define, field

from genlm.conformance import ConformanceSuite
from genlm.conformance.agreement import expect_greedy
from genlm.conformance.cast import MOVING, Draw, Request, Row, Score
from genlm.conformance.compare import check
from genlm.conformance.driver import Outcome
from genlm.conformance.subject import Subject
from genlm.core import AsyncLM, ModelClosedError, QueriesResetError, UnknownAdapterError

#: What users do, and how often.
ACTIONS = {"rows": 40, "draws": 20, "scores": 6, "leave": 10, "block": 4, "disturb": 5}

#: The share of answers compared with cold rows, and the most contexts of a user.
COMPARED, CONTEXTS = 0.2, 24


class Live(Subject):
    """The model, and what its users share.

    Contexts are always new, so what the suite keeps of them would look like a leak: there are no
    cold rows that are kept, and no gate, which remembers all requests.
    """

    def __init__(self, suite: ConformanceSuite, counts: Counter[str]) -> None:
        super().__init__(suite)
        self.counts = counts
        #: Set when users are to leave; with ``closing``, the model is closed under them.
        self.leaving = threading.Event()
        self.closing = False
        #: Whose adapter MOVING stands for; ``None`` while it is bound anew.
        self.moving: tuple[str] | None = None
        self._binding = threading.Lock()

    def load(self) -> AsyncLM:
        return self.suite.load(check=self.contract_violations.append)

    def cold(self, token_ids: Sequence[int], adapter: str | None = None) -> torch.Tensor:
        return self.lm.next_token_logprobs_uncached(token_ids, lora_name=adapter)

    def calls(self) -> int:
        return 0 if self._lm is None else self._lm.stats.batches

    def bind_moving(self, name: str) -> None:
        """Bind MOVING to the adapter of a name."""
        with self._binding:
            self.moving = None
            self.bind(MOVING, self.adapters[name])
            self.moving = (name,)


@define(eq=False)
class User:
    """A stream of actions on contexts that grow."""

    live: Live
    random: random.Random
    longest: int
    contexts: list[list[int]] = field(factory=list)
    adapter: str | None = None
    requests: Sequence[Request] = ()

    async def work(self) -> None:
        adapters = [None, None, *self.live.adapters, *([MOVING] if self.live.adapters else [])]
        while not self.live.leaving.is_set():
            (action,) = self.random.choices(list(ACTIONS), list(ACTIONS.values()))
            self.adapter = self.random.choice(adapters)
            try:
                await self.live.soon(getattr(self, action)())
            except QueriesResetError:
                pass
            except ModelClosedError:
                if not self.live.closing:
                    raise
            except UnknownAdapterError:
                if self.adapter != MOVING:
                    raise
            except Exception as error:
                asked = [(each.prompt, each.adapter) for each in self.requests]
                error.add_note(f"{action}, after asking {asked}")
                raise

    async def rows(self) -> None:
        await self.ask([Row(tuple(ids), self.adapter) for ids in self.some()])

    async def draws(self) -> None:
        """The tokens that are drawn are added to the contexts."""
        some, most = self.some(), self.random.randint(1, 6)
        seeded = {"seed": self.random.randrange(1000)}
        options = self.random.choice(({"temperature": 0.0}, seeded, seeded))
        draws = await self.ask([Draw(tuple(ids), most, options, self.adapter) for ids in some])
        for ids, drawn in zip(some, draws, strict=True):
            check(len(drawn) == most, f"a draw of {most} tokens gave {drawn}")
            ids += drawn

    async def scores(self) -> None:
        whole = [(*ids, *self.live.contexts.tokens) for ids in self.some()[:2]]
        cuts = [self.random.randint(1, len(ids) - 1) for ids in whole]
        pairs = zip(whole, cuts, strict=True)
        await self.ask([Score(ids[:cut], ids[cut:], self.adapter) for ids, cut in pairs])

    async def leave(self) -> None:
        """Every other caller leaves."""
        self.requests = rows = [Row(tuple(ids), self.adapter) for ids in self.some()]
        tasks = [asyncio.ensure_future(row.ask(self.live)) for row in rows]
        await asyncio.wait(tasks, timeout=self.random.choice((0, 0.001, 0.01)))
        for task in tasks[1::2]:
            task.cancel()
        self.answers((await asyncio.gather(*tasks, return_exceptions=True))[::2])

    async def block(self) -> None:
        """A blocking call in a thread."""
        some, lm = self.some(), self.live.lm
        await asyncio.to_thread(lm.batch_next_token_logprobs_sync, some, lora_name=self.adapter)

    async def disturb(self) -> None:
        """Change what the model keeps, or make it drop what waits."""
        lm, names = self.live.lm, list(self.live.adapters)
        ways = [lm.clear_cache, lm.clear_kv_cache, lm.reset_async_queries]
        ways += [partial(lm.cache_kv, self.some()[0][:64])]
        ways += [partial(self.live.bind_moving, name) for name in names]
        await asyncio.to_thread(self.random.choice(ways))

    def some(self) -> list[list[int]]:
        """Some of the contexts, after another has begun, afresh or as a fork."""
        room, contexts = self.longest - 6, self.contexts
        if contexts and self.random.random() < 0.5:
            known = self.random.choice(contexts)
            begun = known[: self.random.randint(1, len(known))]
        else:
            length = self.random.choice((1, 2, 3, 5, 8, 17, 40))
            begun = [*self.live.contexts.long(min(length, room), self.random.randrange(1000))]
        contexts[:] = [*(ids for ids in contexts if len(ids) <= room), begun][-CONTEXTS:]
        return self.random.sample(contexts, self.random.randint(1, min(16, len(contexts))))

    async def ask(self, requests: Sequence[Request]) -> list[Outcome]:
        """The answers to requests that are asked together; now and then one is compared."""
        self.requests, bound = requests, self.live.moving
        asked = [request.ask(self.live) for request in requests]
        answers = self.answers(await asyncio.gather(*asked, return_exceptions=True))
        # Whose adapter a name stood for is known if it has not been bound meanwhile.
        known = self.adapter != MOVING or (bound is not None and self.live.moving is bound)
        if known and self.random.random() < COMPARED:
            owner = bound[0] if bound and self.adapter == MOVING else self.adapter
            await self.compare(
                *self.random.choice(list(zip(requests, answers, strict=True))), owner
            )
        return answers

    def answers(self, outcomes: list[Outcome]) -> list[Outcome]:
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        self.live.counts["requests"] += len(outcomes)
        return outcomes

    async def compare(self, request: Request, answer: Outcome, owner: str | None) -> None:
        """Compare an answer with cold rows; a draw if it is greedy."""
        compare = partial(request.compare, self.live, answer, owner)
        if isinstance(request, Draw):
            if "seed" in request.options:
                return
            compare = partial(expect_greedy, self.live, answer, request.prompt, owner)
        await asyncio.to_thread(compare)
        self.live.counts["compared"] += 1
