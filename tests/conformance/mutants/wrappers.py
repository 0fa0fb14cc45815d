"""Faults of a backend's own class in what wrappers do."""

from __future__ import annotations

import torch

from genlm.core import AsyncLM, PluginError
from genlm.core.mock import ContinuousMockEngine, hashed_row

from .callers import Flat, Unanswered
from .registry import breaks


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
