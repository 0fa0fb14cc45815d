"""Rows of an engine that has just been loaded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from genlm.core.types import Query


def row_of(engine: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """A row computed from its tokens alone, by the engine's own hook: float32 log-probabilities
    ``[engine.vocab_size]``."""
    query, width = Query(tuple(token_ids), None, cold=True), engine.vocab_size
    if not hasattr(engine, "genlm_step"):
        rows: torch.Tensor = _call(engine.genlm_next_token_logprobs, [query], width)
        return rows[0]
    new: list[Query] = [query]
    while True:
        for answer in _call(engine.genlm_step, new, width):
            if isinstance(answer.result, Exception):
                raise answer.result
            row: torch.Tensor = answer.result
            return row
        new = []


def _call(hook: Callable[..., Any], queries: Sequence[Query], width: int) -> Any:
    """The result of a hook, called with the arguments that it takes."""
    taken = inspect.signature(hook).parameters
    none = dict.fromkeys(("samples", "scores", "dropped"), ())
    given: dict[str, Any] = {**none, "queries": queries, "width": width}
    return hook(**{name: value for name, value in given.items() if name in taken})
