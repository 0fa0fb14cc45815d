"""Compares an engine's rows with reference rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from attrs import define, evolve, field

from genlm.kit.verify.contexts import Group
from genlm.kit.verify.copies import ServedCopy
from genlm.kit.verify.guilty import apart, distances, spread
from genlm.kit.verify.reference import Reference, Unanswered
from genlm.kit.verify.report import ONE_ROW_MARGIN, Compared, Report, allowed
from genlm.kit.verify.subject import Subject, others_in
from genlm.kit.verify.transformers_rows import COPY_THRESHOLD_TOKENS, Answer, Scaled

#: The engine's function from token ids to a row of float32 log-probabilities.
Row = Callable[[Sequence[int]], torch.Tensor]

#: The types in which transformers' own rounding is measured. For an engine in any other type, only
#: float32 rows are compared.
HALF_DTYPES = ("bfloat16", "float16")


def compare(
    subject: Subject,
    reference: Reference,
    row: Row,
    max_context: int | None,
    dtype: str | None,
    served: ServedCopy | Unanswered | None = None,
) -> Report:
    """Compare rows of an engine with those that the reference has begun to compute.

    Args:
        subject: The model.
        reference: The reference; :meth:`Reference.begin` has been called.
        row: Gives the engine's row of a context.
        max_context: The longest context that the engine takes.
        dtype: The type in which the engine computes; ``None`` is the checkpoint's.
        served: A scaled copy as the engine serves it, or why there is none.

    Raises:
        Unanswered: transformers cannot compute them, or the engine takes none of the contexts.
        Exception: what the engine raises.
    """
    began = time.monotonic()
    answer = reference.chosen()
    waited = time.monotonic() - began
    dtype = (dtype or answer.dtype).removeprefix("torch.")
    whole = _Comparison(reference, row, max_context, dtype)
    whole.compare(answer)
    too_long = dict(answer.chosen.too_long)
    if isinstance(served, ServedCopy):
        rows, thresholds = served.rows, served.copy.thresholds
        small = _Comparison(
            reference,
            lambda ids: torch.from_numpy(rows.of[tuple(ids)]),
            rows.max_context,
            dtype,
            served.copy,
        )
        small.compare(served.answer)
        whole.compared += small.compared
        whole.left_out += small.left_out
        whole.computes = whole.computes or small.computes
        looked_at = thresholds.keys() - served.answer.chosen.too_long.keys()
        too_long = {name: value for name, value in too_long.items() if name not in looked_at}
    elif isinstance(served, Unanswered):
        whole.left_out.append(f"a scaled copy: {served}")
    whole.left_out += [f"contexts beyond {name}={value}" for name, value in too_long.items()]
    if not whole.compared:
        raise Unanswered(f"nothing was compared ({'; '.join(whole.left_out)})")
    folder = subject.folder()
    others = [] if folder is None else others_in(folder)
    return Report(subject, dtype, whole.compared, whole.left_out, whole.computes, others, waited)


@define
class _Comparison:
    """The rows of a model, or of its scaled copy."""

    reference: Reference
    row: Row
    max_context: int | None
    dtype: str
    copy: Scaled | None = None
    compared: list[Compared] = field(factory=list)
    left_out: list[str] = field(factory=list)
    computes: str | None = None

    def compare(self, answer: Answer) -> None:
        """Raises: Unanswered: transformers cannot compute rows in the engine's type."""
        groups, taken = [], []
        for group, expected in zip(answer.chosen.groups, answer.rows, strict=True):
            kept = [
                at
                for at, context in enumerate(group.contexts)
                if self.max_context is None or len(context) <= self.max_context
            ]
            if kept:
                groups.append(evolve(group, contexts=tuple(group.contexts[at] for at in kept)))
                taken.append(expected[kept])
            else:
                longest = f"the longest context is of {self.max_context} tokens"
                self.left_out.append(f"{self._about(group)}: {longest}")
        noise = [0.0] * len(groups)
        if self.dtype in HALF_DTYPES:
            rounded = self.reference.rows(groups, self.dtype, self.copy)
            noise = [
                max(apart(one[[at]], other[[at]]) for at in range(len(one)))
                for one, other in zip(rounded, taken, strict=True)
            ]
        for group, expected, own in zip(groups, taken, noise, strict=True):
            rows = np.stack([self.row(ids).float().cpu().numpy() for ids in group.contexts])
            lengths = tuple(len(context) for context in group.contexts)
            most = allowed(own, spread(expected))
            one = Compared(self._about(group), lengths, self._apart(rows, expected, most), most)
            self.compared.append(one)
            if not one.passed and self.computes is None:
                self.computes = self._explanation(group, rows, most)

    def _apart(self, rows: np.ndarray, expected: np.ndarray, most: float) -> float:
        """How far the rows of a group are apart: the median, except that in float32 no row may be
        far off."""
        largest = float(distances(rows, expected).max())
        alone = self.dtype not in HALF_DTYPES and largest > ONE_ROW_MARGIN * most
        return largest if alone else apart(rows, expected)

    def _about(self, group: Group) -> str:
        where = (
            ""
            if self.copy is None
            else f"on a scaled copy with thresholds at {COPY_THRESHOLD_TOKENS} tokens, "
        )
        return where + group.about

    def _explanation(self, group: Group, rows: np.ndarray, most: float) -> str | None:
        try:
            return self.reference.explanation(group, rows, most, self.copy)
        except Unanswered:
            return None
