"""The one place where results leave an engine: checked, brought to the tokenizer's vocabulary,
processed, and made the core's own."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence, Sized
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import define, field

from genlm.core.checks import safe_repr
from genlm.core.copies import copies_of, is_row
from genlm.core.errors import EngineDeadError, PluginError
from genlm.core.hook_calls import FATAL, Processor, attributed, clear_pluggy
from genlm.core.types import (
    Answer,
    Query,
    ReductionRequest,
    Request,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    query_of,
)

if TYPE_CHECKING:
    import torch

#: How far the logarithm of a row's total mass may be from 0.
MAX_LOG_MASS = 1e-4

#: Without the option ``check``, the values of this many results of each hook are checked, and the
#: logarithm of the mass may be this far from 0. Rows in half precision pass; unnormalised rows do
#: not.
CHECKED_RESULTS, LOOSE_MAX_LOG_MASS = 4, 1e-2

#: The description of a row without mass in messages. A text with no allowed next token has one.
MASSLESS = "a row with logsumexp -inf"

R = TypeVar("R")

#: Requests, each with its result or its exception.
Answers = list[tuple[R, Any]]

#: Called with the error for a result that breaks the contract. It may raise the error.
Violated = Callable[[PluginError], None]


@define(eq=False)
class Results:
    """Turns the engine's results into the callers' results. Number, shapes, types and samples are
    always checked. The values of rows and scores are checked for all results if ``violated`` is
    given, otherwise for the first ones.

    Args:
        owner: The engine, for messages.
        vocab_size: The width of the engine's rows.
        width: The width of callers' rows: how many tokens the tokenizer has.
        processors: The functions that change rows, in their order, each with its name.
        violated: Called with the error for every result that breaks the contract.
        first: Of how many right results of a hook values are checked without ``violated``.
    """

    _owner: str
    _vocab_size: int
    _width: int
    _processors: Sequence[tuple[str, Processor]] = ()
    _violated: Violated | None = None
    _first: int = 0
    # How many right results each hook has had, up to ``first``.
    _right: Counter[str] = field(init=False, factory=Counter)

    def read(self, hook: str, requests: Sequence[Any], given: Any) -> Answers[Request]:
        """The answers of an evaluation hook. A row is a view of the tensor that the engine
        returned: code that keeps a row copies it.

        Args:
            hook: The hook.
            requests: What it was called with, of one kind; a step may answer others.
            given: What it returned. ``None`` in place of samples or scores declines them.
        """
        if hook == "genlm_step":
            for one in given:
                if not (isinstance(one, Answer) and isinstance(one.request, Request)):
                    wrong = f"what is no Answer(request, result): {safe_repr(one)}"
                    raise self.violation(hook, requests, wrong)
            pairs = given
        elif hook == "genlm_next_token_logprobs":
            shape = len(requests), self._vocab_size
            if (misshapen := wrong_tensor(given, shape)) is not None:
                raise self.violation(hook, requests[0], misshapen)
            pairs = [*zip(requests, given.unbind(), strict=True)]
            if not self._looks(hook):
                return self._finished(pairs)
        elif given is None:
            return [(request, None) for request in requests]
        elif (count := len(given) if isinstance(given, Sized) else None) != len(requests):
            what = safe_repr(given) if count is None else f"{count} results"
            wrong = f"{what} for {len(requests)} queries"
            raise self.violation(hook, requests[0].query, wrong)
        else:
            pairs = [*zip(requests, given, strict=True)]
        return self._finished([(r, self._checked(hook, r, result)) for r, result in pairs])

    def _checked(self, hook: str, request: Request, result: Any) -> Any:
        """The result of one request, or the exception in its place."""
        if isinstance(result, Exception) or isinstance(request, ReductionRequest):
            return result  # of a reduction anything
        if result is None and not isinstance(request, Query):
            return result
        try:
            if isinstance(request, SampleRequest):
                try:
                    ids = [*map(operator.index, result)]
                    known = min(self._vocab_size, self._width)
                    wrong = wrong_draw(ids, request.params, known)
                except TypeError:
                    wrong = f"{safe_repr(result)}, not a list of token ids"
                if wrong is not None:
                    raise self.violation(hook, request.query, wrong)
                return ids
            length = self._vocab_size
            if score := isinstance(request, ScoreRequest):
                length = len(request.continuation)
            elif self._is_finished(result):
                length = self._width
            if (wrong := wrong_tensor(result, (length,))) is not None:
                raise self.violation(hook, query_of(request), wrong)
            if self._looks(hook):
                wrong = wrong_score(result) if score else self._wrong_row(result)
                self._look(hook, query_of(request), wrong)
            return result.clone() if score else result
        except Exception as error:
            return error

    def _finished(self, answers: Answers[Request]) -> Answers[Request]:
        """The answers with rows as callers get them."""
        if not self._processors and self._vocab_size == self._width:
            return answers
        rows: Answers[Request] = []
        finished: Answers[Request] = []
        for request, result in answers:
            is_row = isinstance(request, Query) and not isinstance(result, Exception)
            done = not is_row or (not self._processors and self._is_finished(result))
            (finished if done else rows).append((request, result))
        changed = evaluate_isolated(self._finished_rows, rows)
        return [*((query, row) for (query, _), row in changed), *finished]

    def _is_finished(self, row: Any) -> bool:
        """Whether an engine of a padded vocabulary has left out the padding of a row itself."""
        return self._width < self._vocab_size and getattr(row, "shape", None) == (self._width,)

    def _finished_rows(self, each: Sequence[tuple[Any, Any]]) -> Answers[tuple[Any, Any]]:
        """Rows at the width of the tokenizer's vocabulary, after wrappers have changed them."""

        rows = self._stacked([row for _, row in each])
        errors: dict[Query, Exception] = {}
        queries = tuple(query for query, _ in each)
        for name, process in self._processors:
            rows = _processed(name, process, queries, rows)
            for query, row in zip(queries, rows, strict=True):
                if not self._looks(name):
                    break
                try:
                    self._look(name, query, self._wrong_row(row), owner="")
                except Exception as error:  # the error concerns this query alone
                    errors.setdefault(query, error)
        if self._processors and self._width > self._vocab_size:
            # Tokens that the model lacks lose their mass; a sample would otherwise put them into a
            # context.
            rows = self._align(_normalised(rows[:, : self._vocab_size]))
        rows_of = zip(each, rows.unbind(), strict=True)
        return [(pair, errors.get(pair[0], row)) for pair, row in rows_of]

    # --- what is wrong with a result --------------------------------------------------------------

    def _looks(self, hook: str) -> bool:
        """Whether the values of a hook's results are checked."""
        return self._violated is not None or self._right[hook] < self._first

    def _wrong_row(self, row: torch.Tensor) -> str | None:
        return wrong_row(row, LOOSE_MAX_LOG_MASS if self._violated is None else MAX_LOG_MASS)

    def _look(self, hook: str, query: Query, wrong: str | None, owner: str | None = None) -> None:
        """Report wrong values. Without ``violated``, only the first results are checked, because an
        engine that does not normalise fails from its first row on."""
        if wrong is not None:
            error = self.violation(hook, query, wrong, owner)
            if self._violated is None and wrong != MASSLESS:
                raise error
        self._right[hook] += 1

    def violation(
        self, hook: str, subject: object, wrong: str, owner: str | None = None
    ) -> PluginError:
        """Report a wrong result, and return the error for it. The hook is the engine's, unless
        another owner is named."""
        whose = f"{self._owner}: " if owner is None else owner
        return self.tell(PluginError(f"{whose}{hook} returned {wrong}, for {subject!r:.200}"))

    def tell(self, violation: PluginError) -> PluginError:
        """Pass a violation of the contract to ``violated``, if it is given; it may raise the
        error."""
        if self._violated is not None:
            self._violated(violation)
        return violation

    def _stacked(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Rows of an engine at the width of the tokenizer's vocabulary, in one tensor."""
        import torch

        if any(map(self._is_finished, rows)):
            rows = [row if self._is_finished(row) else self._align(row[None])[0] for row in rows]
            return torch.stack(rows)
        return self._align(torch.stack([*rows]))

    def _align(self, rows: torch.Tensor) -> torch.Tensor:
        """Bring rows to the width of the tokenizer's vocabulary: drop padding and renormalise, or
        fill up with ``-inf``."""
        import torch

        surplus = self._vocab_size - self._width
        if surplus > 0:
            return _normalised(rows[:, :-surplus])
        return torch.nn.functional.pad(rows, (0, -surplus), value=-torch.inf) if surplus else rows


def _processed(
    name: str, process: Processor, queries: Sequence[Query], rows: torch.Tensor
) -> torch.Tensor:
    """Rows after one processor has changed them."""
    import torch

    try:
        given = process(queries=queries, rows=rows)
    except FATAL:
        raise
    except BaseException as error:
        clear_pluggy(error)
        raise attributed(name, error) from error
    changed: torch.Tensor | None = next(iter(given), None)  # pluggy leaves out a result of None
    if changed is None or (wrong := wrong_tensor(changed, tuple(rows.shape))) is not None:
        raise PluginError(f"{name} returned {'None, not a tensor' if changed is None else wrong}")
    # A processor that returned another tensor may still hold it, and write its next rows into it,
    # so the rows are copied.
    return rows if changed is rows else changed.clone(memory_format=torch.contiguous_format)


def _normalised(rows: torch.Tensor) -> torch.Tensor:
    """Rows with mass 1. A row without any mass stays as it is."""
    mass = rows.logsumexp(dim=-1, keepdim=True)
    return rows - mass.masked_fill_(mass == -float("inf"), 0.0)


def evaluate_isolated(
    evaluate: Callable[[Sequence[R]], Answers[R]], requests: Sequence[R]
) -> Answers[R]:
    """Evaluate a batch; if it raises, evaluate its halves, down to the requests that fail alone.

    A batch of ``n`` with one failing request costs about ``2 * log2(n)`` more calls, most of them
    small.
    """
    return _isolated(evaluate, requests, is_last=True) if requests else []


def _isolated(
    evaluate: Callable[[Sequence[R]], Answers[R]], requests: Sequence[R], *, is_last: bool
) -> Answers[R]:
    try:
        answers = evaluate(requests)
        # An engine may write the rows of its next call into the memory of these. If there is no
        # memory for copies, smaller batches may still have it.
        return answers if is_last else _with_own_rows(answers)
    except EngineDeadError:
        raise
    except Exception as error:
        if len(requests) == 1:
            return [(requests[0], error)]
    middle = len(requests) // 2
    first = _isolated(evaluate, requests[:middle], is_last=False)
    return [*first, *_isolated(evaluate, requests[middle:], is_last=is_last)]


def _with_own_rows(answers: Answers[R]) -> Answers[R]:
    """Answers with copies of their rows and scores."""
    copies = iter(copies_of([result for _, result in answers if is_row(result)]))
    return [(request, next(copies) if is_row(result) else result) for request, result in answers]


def wrong_tensor(rows: Any, shape: tuple[int, ...]) -> str | None:
    """A description of what is wrong with a tensor that should have ``shape``; ``None`` if nothing
    is."""
    import torch

    if not isinstance(rows, torch.Tensor):
        return f"{type(rows).__name__}, not a tensor of shape {shape}"
    if rows.layout != torch.strided or rows.is_meta:
        return f"a {rows.layout} tensor on {rows.device}; give a dense one, with values"
    if rows.shape != shape or rows.dtype != torch.float32 or rows.requires_grad:
        return (
            f"shape {tuple(rows.shape)}, {rows.dtype}, requires_grad={rows.requires_grad}; "
            f"expected {shape}, torch.float32, requires_grad=False"
            f"{'' if rows.dtype == torch.float32 else ' (.float() converts)'}"
        )
    return None


def wrong_row(row: torch.Tensor, within: float) -> str | None:
    """A text that says why a row breaks the contract; ``None`` for a right row."""
    import torch

    if torch.isnan(row).any() or (row == float("inf")).any():
        return "a row with nan or +inf"
    mass = float(row.logsumexp(dim=0))
    if mass == -float("inf"):
        return MASSLESS
    if not abs(mass) <= within:
        remedy = f"normalise it to 0 within {within}, as log_softmax does"
        return f"a row with logsumexp {mass:.6g}; {remedy}"
    return None


def wrong_draw(ids: Sequence[int], params: SamplingParams, known: int) -> str | None:
    """A text that says why a sample breaks the contract; ``None`` for a right sample."""
    if len(ids) > params.max_tokens:
        return f"{len(ids)} tokens; at most max_tokens={params.max_tokens} were asked"
    if stops := params.stop_token_ids.intersection(ids):
        return f"the stop token {min(stops)} in a continuation; leave it out"
    for token_id in ids:
        if not 0 <= token_id < known:
            return f"the token id {token_id}; the model has ids 0 to {known - 1}"
    return None


def wrong_score(score: torch.Tensor) -> str | None:
    """A text that says why a score breaks the contract; ``None`` for a right score."""
    if score.isnan().any() or (score > MAX_LOG_MASS).any():
        return "a score that is nan or above 0; scores are log-probabilities"
    return None
