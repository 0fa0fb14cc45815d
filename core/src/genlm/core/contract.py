"""A wrapper that holds every result of a live engine against the contract."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from genlm.core.errors import PluginError
from genlm.core.hookspecs import hookimpl
from genlm.core.types import Answer, Query

if TYPE_CHECKING:
    import torch

#: How far the logarithm of a row's total mass may be from 0.
NORMALISATION = 1e-4


class ContractCheck:
    """Checks number, shape, type, values and mass of every row.

    Args:
        backend: The backend's name, for messages.
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend

    @hookimpl(wrapper=True)
    def genlm_next_token_logprobs(self, queries: Sequence[Query]) -> Generator[None, torch.Tensor, torch.Tensor]:
        rows = yield
        if getattr(rows, "ndim", None) != 2 or len(rows) != len(queries):
            raise self._violation("genlm_next_token_logprobs", queries[0], f"{_shape(rows)} for {len(queries)} queries")
        for query, row in zip(queries, rows, strict=True):
            self._check_row("genlm_next_token_logprobs", query, row)
        return rows

    @hookimpl(wrapper=True)
    def genlm_step(self, queries: Sequence[Query]) -> Generator[None, Sequence[Answer], Sequence[Answer]]:
        answers = yield
        for answer in answers:
            if not isinstance(answer.row, Exception):
                self._check_row("genlm_step", answer.query, answer.row)
        return answers

    def _check_row(self, hook: str, query: Query, row: torch.Tensor) -> None:
        import torch

        if row.ndim != 1 or row.dtype != torch.float32:
            raise self._violation(hook, query, f"{_shape(row)}, {row.dtype}; expected one dimension, torch.float32")
        if row.requires_grad:
            raise self._violation(hook, query, "a row that requires grad; evaluate under torch.inference_mode()")
        if torch.isnan(row).any() or (row == float("inf")).any():
            raise self._violation(hook, query, "a row with nan or +inf")
        mass = float(row.logsumexp(dim=0))
        if not abs(mass) <= NORMALISATION:
            raise self._violation(hook, query, f"a row with logsumexp {mass:.6g}; normalise it to 0 within {NORMALISATION}")

    def _violation(self, hook: str, query: Query, what: str) -> PluginError:
        return PluginError(f"backend {self._backend!r}: {hook} returned {what}, for {query!r:.200}")


def _shape(rows: Any) -> str:
    return f"shape {tuple(rows.shape)}" if hasattr(rows, "shape") else type(rows).__name__
