"""What reduces rows of weights on a device, and which of the two ways that is."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import product
from typing import TYPE_CHECKING, Protocol

from genlm.core.logs import get_logger
from genlm.core.trie.kernels.torch_reducer import TorchReducer
from genlm.core.trie.plan import Plan
from genlm.core.trie.weights import MAX, SUM, Operation

if TYPE_CHECKING:
    import torch

log = get_logger()

#: How many rows are compared: more than one program of Triton's takes.
_ROWS = 5

#: How far two sums of the same weights may be apart, relative to their size.
_BOUNDS = {"float32": 2e-6, "float64": 1e-14}


class Reducer(Protocol):
    """Sums and maxima over the nodes of a trie, for tensors on its device."""

    def reduce(self, operation: Operation, weights: torch.Tensor) -> torch.Tensor:
        """Combine each row of weights for all nodes and leaves.

        Args:
            operation: How.
            weights: ``[rows, items]`` in float32 or float64, with any strides.

        Returns:
            ``[rows, nodes + items]``, contiguous, in the type of the weights.
        """
        ...


def reducer_for(plan: Plan, device: str) -> Reducer:
    """Fused kernels on CUDA, if they prove themselves there; otherwise PyTorch's own functions.

    Raises:
        RuntimeError, AssertionError: PyTorch cannot use the device; which one, depends on it.
    """
    import torch

    plain = TorchReducer(plan, device)
    if torch.device(device).type != "cuda":
        return plain
    return proven_reducer(plan, device, plain) or plain


def proven_reducer(plan: Plan, device: str, plain: Reducer) -> Reducer | None:
    """Fused kernels, if they compute what ``plain`` does for a few random rows.

    Otherwise the reason is logged: a missing Triton as information, all else as a warning.
    """
    if find_spec("triton") is None:
        log.info("trie.not_fused", reason="Triton is not installed")
        return None
    try:
        from genlm.core.trie.kernels.triton_reducer import TritonReducer

        fused = TritonReducer(plan, device)
        reason = _difference(fused, plain, plan.items, device)
    except Exception as error:  # a compiler or a driver may raise anything
        reason = f"{type(error).__name__}: {error}"
    else:
        if reason is None:
            return fused
    log.warning(
        "trie.not_fused",
        consequence="sums and maxima over a trie on this device take longer",
        reason=reason,
    )
    return None


def _difference(fused: Reducer, plain: Reducer, items: int, device: str) -> str | None:
    """The first difference between two reducers: maxima are to be equal, sums within the bound."""
    import torch

    source = torch.Generator().manual_seed(0)
    for name, operation in product(_BOUNDS, (SUM, MAX)):
        weights = torch.rand(_ROWS, items, generator=source, dtype=getattr(torch, name)).to(device)
        # In this order: memory that the plain way leaves may hold the very values.
        found, expected = fused.reduce(operation, weights), plain.reduce(operation, weights)
        bound = _BOUNDS[name] if operation is SUM else 0.0
        wrong = ~((found - expected).abs() <= bound * expected)  # NaN is wrong too
        if wrong.any():
            row, node = wrong.nonzero()[0].tolist()
            return (
                f"{operation.name} in {name} gives {found[row, node]:.9g} instead of "
                f"{expected[row, node]:.9g} at node {node} of {found.shape[1]}"
            )
    return None
