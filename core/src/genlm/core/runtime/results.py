"""The one place where results leave an engine: checked, brought to the tokenizer's vocabulary,
processed, and made the core's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from genlm.core.errors import PluginError
from genlm.core.runtime.isolation import evaluate_isolated
from genlm.core.types import Answer, Query, Request, SampleRequest

if TYPE_CHECKING:
    import torch

#: Changes the rows ``[n, width]`` of ``n`` queries.
Process = Callable[[Sequence[Query], "torch.Tensor"], "torch.Tensor"]


class Results:
    """Turns what an engine returned into what callers get.

    Args:
        owner: The engine, for messages.
        vocab_size: The width of the engine's rows.
        width: The width of callers' rows: how many tokens the tokenizer has.
        process: Changes rows; ``None`` leaves them as they are.
    """

    def __init__(
        self, owner: str, vocab_size: int, width: int, process: Process | None = None
    ) -> None:
        self._owner = owner
        self._vocab_size = vocab_size
        self._width = width
        self._process = process

    def of_batch(self, queries: Sequence[Query], rows: Any) -> list[Any]:
        """For each query its row, or the exception that processing it raised."""
        self._check_shape(rows, (len(queries), self._vocab_size), "genlm_next_token_logprobs")
        return self._own(queries, self._align(rows))

    def of_step(self, answers: Sequence[Answer]) -> list[tuple[Request, Any]]:
        """Each request with its result or its exception, which may say what is wrong with the
        result. Rows come first."""
        queries: list[Query] = []
        rows: list[torch.Tensor] = []
        others: list[tuple[Request, Any]] = []
        for answer in answers:
            request, result = answer.request, self._checked(answer.request, answer.result)
            if isinstance(request, Query) and not isinstance(result, Exception):
                queries.append(request)
                rows.append(result)
            else:
                others.append((request, result))
        return [*zip(queries, self._own(queries, rows), strict=True), *others]

    def of_draws(self, queries: Sequence[Query], drawn: Sequence[Iterable[int]]) -> list[list[int]]:
        """For each query what ``genlm_sample`` drew."""
        self._check_count("genlm_sample", len(drawn), len(queries))
        return list(map(_token_ids, drawn))

    def of_scores(
        self, continuations: Sequence[Sequence[int]], scores: Sequence[Any]
    ) -> list[torch.Tensor]:
        """For each continuation what ``genlm_sequence_logprobs`` gave."""
        hook = "genlm_sequence_logprobs"
        self._check_count(hook, len(scores), len(continuations))
        return [
            self._score(score, len(continuation), hook)
            for score, continuation in zip(scores, continuations, strict=True)
        ]

    def _checked(self, request: Request, result: Any) -> Any:
        """A result of a step, or the exception in its place. A row may still be the engine's
        memory."""
        if isinstance(result, Exception):
            return result
        try:
            if isinstance(request, Query):
                self._check_shape(result, (self._vocab_size,), "genlm_step")
                return self._align(result)
            if result is None:
                return None
            if isinstance(request, SampleRequest):
                return _token_ids(result)
            return self._score(result, len(request.continuation), "genlm_step")
        except Exception as error:
            return error

    def _own(self, queries: Sequence[Query], rows: torch.Tensor | list[torch.Tensor]) -> list[Any]:
        """A row for each query, a view of what the engine gave: whoever keeps one copies it."""
        if self._process is not None:
            each = list(zip(queries, rows, strict=True))
            return [row for _, row in evaluate_isolated(self._processed, each)]
        return list(rows)

    def _processed(self, each: Sequence[tuple[Query, torch.Tensor]]) -> Sequence[torch.Tensor]:
        import torch

        assert self._process is not None
        rows = self._process([query for query, _ in each], torch.stack([row for _, row in each]))
        if self._width > self._vocab_size:
            # Tokens that the model lacks: a draw would put them into a context.
            own = rows[:, : self._vocab_size].log_softmax(-1)
            rows = torch.nn.functional.pad(
                own, (0, self._width - self._vocab_size), value=-torch.inf
            )
        return rows.unbind()

    def _score(self, score: Any, length: int, hook: str) -> torch.Tensor:
        self._check_shape(score, (length,), hook)
        own: torch.Tensor = score.clone()
        return own

    def _check_count(self, hook: str, given: int, asked: int) -> None:
        if given != asked:
            raise PluginError(
                f"{self._owner}: {hook} returned {given} results for {asked} requests"
            )

    def _check_shape(self, rows: Any, shape: tuple[int, ...], hook: str) -> None:
        if (wrong := wrong_tensor(rows, shape)) is not None:
            raise PluginError(f"{self._owner}: {hook} returned {wrong}")

    def _align(self, rows: torch.Tensor) -> torch.Tensor:
        """Bring rows, or one row, to the width of the tokenizer's vocabulary: drop padding and
        renormalise, or fill up with ``-inf``."""
        surplus = self._vocab_size - self._width
        if surplus > 0:
            rows = rows[..., :-surplus]
            return rows - rows.logsumexp(dim=-1, keepdim=True)
        if surplus < 0:
            aligned = rows.new_full((*rows.shape[:-1], self._width), -float("inf"))
            aligned[..., : self._vocab_size] = rows
            return aligned
        return rows


def wrong_tensor(rows: Any, shape: tuple[int, ...]) -> str | None:
    """What is wrong with a tensor that should have ``shape``; ``None`` if nothing is."""
    import torch

    if not isinstance(rows, torch.Tensor):
        return f"{type(rows).__name__}, not a tensor of shape {shape}"
    if tuple(rows.shape) != shape or rows.dtype != torch.float32 or rows.requires_grad:
        return (
            f"shape {tuple(rows.shape)}, {rows.dtype}, requires_grad={rows.requires_grad}; "
            f"expected {shape}, torch.float32, requires_grad=False"
        )
    return None


def _token_ids(drawn: Iterable[int]) -> list[int]:
    return [int(token_id) for token_id in drawn]
