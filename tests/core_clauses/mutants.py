"""Faulty models: for every clause on the core at least one that breaks it, each a subclass of
:class:`~genlm.core.AsyncLM` over a sound mock."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from genlm.core import AsyncLM
from genlm.core.errors import (
    EngineError,
    ModelClosedError,
    PluginError,
    QueriesResetError,
    UnknownAdapterError,
)
from genlm.core.mock import ContinuousMockEngine, hashed_row
from tests.conformance.blind.common import Keeping
from tests.conformance.mutants.registry import Registry

MUTANTS = Registry()
breaks = MUTANTS.breaks

#: Of several blocks of a paged cache.
LONG = 32


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


# --- the end ----------------------------------------------------------------------------------


@breaks("any_order_of_operations")
class ResetForgetsTheDefaultAdapter(AsyncLM):
    """Every operation is right by itself; only after one another are they not."""

    def reset_async_queries(self):
        super().reset_async_queries()
        self.clear_lora()


@breaks("close_again_and_use_after_close")
class ClosedTwiceFails(AsyncLM):
    def close(self):
        if self.__dict__.setdefault("closed", False):
            raise RuntimeError("closed already")
        self.closed = True
        super().close()


# --- rows, adapters, and what shows behind a stem alone -------------------------------------------


@breaks("vocabulary_is_consistent")
class TokensInDisorder(AsyncLM):
    @property
    def byte_vocab(self):
        first, second, *others = super().byte_vocab
        return [second, first, *others]


@breaks("every_way_of_asking_agrees")
class BatchesAtAnotherTemperature(AsyncLM):
    def batch_next_token_logprobs_sync(self, *args, **options):
        return (super().batch_next_token_logprobs_sync(*args, **options) / 2).log_softmax(dim=-1)


@breaks("row_belongs_to_its_caller")
class SharedRows(Keeping, AsyncLM, rows=weakref.WeakValueDictionary):
    """Who asks for a context of which somebody has the row gets that very tensor."""

    async def next_token_logprobs(self, token_ids, **options):
        row = await super().next_token_logprobs(token_ids, **options)
        return self.rows.setdefault((tuple(token_ids), *options.items()), row)


def giving(name: str, changed: Callable[[torch.Tensor], torch.Tensor]) -> type:
    """A model that changes the rows of the asynchronous single request."""

    class Giving(AsyncLM):
        async def next_token_logprobs(self, *args, **options):
            return changed(await super().next_token_logprobs(*args, **options))

    Giving.__name__ = name
    return Giving


for name, clause, changed in (
    ("DoubleRows", "row_has_shape_and_type", lambda row: row.double()),
    ("RowsWithGraph", "row_has_shape_and_type", lambda row: row.requires_grad_()),
    ("RowsThatAreViews", "row_does_not_keep_its_batch", lambda row: torch.stack([row, row])[0]),
):
    breaks(clause)(giving(name, changed))


@breaks("equal_questions_share_one_slot")
class NothingShared(AsyncLM):
    """A request is evaluated again for a further caller."""

    async def next_token_logprobs(self, *args, **options):
        await super().next_token_logprobs(*args, **options)
        self.clear_cache()
        return await super().next_token_logprobs(*args, **options)


@breaks("default_adapter")
class NoneIsTheDefault(AsyncLM):
    """An explicit ``None`` is taken for no choice."""

    async def next_token_logprobs(self, token_ids, lora_name=None):
        chosen = {} if lora_name is None else {"lora_name": lora_name}
        return await super().next_token_logprobs(token_ids, **chosen)


@breaks("equal_questions_share_one_slot")
class ThirdCallerAlone(Keeping, AsyncLM, callers=list):
    """What is pending has places for two callers: a third one's request is evaluated again."""

    async def next_token_logprobs(self, token_ids, **options):
        key = repr((token_ids, options))
        again = self.callers.count(key) == 2
        self.callers.append(key)
        try:
            row = await super().next_token_logprobs(token_ids, **options)
            if again:
                self.clear_cache()
                row = await super().next_token_logprobs(token_ids, **options)
            return row
        finally:
            self.callers.remove(key)


@breaks("failing_question_fails_alone")
class FailureIsKept(Keeping, AsyncLM, failed=dict):
    """A context of full blocks that failed once fails until the cache is cleared."""

    async def next_token_logprobs(self, token_ids, **options):
        key = repr(token_ids)
        if key in self.failed:
            raise self.failed[key]
        try:
            return await super().next_token_logprobs(token_ids, **options)
        except (EngineError, PluginError) as error:
            if len(token_ids) > LONG:
                self.failed[key] = error
            raise

    def clear_cache(self):
        self._forget()
        super().clear_cache()


@breaks("reset_fails_what_is_pending")
class ResetForgetsLongRequests(AsyncLM):
    """Requests of several blocks wait in a queue of their own, which a reset drops silently."""

    async def next_token_logprobs(self, token_ids, **options):
        try:
            return await super().next_token_logprobs(token_ids, **options)
        except QueriesResetError:
            if len(token_ids) <= LONG:
                raise
            return await asyncio.get_running_loop().create_future()


@breaks("several_threads")
class ThreadsShareScratch(Keeping, AsyncLM, threads=list):
    """Contexts of several blocks are prepared in memory that belongs to the first thread."""

    def _prepared(self, token_ids, row):
        thread = threading.current_thread()
        if len(token_ids) > LONG and thread not in self.threads:
            self.threads.append(thread)
        return torch.roll(row, 1) if thread in self.threads[1:] else row

    async def next_token_logprobs(self, token_ids, **options):
        row = await super().next_token_logprobs(token_ids, **options)
        return self._prepared(token_ids, row)

    def next_token_logprobs_sync(self, token_ids, **options):
        return self._prepared(token_ids, super().next_token_logprobs_sync(token_ids, **options))

    def clear_kv_cache(self):
        super().clear_kv_cache()
        self._forget()


@breaks("loops_one_after_the_other")
class ClosedLoopIsRemembered(BoundToAnAbandonedLoop):
    """Until state is dropped, nothing can be asked after callers were left in a closed loop."""

    def clear_cache(self):
        super().clear_cache()
        self._forget()


@breaks("unknown_adapter_is_refused")
class UnknownDefaultAccepted(AsyncLM):
    """An unknown name can be made the default, and is then passed over."""

    def set_lora(self, lora_name):
        try:
            super().set_lora(lora_name)
        except UnknownAdapterError:
            super().clear_lora()


@breaks("default_adapter")
class LongRequestsForgetTheDefault(AsyncLM):
    """Requests of several blocks are prepared apart, without the default adapter."""

    async def next_token_logprobs(self, token_ids, **options):
        long = isinstance(token_ids, tuple) and len(token_ids) > LONG
        if long and "lora_name" not in options:
            options["lora_name"] = None
        return await super().next_token_logprobs(token_ids, **options)


@breaks("close_again_and_use_after_close")
class ClearedAfterTheEnd(AsyncLM):
    """Clearing a closed model passes, as if there were something to clear."""

    def clear_kv_cache(self):
        try:
            super().clear_kv_cache()
        except ModelClosedError:
            return
