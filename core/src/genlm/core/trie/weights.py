"""Weights as users give them, results as they ask for them, and the two ways to combine them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

from genlm.core.checks import safe_repr, unawaited
from genlm.core.errors import InvalidInputError, InvalidOptionError

if TYPE_CHECKING:
    import torch


FloatArray = npt.NDArray[np.floating[Any]]

#: The floating-point types that PyTorch has too. Long double and other byte orders are excluded.
FLOATS = (np.float16, np.float32, np.float64)


@frozen
class ResultType:
    """The kind of result that a caller wants: a NumPy array or a PyTorch tensor, and its precision.

    Attributes:
        name: ``"float64"`` or ``"float32"``.
        tensor: Whether it is a tensor.
    """

    name: str
    tensor: bool

    @classmethod
    def of(cls, dtype: Any, default: str) -> ResultType:
        """Read a ``dtype`` of NumPy or of PyTorch; ``None`` is NumPy's of the name ``default``.

        Raises:
            InvalidOptionError: It is neither float64 nor float32.
        """
        if dtype is None:
            return cls(default, tensor=False)
        library, _, torch_name = str(dtype).rpartition(".")
        tensor = library == "torch"
        name = torch_name if tensor else _numpy_name(dtype)
        if name not in ("float64", "float32"):
            raise InvalidOptionError(
                f"dtype must be float64 or float32, of NumPy or PyTorch; got {dtype}"
            )
        return cls(name, tensor)

    def of_array(self, result: FloatArray) -> FloatArray | torch.Tensor:
        """Convert ``result``, which has the right precision."""
        if not self.tensor:
            return result
        import torch

        return torch.from_numpy(result)

    def of_tensor(self, result: torch.Tensor) -> FloatArray | torch.Tensor:
        """Convert ``result``, which is on any device."""
        import torch

        if self.tensor:
            return result.to(getattr(torch, self.name))
        array: FloatArray = result.cpu().numpy()
        return array.astype(self.name, copy=False)


def _numpy_name(dtype: Any) -> str:
    try:
        return str(np.dtype(dtype))
    except TypeError:
        return str(dtype)


def check_shape(shape: Sequence[int], items: int) -> None:
    """Check that a row has the shape ``[items]``.

    Raises:
        InvalidInputError: It has another shape.
    """
    if tuple(shape) != (items,):
        raise InvalidInputError(
            f"a row of weights has the shape {list(shape)}, but the trie needs [{items}]: give one "
            "weight for each item of `decode`, by position"
        )


def check_summed(weights: FloatArray) -> None:
    """Check that weights with a negative sum are not log-probabilities.

    Raises:
        InvalidInputError: None of them is positive.
    """
    if (greatest := weights.max()) <= 0:
        raise InvalidInputError(
            "the weights of a sum look like log-probabilities: they are from "
            f"{weights.min():.6g} to {greatest:.6g}; give row.exp(), or use the maximum, which "
            "takes log-probabilities. (To sum weights that are all negative, negate them first)"
        )


def to_array(ws: Any) -> FloatArray:
    """Weights of any kind as a NumPy array of floats, copied only if necessary.

    Raises: InvalidInputError: they are not numbers.
    """
    if hasattr(ws, "detach"):
        return _tensor_to_array(ws)
    try:
        array = np.asarray(ws)
        return array if array.dtype in FLOATS else array.astype(np.float64)
    except (TypeError, ValueError):
        raise InvalidInputError(
            f"weights must be numbers, such as row.exp(); got {safe_repr(ws)}{unawaited(ws)}"
        ) from None


def _tensor_to_array(ws: torch.Tensor) -> FloatArray:
    import torch

    ws = ws.detach().cpu()
    if ws.dtype not in (torch.float16, torch.float32, torch.float64):
        ws = ws.to(torch.float64)
    array: FloatArray = ws.numpy()
    return array


@frozen
class Operation:
    """An associative and commutative operation on weights.

    Attributes:
        name: Its name, which is the same in NumPy and PyTorch.
        reduction: The name in PyTorch of the reduction along a dimension.
        identity: Combining with it changes nothing.
    """

    name: str
    reduction: str
    identity: float

    def of(self, library: Any) -> Any:
        """The function of the module ``numpy`` or ``torch``: ``f(left, right, out=...)``."""
        return getattr(library, self.name)


SUM = Operation("add", "sum", 0.0)
MAX = Operation("maximum", "amax", -np.inf)
