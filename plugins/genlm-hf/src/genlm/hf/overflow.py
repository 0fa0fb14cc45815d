"""Rows that are NaN, for example because a value exceeds the range of the model's type."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from genlm.core.errors import EngineError
from genlm.core.types import Query


def is_looked_for(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether each step looks for NaN among its rows before it answers. It does if the look need
    not wait for a device, and for float16, whose range (65,504) is so small that real models exceed
    it."""
    return device.type == "cpu" or dtype == torch.float16


def remedy(dtype: torch.dtype) -> str:
    """The remedy for rows that are NaN."""
    wider = "load it with dtype='bfloat16' or 'float32', or " if dtype == torch.float16 else ""
    return f"{wider}look for NaN among its weights"


def nan_error(query: Query, dtype: torch.dtype) -> EngineError:
    """The error for a request whose row or score is NaN."""
    return EngineError(f"the model's row is NaN in {dtype} for {query}; {remedy(dtype)}")


def with_errors(
    queries: Sequence[Query], given: torch.Tensor | Sequence[torch.Tensor], dtype: torch.dtype
) -> list[torch.Tensor | EngineError]:
    """Rows or scores, with an error in place of each NaN one.

    Args:
        queries: The query of each row or score.
        given: ``[len(queries), vocab_size]`` rows, or the scores of a continuation for each.
        dtype: The model's type.
    """
    found: list[torch.Tensor | EngineError] = [*given]
    if not found:
        return found
    if isinstance(given, torch.Tensor):
        nan = given[:, 0].isnan()  # one value is enough: if a row has a NaN, all of it is NaN
    else:
        nan = torch.stack([scores.isnan().any() for scores in given])
    for at in nan.nonzero().flatten().tolist():
        found[at] = nan_error(queries[at], dtype)
    return found
