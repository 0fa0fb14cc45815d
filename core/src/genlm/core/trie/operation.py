"""The two ways to combine weights."""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import frozen


@frozen
class Operation:
    """An associative and commutative operation on weights.

    Attributes:
        name: Its name, which is the same in NumPy and PyTorch.
        reduction: The name in PyTorch of combining all along a dimension.
        identity: Combining with it changes nothing.
    """

    name: str
    reduction: str
    identity: float

    def of(self, library: Any) -> Any:
        """The operation as the module ``numpy`` or ``torch`` has it: ``f(left, right,
        out=...)``."""
        return getattr(library, self.name)


SUM = Operation("add", "sum", 0.0)
MAX = Operation("maximum", "amax", -np.inf)
