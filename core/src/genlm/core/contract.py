"""A wrapper that holds every result of a live engine against the contract."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from attrs import evolve

from genlm.core.errors import PluginError
from genlm.core.hookspecs import hookimpl
from genlm.core.types import (
    Adapter,
    Answer,
    Query,
    Request,
    SampleRequest,
    SamplingParams,
)

if TYPE_CHECKING:
    import torch

#: How far the logarithm of a row's total mass may be from 0.
NORMALISATION = 1e-4


def _raise(violation: PluginError) -> NoReturn:
    raise violation


class ContractCheck:
    """Checks number, shape, type, values and mass of everything that the hooks return.

    Args:
        backend: The backend's name, for messages.
        report: Called with every violation, on the engine thread; without it the violation is
            raised.
    """

    def __init__(self, backend: str, report: Callable[[PluginError], None] = _raise) -> None:
        self._backend = backend
        self._report = report

    # --- evaluation -------------------------------------------------------------------------------

    @hookimpl(wrapper=True)
    def genlm_next_token_logprobs(
        self, queries: Sequence[Query]
    ) -> Generator[None, torch.Tensor, torch.Tensor]:
        rows = yield
        hook = "genlm_next_token_logprobs"
        if getattr(rows, "ndim", None) != 2 or len(rows) != len(queries):
            self._check(hook, queries[0], f"{_shape(rows)} for {len(queries)} queries")
            return rows
        for query, row in zip(queries, rows, strict=True):
            self._check(hook, query, _wrong_row(row))
        return rows

    @hookimpl(wrapper=True)
    def genlm_step(self) -> Generator[None, Sequence[Answer], Sequence[Answer]]:
        answers = yield
        return [self._checked(answer) for answer in answers]

    def _checked(self, answer: Answer) -> Answer:
        if isinstance(answer.result, Exception):
            return answer
        try:
            self._check("genlm_step", answer.request, _wrong_result(answer.request, answer.result))
        except PluginError as violation:  # concerns this query alone: the others are in order
            return evolve(answer, result=violation)
        return answer

    @hookimpl(wrapper=True)
    def genlm_sample(
        self, queries: Sequence[Query], params: Sequence[SamplingParams]
    ) -> Generator[None, Sequence[Sequence[int]] | None, Sequence[Sequence[int]] | None]:
        drawn = yield
        if drawn is None:
            return drawn
        self._check_count("genlm_sample", queries, drawn, "continuations")
        for query, how, ids in zip(queries, params, drawn, strict=False):
            self._check("genlm_sample", query, _wrong_draw(ids, how))
        return drawn

    @hookimpl(wrapper=True)
    def genlm_sequence_logprobs(
        self, queries: Sequence[Query], continuations: Sequence[Sequence[int]]
    ) -> Generator[None, Sequence[torch.Tensor] | None, Sequence[torch.Tensor] | None]:
        scores = yield
        if scores is None:
            return scores
        self._check_count("genlm_sequence_logprobs", queries, scores, "scores")
        for query, continuation, score in zip(queries, continuations, scores, strict=False):
            self._check("genlm_sequence_logprobs", query, _wrong_score(score, len(continuation)))
        return scores

    @hookimpl(wrapper=True)
    def genlm_process_logprobs(
        self, queries: Sequence[Query]
    ) -> Generator[None, torch.Tensor, torch.Tensor]:
        rows = yield
        for query, row in zip(queries, rows, strict=True):
            self._check("genlm_process_logprobs", query, _wrong_row(row))
        return rows

    # --- state ------------------------------------------------------------------------------------

    @hookimpl(wrapper=True)
    def genlm_cache_prefix(self, query: Query) -> Generator[None, bool | None, bool | None]:
        return self._done("genlm_cache_prefix", query, (yield))

    @hookimpl(wrapper=True)
    def genlm_add_lora(self, adapter: Adapter) -> Generator[None, bool | None, bool | None]:
        return self._done("genlm_add_lora", adapter, (yield))

    @hookimpl(wrapper=True)
    def genlm_remove_lora(self, adapter: Adapter) -> Generator[None, bool | None, bool | None]:
        return self._done("genlm_remove_lora", adapter, (yield))

    def _done(self, hook: str, subject: object, result: bool | None) -> bool | None:
        # None: an engine without the hook. The conformance suite checks those that have it.
        done = result is True or (result is None and hook == "genlm_cache_prefix")
        self._check(hook, subject, None if done else f"{result!r}; expected True")
        return result

    # --- violations -------------------------------------------------------------------------------

    def _check_count(
        self, hook: str, queries: Sequence[Query], results: Sequence[object], what: str
    ) -> None:
        if len(results) != len(queries):
            self._check(hook, queries[0], f"{len(results)} {what} for {len(queries)} queries")

    def _check(self, hook: str, subject: object, wrong: str | None) -> None:
        if wrong is not None:
            where = f"backend {self._backend!r}: {hook}"
            self._report(PluginError(f"{where} returned {wrong}, for {subject!r:.200}"))


def _wrong_result(request: Request, result: Any) -> str | None:
    if isinstance(request, Query):
        return _wrong_row(result)
    if result is None:
        return None
    if isinstance(request, SampleRequest):
        return _wrong_draw(result, request.params)
    return _wrong_score(result, len(request.continuation))


def _wrong_row(row: Any) -> str | None:
    import torch

    if not isinstance(row, torch.Tensor) or row.ndim != 1 or row.dtype != torch.float32:
        return f"{_shape(row)}; expected one dimension, torch.float32"
    if row.requires_grad:
        return "a row that requires grad; evaluate under torch.inference_mode()"
    if torch.isnan(row).any() or (row == float("inf")).any():
        return "a row with nan or +inf"
    mass = float(row.logsumexp(dim=0))
    if not abs(mass) <= NORMALISATION:
        return f"a row with logsumexp {mass:.6g}; normalise it to 0 within {NORMALISATION}"
    return None


def _wrong_draw(ids: Sequence[int], params: SamplingParams) -> str | None:
    if len(ids) > params.max_tokens:
        return f"{len(ids)} tokens; at most max_tokens={params.max_tokens} were asked"
    if stops := params.stop_token_ids.intersection(ids):
        return f"the stop token {min(stops)} in a continuation; leave it out"
    if any(token_id < 0 for token_id in ids):
        return f"the token id {min(ids)}"
    return None


def _wrong_score(score: Any, length: int) -> str | None:
    import torch

    if (
        not isinstance(score, torch.Tensor)
        or tuple(score.shape) != (length,)
        or score.dtype != torch.float32
    ):
        return f"{_shape(score)}; expected shape ({length},), torch.float32"
    if torch.isnan(score).any() or (score > NORMALISATION).any():
        return "a score that is nan or above 0; scores are log-probabilities"
    return None


def _shape(rows: Any) -> str:
    return (
        f"shape {tuple(rows.shape)}, {rows.dtype}"
        if hasattr(rows, "shape")
        else type(rows).__name__
    )
