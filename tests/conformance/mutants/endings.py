"""Faults that need an order of things, and faults in the end."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from genlm.core import AsyncLM, hookimpl
from genlm.core.errors import ModelClosedError
from genlm.core.mock import ContinuousMockEngine

from .callers import Unanswered
from .registry import breaks


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


@breaks("same_tail_under_different_prefixes")
class ContinuousDeduplicationBySuffix(ContinuousMockEngine):
    """Queries in flight together whose last token is the same share a row."""

    @hookimpl
    def genlm_step(self, queries):
        answers = self.advance(queries)
        by_tail: dict[int, Any] = {}
        return [
            evolve(a, result=by_tail.setdefault(a.request.token_ids[-1], a.result)) for a in answers
        ]
