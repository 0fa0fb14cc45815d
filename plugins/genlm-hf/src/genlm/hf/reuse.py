"""How a model's KV cache can be reused."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
from attrs import field, frozen


class ReuseMode(Enum):
    """The reuse modes, best first."""

    SHARED = "shared"
    """Any mixture of contexts in one forward, nothing padded; a prefix that several contexts share
    is kept once and read once."""

    PACKED = "packed"
    """Any mixture of contexts in one forward, nothing padded; every context keeps its own state."""

    UNIFORM = "uniform"
    """One forward for contexts that grow from equal length by equal length: for models with
    attention code of their own."""

    SNAPSHOTS = "snapshots"
    """Whole states after known contexts, one forward for those that are extended by equal length:
    for state that cannot be cut (recurrent and hybrid)."""

    STEPWISE = "stepwise"
    """The same, extended token by token: for models that take several tokens as a new text."""

    NONE = "none"
    """Every context is computed whole: the model returns no state, or goes on from it to other
    rows."""


@frozen
class Choice:
    """The result of the probe.

    Attributes:
        reuse: The mode.
        tolerance: How much log-probabilities may differ from those of cold forwards.
        limit: The longest context whose state may be kept; ``None`` means no limit.
        rows_apart: Whether every row beyond the limit needs a forward of its own, because the
            logits at an earlier position of a forward are not the row of the context that ends
            there.
        ragged: Whether snapshots of contexts of unequal length may be extended together.
        static: Whether a step of one token for each context may have a constant shape, and be
            recorded.
        contexts: The probe's contexts; empty if nothing was computed.
        expected: Their log-probabilities by plain forwards.
    """

    reuse: ReuseMode
    tolerance: float
    limit: int | None
    rows_apart: bool
    ragged: bool = False
    static: bool = False
    contexts: Sequence[Sequence[int]] = ()
    expected: torch.Tensor = field(factory=lambda: torch.empty(0), eq=False)
