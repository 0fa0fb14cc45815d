"""Rows that are NaN, as where a value is beyond what the model's type can hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from genlm.core.errors import EngineError
from genlm.core.types import Query


def is_looked_for(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether each step looks for NaN among its rows before it answers: where that waits for no
    device, and for the type whose range is so small (65,504) that real models leave it."""
    return device.type == "cpu" or dtype == torch.float16


def remedy(dtype: torch.dtype) -> str:
    """What to do about rows that are NaN."""
    wider = "load it with dtype='bfloat16' or 'float32', or " if dtype == torch.float16 else ""
    return f"{wider}look for NaN among its weights"


def nan_error(query: Query, dtype: torch.dtype) -> EngineError:
    """The error for a request whose row or score is NaN."""
    return EngineError(f"the model's row is NaN in {dtype} for {query}; {remedy(dtype)}")


def with_errors(
    queries: Sequence[Query], given: torch.Tensor | Sequence[torch.Tensor], dtype: torch.dtype
) -> list[torch.Tensor | EngineError]:
    """Rows or scores, with an error in the place of each that is NaN.

    Args:
        queries: Whose they are.
        given: ``[len(queries), vocab_size]`` rows, or the scores of a continuation for each.
        dtype: The model's type.
    """
    found: list[torch.Tensor | EngineError] = [*given]
    if not found:
        return found
    if isinstance(given, torch.Tensor):
        nan = given[:, 0].isnan()  # one value of a row tells
    else:
        nan = torch.stack([scores.isnan().any() for scores in given])
    for at in nan.nonzero().flatten().tolist():
        found[at] = nan_error(queries[at], dtype)
    return found
