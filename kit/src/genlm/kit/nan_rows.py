"""Rows and scores that are NaN, for example because a value exceeds the range of the model's type:
the errors that take their places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter

import torch
from attrs import define, frozen

from genlm.core.errors import EngineError
from genlm.core.logs import get_logger
from genlm.core.types import Answer, Query, Request, ScoreRequest, query_of

log = get_logger()

REQUEST, RESULT = attrgetter("request"), attrgetter("result")


def is_looked_for(device_type: str, dtype: str) -> bool:
    """Whether each step looks for NaN among its rows before it answers. It does if the look need
    not wait for a device, and for float16, whose range (65,504) is so small that real models exceed
    it.

    Args:
        device_type: The type of the device that computes rows: ``"cpu"``, ``"cuda"``, ...
        dtype: The type in which the model computes: ``"float16"``, or ``"torch.float16"``.
    """
    return device_type == "cpu" or _is_float16(dtype)


@frozen
class NanErrors:
    """The errors for a model's rows and scores that are NaN.

    Args:
        dtype: The type in which the model computes: ``"float16"``, or ``"torch.float16"``.
        wider: How a float16 model is loaded in a type of a wider range, for messages.
        spreads: Whether NaN of a token may reach the scores of earlier tokens of its sequence: a
            masked column still takes part in products, and zero times NaN is NaN.
    """

    _dtype: str
    _wider: str
    _spreads: bool = False

    @property
    def remedy(self) -> str:
        """The remedy for rows that are NaN."""
        wider = f"{self._wider}, or " if _is_float16(self._dtype) else ""
        return f"{wider}look for NaN among its weights"

    def of_row(self, query: Query) -> EngineError:
        """The error for a row that is NaN."""
        return EngineError(f"the model's row is NaN in {self._dtype} for {query}; {self.remedy}")

    def of_draw(self, query: Query) -> EngineError:
        """The error for a continuation that was drawn from a row that is NaN."""
        return EngineError(
            f"a row of the model is NaN in {self._dtype} in a draw after {query}; {self.remedy}"
        )

    def of_score(self, query: Query, continuation: Sequence[int], at: int) -> EngineError:
        """The error for a score.

        Args:
            query: The context.
            continuation: The scored tokens.
            at: The index in ``continuation`` of the first token whose log-probability is NaN.
        """
        sequence = str(query.extended(tuple(continuation))).removeprefix("the context ")
        later = ", or of a later one," if self._spreads else ""
        scored = f"token {continuation[at]} at position {query.length + at}{later} of {sequence}"
        return EngineError(
            f"the model's row is NaN in {self._dtype} for the score of {scored}; {self.remedy}"
        )

    def in_answers(self, answers: Sequence[Answer]) -> dict[int, EngineError]:
        """The errors of those answers whose row or score is NaN, by index.

        Args:
            answers: Rows of queries, scores, and results of other kinds, which are passed over.
        """
        tensors = [*filter(torch.is_tensor, map(RESULT, answers))]
        if not tensors:
            return {}
        # One value of a row is enough: if a row has a NaN, all of it is NaN.
        some_scores = ScoreRequest in map(type, map(REQUEST, answers))
        values = map(torch.sum, tensors) if some_scores else map(itemgetter(0), tensors)
        if not bool(torch.stack([*values]).isnan().any()):
            return {}
        return {
            at: self._of_result(one.request, one.result)
            for at, one in enumerate(answers)
            if torch.is_tensor(one.result) and bool(one.result.isnan().any())
        }

    def _of_result(self, request: Request, result: torch.Tensor) -> EngineError:
        if isinstance(request, ScoreRequest):
            return self.of_score(request.query, request.continuation, _first_nan(result))
        return self.of_row(query_of(request))

    def in_rows(
        self, queries: Sequence[Query], rows: torch.Tensor
    ) -> list[torch.Tensor | EngineError]:
        """Rows, with an error in place of each that is NaN.

        Args:
            queries: The query of each row.
            rows: ``[len(queries), vocab_size]``.
        """
        found: list[torch.Tensor | EngineError] = [*rows]
        if not found:
            return found
        # One value is enough: if a row has a NaN, all of it is NaN.
        for at in rows[:, 0].isnan().nonzero().flatten().tolist():
            found[at] = self.of_row(queries[at])
        return found

    def in_scores(
        self,
        queries: Sequence[Query],
        continuations: Sequence[Sequence[int]],
        scores: Sequence[torch.Tensor],
    ) -> list[torch.Tensor | EngineError]:
        """Scores, with an error in place of each that has a NaN.

        Args:
            queries: The context of each score.
            continuations: The scored tokens of each.
            scores: ``[len(continuations[i])]`` for each.
        """
        found: list[torch.Tensor | EngineError] = [*scores]
        if not found:
            return found
        nan = torch.stack([one.isnan().any() for one in scores])
        for at in nan.nonzero().flatten().tolist():
            found[at] = self.of_score(queries[at], continuations[at], _first_nan(scores[at]))
        return found


@define(eq=False)
class Culprit:
    """Finds the requests whose own rows are NaN, in an engine whose kept state may carry NaN of one
    request to others.

    A forward may spoil the state of tokens before the one that is NaN, since a masked column still
    takes part in products; and this state belongs to other contexts too.

    Attributes:
        launched: How many requests the engine has had since its state was last dropped.
    """

    launched: int = 0

    def settle(
        self,
        error: EngineError,
        *,
        alone: bool,
        forget: Callable[[], object],
        pin_again: Callable[[], object],
        ask_again: Callable[[], object],
    ) -> None:
        """Drop all state. An error counts only if its request was the first one after that, and no
        other was in flight.

        Args:
            error: The error of a request that has finished with NaN.
            alone: Whether no other request was in flight.
            forget: Makes the engine drop all requests and all state.
            pin_again: Pins the prompts again that were pinned.
            ask_again: Gives the request to the engine again.

        Raises:
            EngineError: ``error``, if the NaN is the request's own, or if others were in flight:
                the core then asks for each of them alone.
        """
        log.warning("rows.nan", rows=1)
        is_own = self.launched == 1
        forget()
        self.launched = 0
        if is_own or not alone:
            raise error
        pin_again()
        self.launched = 0
        ask_again()


def _first_nan(scores: torch.Tensor) -> int:
    return int(scores.isnan().nonzero()[0])


def _is_float16(dtype: str) -> bool:
    return dtype.removeprefix("torch.") == "float16"
