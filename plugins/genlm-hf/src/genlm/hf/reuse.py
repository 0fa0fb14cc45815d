"""How a model's key/value state can be reused."""

from __future__ import annotations

from enum import Enum


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
