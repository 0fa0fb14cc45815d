"""Whether samples agree with rows, and with each other."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from genlm.conformance.compare import TOP_FACTOR, Violation, check
from genlm.conformance.subject import Subject

if TYPE_CHECKING:
    import torch

#: In vocabularies up to this size rounding hardly moves a sample. In one of 50,000 tokens a
#: hundredth of the mass is of tokens so unlikely that a change of the last digits moves the
#: boundary between them by more than their mass.
SMALL_VOCABULARY_TOKENS = 1000

#: A violation that rounding may explain must come up with this many further seeds.
OTHER_SEEDS = 3


class MovedDraw(Violation):
    """A sample is not what it is elsewhere with the same seed. Rounding may be the cause."""


def expect_same_draw(drawn: Sequence[int], expected: Sequence[int], otherwise: str) -> None:
    """Raises: MovedDraw: with the message ``otherwise``, unless both are the same."""
    if list(drawn) != list(expected):
        raise MovedDraw(otherwise)


def steady(live: Subject, top_k: int = 20) -> dict[str, Any]:
    """Options of seeded samples that rounding hardly moves."""
    return {} if len(live.lm.byte_vocab) <= SMALL_VOCABULARY_TOKENS else {"top_k": top_k}


def for_each_seed(holds: Callable[..., None]) -> Callable[..., None]:
    """Decorate what must hold for a seeded sample, with an argument ``seed``. A sample that moved
    is a violation if one moves with each of the seeds that follow, too."""

    @functools.wraps(holds)
    def holds_for_each(seed: int, **others: Any) -> None:
        try:
            holds(seed=seed, **others)
        except MovedDraw as moved:
            for other in range(seed + 1, seed + 1 + OTHER_SEEDS):
                try:
                    return holds(seed=other, **others)
                except MovedDraw:
                    continue
            raise moved from None

    return holds_for_each


def may_follow(
    live: Subject,
    token_ids: Sequence[int],
    candidates: Iterable[int],
    options: Mapping[str, Any],
    adapter: str | None,
) -> bool:
    """Whether rounding may let a sample with these options go on with one of the candidates."""
    row = live.cold(token_ids, adapter)
    most = 1 if options.get("temperature") == 0.0 else options.get("top_k") or len(row)
    least = float(row.topk(min(most, len(row))).values[-1]) - TOP_FACTOR * live.expect.atol
    return any(float(row[token_id]) >= least for token_id in candidates)


def expect_frequencies(
    what: str, drawn: Iterable[Sequence[int]], mass: Mapping[tuple[int, ...], float]
) -> None:
    """Check by a chi-squared test that samples come at the frequencies ``mass``."""
    counts = Counter(map(tuple, drawn))
    total = counts.total()
    # Each sample that is expected five times or more is a cell; all others share one cell.
    cells = [each for each, p in mass.items() if p * total >= 5]
    observed = [counts[cell] for cell in cells]
    expected = [mass[cell] * total for cell in cells]
    observed.append(total - sum(observed))
    expected.append(max(total - sum(expected), 1.0))
    chi2 = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    most = len(cells) + 8 * math.sqrt(2 * len(cells)) + 8
    check(
        chi2 <= most,
        f"{what} do not have the frequencies of the rows: chi-squared is {chi2:.1f} with "
        f"{len(cells)} degrees of freedom, and may be {most:.1f}",
    )


def single_tokens(mass: torch.Tensor) -> dict[tuple[int, ...], float]:
    """The masses of all samples of one token."""
    return {(token_id,): p for token_id, p in enumerate(mass.tolist())}
