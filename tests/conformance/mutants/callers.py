"""Faults towards callers, in what is refused, in what wrappers do, and in the end."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, ClassVar

import torch

from genlm.core import AsyncLM
from genlm.core.errors import (
    EngineError,
    ModelClosedError,
    PluginError,
    QueriesResetError,
)
from genlm.core.mock import ContinuousMockEngine, hashed_row

from ..blind.common import Keeping
from .registry import breaks


class Unanswered(AsyncLM):
    """A model whose callers get no answer where the core has the error :attr:`error` for them."""

    error: ClassVar[type[Exception] | tuple[type[Exception], ...]]

    async def next_token_logprobs(self, *args: Any, **options: Any) -> torch.Tensor:
        try:
            return await super().next_token_logprobs(*args, **options)
        except self.error:
            return await self.instead()

    async def instead(self) -> torch.Tensor:
        return await asyncio.get_running_loop().create_future()


class Flat(Unanswered):
    """Callers get a flat row in the place of the error."""

    async def instead(self) -> torch.Tensor:
        return torch.zeros(len(self.byte_vocab)).log_softmax(dim=0)


class LMWithTasks(Keeping, AsyncLM, tasks=dict):
    """A model that makes a task of each request of a context, which all who ask for it share."""

    async def next_token_logprobs(self, token_ids: Any, **options: Any) -> torch.Tensor:
        tasks = self.tasks
        key = asyncio.get_running_loop(), repr(token_ids), *options.items()
        if key not in tasks:
            tasks[key] = asyncio.ensure_future(super().next_token_logprobs(token_ids, **options))
            tasks[key].add_done_callback(lambda _: tasks.pop(key))
        return (await self.answer(tasks[key])).clone()

    async def answer(self, task: asyncio.Task[torch.Tensor]) -> torch.Tensor:
        raise NotImplementedError


@breaks("cancelled_caller_leaves_others_alone")
class CancelledNeighbour(LMWithTasks):
    """Cancelling one caller cancels all who asked for the same context."""

    async def answer(self, task):
        return await task


@breaks("abandoned_question_is_dropped")
class AbandonedRequestsEvaluated(LMWithTasks):
    """A request lives on when all its callers have gone."""

    async def answer(self, task):
        return await asyncio.shield(task)


@breaks("failing_question_fails_alone")
class SwallowedError(Flat):
    """A request that fails is answered with a flat row."""

    error = (EngineError, PluginError)


@breaks("reset_fails_what_is_pending")
class ResetForgetsTheCallers(Unanswered):
    """A request that a reset drops is never answered."""

    error = QueriesResetError


@breaks("blocking_call_inside_a_running_loop")
class BlockingCallsRunALoop(AsyncLM):
    """The blocking call runs the coroutine, which no thread with a running loop can."""

    def next_token_logprobs_sync(self, *args, **options):
        coroutine = self.next_token_logprobs(*args, **options)
        try:
            return asyncio.run(coroutine)
        finally:
            coroutine.close()  # where it is refused, it was never awaited


@breaks("several_threads")
class ThreadsMixedUp(AsyncLM):
    """What a thread is computing is kept where another one takes it for its own."""

    def next_token_logprobs_sync(self, token_ids, **options):
        main = threading.current_thread() is threading.main_thread()
        row = super().next_token_logprobs_sync(token_ids, **options)
        return row if main or "lora_name" in options else torch.roll(row, 1)


@breaks("loops_one_after_the_other")
class BoundToAnAbandonedLoop(Keeping, AsyncLM, waiting=dict):
    """Nobody can ask while callers of a loop that was closed are counted as waiting."""

    async def next_token_logprobs(self, *args, **options):
        waiting = self.waiting
        if any(loop.is_closed() for loop in waiting.values()):
            raise RuntimeError("bound to a different event loop")
        caller = object()
        waiting[caller] = asyncio.get_running_loop()
        try:
            return await super().next_token_logprobs(*args, **options)
        finally:
            del waiting[caller]


def lenient(name: str, text: str) -> type:
    """A model that answers with something where the core refuses with this text."""

    class Lenient(AsyncLM):
        async def next_token_logprobs(self, token_ids, **options):
            try:
                return await super().next_token_logprobs(token_ids, **options)
            except ValueError as error:
                if text not in str(error):
                    raise
                return await super().next_token_logprobs([0])

        async def sample(self, *args, **options):
            try:
                return await super().sample(*args, **options)
            except ValueError as error:
                if text not in str(error):
                    raise
                return []

    Lenient.__name__ = name
    return Lenient


for name, clause, text in (
    ("EmptyContextAnswered", "bad_context_is_refused", "is empty"),
    ("LongContextCut", "too_long_context_is_refused", "exceeds"),
    ("UnknownAdapterIsTheBaseModel", "unknown_adapter_is_refused", "no LoRA adapter"),
    ("BadOptionIgnored", "bad_sampling_option_is_refused", "top_k"),
):
    breaks(clause)(lenient(name, text))


# --- wrappers ---------------------------------------------------------------------------------


@breaks("changed_rows_are_what_every_method_gives")
class DrawsPastTheWrapper(AsyncLM):
    """A greedy draw takes the model's own most likely token."""

    async def sample(self, ids, n, *args, **options):
        if options.get("temperature") != 0.0:
            return await super().sample(ids, n, *args, **options)
        drawn = list(ids)
        for _ in range(n):
            drawn.append(int(hashed_row(drawn, None, 258).argmax()))
        return drawn[len(ids) :]


@breaks("changed_rows_are_what_every_method_gives", engine=ContinuousMockEngine)
class ScoresPastTheWrapper(AsyncLM):
    """A continuation is scored by the model's own rows."""

    async def sequence_logprobs(self, ids, tokens, **options):
        rows = [hashed_row([*ids, *tokens[:i]], None, 258) for i in range(len(tokens))]
        return torch.stack([row[token] for row, token in zip(rows, tokens, strict=True)])


@breaks("lost_answer_is_an_error")
class LostAnswerIsAFlatRow(Flat):
    """A row that a wrapper has lost is replaced by a flat one."""

    error = PluginError


@breaks("lost_answer_is_an_error", engine=ContinuousMockEngine)
class LostAnswerIsWaitedFor(Unanswered):
    """Who asked for a row that a wrapper has lost waits for ever."""

    error = PluginError


# --- the end ----------------------------------------------------------------------------------


@breaks("any_order_of_operations")
class ResetForgetsTheDefaultAdapter(AsyncLM):
    """Every operation is right by itself; only after one another are they not."""

    def reset_async_queries(self):
        super().reset_async_queries()
        self.clear_lora()


@breaks("close_fails_what_is_pending")
class HangAfterClose(Unanswered):
    """Whoever waits when the model is closed waits for ever."""

    error = ModelClosedError


@breaks("close_again_and_use_after_close")
class ClosedTwiceFails(AsyncLM):
    def close(self):
        if self.__dict__.setdefault("closed", False):
            raise RuntimeError("closed already")
        self.closed = True
        super().close()
