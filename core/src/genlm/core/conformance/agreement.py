"""Whether draws and scores agree with cold rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from genlm.core.conformance.compare import TOP_FACTOR, check, shown
from genlm.core.conformance.subject import Subject, with_adapter
from genlm.core.types import TokenIds

if TYPE_CHECKING:
    import torch

#: Beyond it a change of the batch's shape may move a drawing point across a boundary between two
#: tokens.
ROUNDING = 1e-3


def expect_scores(
    live: Subject,
    scores: torch.Tensor,
    prompt: TokenIds,
    tokens: TokenIds,
    adapter: str | None = None,
    *,
    places: Iterable[int] | None = None,
    how: str = "scored",
) -> None:
    """Check that scores are the entries of the cold rows, at some places or at all."""
    what = f"{shown(tokens)} after {shown(prompt)}{with_adapter(adapter)}, {how}"
    check(
        tuple(scores.shape) == (len(tokens),),
        f"{what}: shape {tuple(scores.shape)} for {len(tokens)} tokens",
    )
    for i in range(len(tokens)) if places is None else places:
        score, expected = (
            float(scores[i]),
            float(live.cold(prompt + tokens[:i], adapter)[tokens[i]]),
        )
        near = abs(score - expected) <= TOP_FACTOR * live.atol * max(1.0, abs(expected))
        check(  # two infinities are equal, and not near
            score == expected or near,
            f"{what}: token {i} scores {score:.6g}, its row has {expected:.6g}",
        )


def expect_greedy(
    live: Subject,
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
        row = live.cold((*prompt, *drawn[:i]), adapter)
        behind = float(row.max() - row[drawn[i]])
        check(
            behind <= TOP_FACTOR * live.atol,
            f"{shown(prompt)}{with_adapter(adapter)} {how} draws {shown(drawn)}: token {drawn[i]} "
            f"at {i} is {behind:.3g} (log) behind the most likely",
        )
