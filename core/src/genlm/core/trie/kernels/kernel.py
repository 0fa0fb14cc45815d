"""What computes the values of all nodes of a trie."""

from __future__ import annotations

from typing import Any, Protocol

from genlm.core.trie.weights import Operation, ResultType


class Kernel(Protocol):
    """Sums and maxima over the nodes of a trie.

    Attributes:
        precision: The precision of results, unless the caller asks for another.
    """

    precision: str

    def reduce(self, operation: Operation, ws: Any, batch: bool, wanted: ResultType) -> Any:
        """Combine each row of weights, ``[items]``, for all nodes and leaves.

        Args:
            operation: How.
            ws: Weights of any kind: one row, or several if ``batch``.
            batch: Whether there are several.
            wanted: What to return.

        Returns:
            ``[rows, nodes + items]``

        Raises:
            InvalidInputError: The weights have another shape.
        """
        ...
