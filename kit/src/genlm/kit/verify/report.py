"""The report of a verification: the contexts that were compared, how far their rows are apart, and
how much of that rounding explains."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from genlm.kit.verify.subject import Subject

#: How much rows may differ in float32, in nats: engines compute GELU exactly or approximately, and
#: graphics processors round the factors of products. If the log-probabilities of a row are nearly
#: equal, another model's are too, so the limit is then this share of their standard deviation, but
#: at least the second number.
MAX_NATS, MIN_LIMIT_NATS = 2e-2, 1e-3

#: By how many times an engine's rounding may exceed that of transformers in the same type. A small
#: sound model exceeds it by more than four times: Nemotron-H in bfloat16 on mlx.
ROUNDING_MARGIN = 6.0

#: By how many times one row of a group in float32 may exceed the limit for their median. An engine
#: may be wrong from a length on which only the longest context of a group reaches.
ONE_ROW_MARGIN = 5.0


def allowed(noise: float, spread: float) -> float:
    """How far rows may be apart, nats.

    Args:
        noise: How far transformers' own rows are apart in float32 and in the engine's type.
        spread: The standard deviation of the log-probabilities of a row.
    """
    return max(MIN_LIMIT_NATS, MAX_NATS * min(1.0, spread), ROUNDING_MARGIN * noise)


@frozen
class Compared:
    """Rows of one group of contexts.

    Attributes:
        about: What the contexts test.
        lengths: How many tokens each has.
        apart: How far the engine's rows and transformers' are apart, nats.
        allowed: How far they may be apart, nats.
    """

    about: str
    lengths: tuple[int, ...]
    apart: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.apart <= self.allowed

    def __str__(self) -> str:
        verdict = "right" if self.passed else "WRONG"
        lengths = ", ".join(map(str, self.lengths))
        return (
            f"{verdict}  {self.about}: {lengths} tokens, {self.apart:.1e} nats apart "
            f"(rounding explains {self.allowed:.1e})"
        )


@frozen
class Report:
    """The outcome of a verification.

    Attributes:
        subject: The model.
        dtype: The type in which the engine computes.
        compared: What was compared.
        left_out: What was not compared, and why.
        computes: The setting with which the engine computes instead of the configuration's, if
            that explains the difference.
        other_files: Files of weights that transformers does not read.
        seconds: How long the load had to wait for transformers' rows.
    """

    subject: Subject
    dtype: str
    compared: Sequence[Compared]
    left_out: Sequence[str]
    computes: str | None
    other_files: Sequence[str]
    seconds: float

    @property
    def passed(self) -> bool:
        return all(one.passed for one in self.compared)

    def __str__(self) -> str:
        served = f"{self.subject.model}: {self.subject.engine} in {self.dtype}"
        lines = [
            f"{served}, compared with transformers",
            *map(str, self.compared),
            *(f"not compared: {each}" for each in self.left_out),
        ]
        if not self.passed:
            lines.append(self.refusal())
        return "\n".join(lines)

    def refusal(self) -> str:
        """Why the model is rejected, and what to do."""
        worst = max((one for one in self.compared if not one.passed), key=lambda one: one.apart)
        lengths = ", ".join(map(str, worst.lengths))
        return (
            f"{self.subject.engine} serves another model than {self.subject.model!r} describes: "
            f"rows of {lengths} tokens ({worst.about}) are {worst.apart:.2g} nats from "
            f"transformers', where rounding explains {worst.allowed:.2g}"
            f"{self._reason()}; load it with backend='hf', or with verify=False to take these rows"
        )

    def _reason(self) -> str:
        if self.computes:
            return f"; its rows are those of {self.computes}, which the folder does not say"
        if self.other_files:
            return (
                f"; it may have read {', '.join(self.other_files[:3])}, which transformers does "
                "not read"
            )
        return ""
