"""The expected results: the entries of the engine's own rows, computed cold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from genlm.conformance.compare import (
    TOP_FACTOR,
    answered,
    are_identical,
    brief,
    check,
    deviation,
    difference,
    raised,
    with_adapter,
)
from genlm.conformance.driver import Outcome
from genlm.conformance.model import Model
from genlm.core.cache import OutputCache
from genlm.core.errors import GenlmError
from genlm.core.types import TokenIds

if TYPE_CHECKING:
    import torch

#: Several contexts, and the adapter of each; ``None`` where none has one.
Several = Sequence[Sequence[int]]
Adapters = Sequence[str | None] | None

#: How many of the first cold rows are asked for again at the end of the run.
REMEMBERED_ROWS = 40


class Oracle:
    """The cold rows with which rows, scores and greedy samples are compared, and the tolerance.

    Args:
        model: The model whose cold rows are taken as right.
        atol: The tolerance of probabilities.
    """

    def __init__(self, model: Model, atol: float) -> None:
        self.atol = atol
        #: The largest deviation of a probability, in this clause.
        self.deviation = 0.0
        #: The first cold rows of the base model, to be asked for once more at the end.
        self.first_rows: dict[TokenIds, torch.Tensor] = {}
        self._model = model
        self._kept = OutputCache(maxsize=None, max_bytes=512 << 20, move_to_cpu=True)

    def cold(self, token_ids: Sequence[int], adapter: str | None = None) -> torch.Tensor:
        """The engine's own row, computed cold, alone and uncached. Kept by the adapter's path."""
        key = (tuple(token_ids), self._model.path_of(adapter))
        row = self._kept.get(key)
        if row is None:
            try:
                row = self._model.lm.next_token_logprobs_uncached(token_ids, lora_name=adapter)
            except GenlmError as error:
                what = f"the cold row of {brief(token_ids)}{with_adapter(adapter)}"
                raise raised(error, what, self._model.told()) from error
            self._kept.put([(key, row)], self._kept.generation)
            if len(self.first_rows) < REMEMBERED_ROWS and adapter is None:
                self.first_rows[tuple(token_ids)] = row.clone()
        return row

    def row(
        self,
        row: Outcome,
        token_ids: Sequence[int],
        adapter: str | None = None,
        how: str = "asked for",
    ) -> None:
        """Check that ``row`` is the one of this context."""
        what = f"the context {brief(token_ids)}{with_adapter(adapter)}, {how}"
        self.same(row, self.cold(token_ids, adapter), what)

    def rows(
        self, rows: Iterable[Outcome], contexts: Several, adapters: Adapters = None, *, how: str
    ) -> None:
        """Check that each of ``rows`` is the one of its context."""
        chosen = adapters or [None] * len(contexts)
        for row, ids, name in zip(rows, contexts, chosen, strict=True):
            self.row(row, ids, name, how)

    def same(self, row: Outcome, expected: torch.Tensor, what: str) -> None:
        """Check that ``row`` is ``expected`` within the tolerance."""
        row = answered(row, what, f"{self._model.together}{self._before()}")
        if are_identical(row, expected):
            return
        self.deviation = max(self.deviation, deviation(row, expected))
        found = difference(row, expected, self.atol)
        check(found is None, f"{what}: {found}{self._model.together}{self._before()}")

    def scores(
        self,
        scores: torch.Tensor,
        prompt: TokenIds,
        tokens: TokenIds,
        adapter: str | None = None,
        *,
        places: Iterable[int] | None = None,
        how: str = "scored",
    ) -> None:
        """Check that scores are the entries of the cold rows, at some places or at all. Without
        ``how`` the adapter has been named."""
        what = f"{brief(tokens)} after {brief(prompt)}"
        what += f"{with_adapter(adapter)}, {how}" if how else ""
        answered(scores, what, self._before())
        check(
            tuple(scores.shape) == (len(tokens),),
            f"{what}: the scores have the shape {tuple(scores.shape)}, not ({len(tokens)},)",
        )
        for i in range(len(tokens)) if places is None else places:
            expected = float(self.cold(prompt + tokens[:i], adapter)[tokens[i]])
            self.score(float(scores[i]), expected, f"{what}: token {i}")

    def score(self, score: float, expected: float, what: str) -> None:
        """Check that a score is an entry of a row."""
        near = abs(score - expected) <= TOP_FACTOR * self.atol * max(1.0, abs(expected))
        # Two equal infinities have no difference, so equality is tested by itself.
        check(
            score == expected or near,
            f"{what} has the wrong score: {score:.6g}, where the cold row of the tokens before it "
            f"has {expected:.6g}{self._before()}",
        )

    def greedy(
        self,
        drawn: Sequence[int],
        prompt: TokenIds,
        adapter: str | None = None,
        *,
        places: Iterable[int] | None = None,
        how: str = "with temperature=0",
    ) -> None:
        """Check that drawn tokens are the most likely ones of the cold rows, at some places or at
        all."""
        for i in range(len(drawn)) if places is None else places:
            row = self.cold((*prompt, *drawn[:i]), adapter)
            behind = float(row.max() - row[drawn[i]])
            what = f"{brief(prompt)}{with_adapter(adapter)} {how} draws {brief(drawn)}"
            check(
                behind <= TOP_FACTOR * self.atol,
                f"{what}: token {drawn[i]}, number {i} of the draw, is not the most likely one: "
                f"its log-probability is {behind:.3g} lower (tolerance {TOP_FACTOR * self.atol:g})"
                f"{self._before()}",
            )

    def _before(self) -> str:
        """The events before a failure, as the end of a message."""
        last = "\n    ".join(self._model.commands)
        planned = "\n  the last commands of genlm.kit.kv's planners in this process:\n    "
        return self._model.told() + (f"{planned}{last}" if last else "")
