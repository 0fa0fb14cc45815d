"""The trie's kernel for rows on a device: PyTorch, and on CUDA kernels of its own."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from genlm.core.errors import InvalidOptionError
from genlm.core.logs import get_logger
from genlm.core.trie.plan import Plan
from genlm.core.trie.reducer import TorchReducer
from genlm.core.trie.weights import MAX, SUM, Operation, ResultType, check_shape, to_array

if TYPE_CHECKING:
    import torch

log = get_logger()

#: How many rows prove the fused kernels: more than one program of Triton's takes.
_ROWS = 5

#: How far two sums of the same weights may be apart, relative to their size.
_BOUNDS = {"float32": 2e-6, "float64": 1e-14}


class DeviceKernel:
    """Sums and maxima over the nodes of a trie, for rows on any PyTorch device.

    Computes in float32, or in float64 if the result is to have that precision: on consumer GPUs
    float64 takes up to 64 times as long, and everywhere twice the memory traffic. Never waits for
    the device, unless the result is to be a NumPy array.

    On CUDA, a kernel written in Triton combines the pairs of each round, if it has proved there
    that it computes what PyTorch's own functions do. Those combine them elsewhere.
    """

    precision = "float32"

    def __init__(self, plan: Plan, device: str) -> None:
        """Move the plan to the device. On CUDA, a few rows are reduced both ways: where Triton has
        not compiled for this GPU before, that takes seconds.

        Raises:
            InvalidOptionError: PyTorch does not know the device, or cannot use it here.
        """
        import torch

        self.plan = plan
        self.device = device
        try:
            kind = torch.device(device).type
            plain = TorchReducer(plan, device)
        except (AssertionError, RuntimeError) as error:  # PyTorch raises either, by device
            raise InvalidOptionError(
                f"device is {device!r}, which this PyTorch cannot use here: {error}"
            ) from error
        self._has_float64 = kind != "mps"
        fused = proven_reducer(plan, device, plain) if kind == "cuda" else None
        self._reducer = fused or plain

    def _rows(self, ws: Any, batch: bool, dtype: torch.dtype) -> torch.Tensor:
        """Weights of any kind as ``[rows, items]`` on the device."""
        import torch

        if batch and isinstance(ws, list | tuple):
            none = torch.empty((0, self.plan.items), dtype=dtype, device=self.device)
            return torch.cat([none, *(self._rows(row, False, dtype) for row in ws)])
        if not isinstance(ws, torch.Tensor):
            ws = torch.from_numpy(np.ascontiguousarray(to_array(ws)))
        rows: torch.Tensor = ws.detach() if batch else ws.detach()[None]
        check_shape(rows.shape[1:], self.plan.items)
        # The type first: MPS cannot even receive float64, and float32 is half as much to move.
        return rows.to(dtype).to(self.device)

    def reduce(self, operation: Operation, ws: Any, batch: bool, wanted: ResultType) -> Any:
        """See :meth:`~genlm.core.trie.cpu.CpuKernel.reduce`; in float32 unless ``wanted`` is
        wider."""
        import torch

        is_wide = wanted.name == "float64" and self._has_float64
        weights = self._rows(ws, batch, torch.float64 if is_wide else torch.float32)
        return wanted.of_tensor(self._reducer.reduce(operation, weights))


def proven_reducer(plan: Plan, device: str, plain: TorchReducer) -> TorchReducer | None:
    """Fused kernels, if they compute what ``plain`` does for a few random rows.

    Otherwise the reason is logged: a missing Triton as information, all else as a warning.
    """
    if find_spec("triton") is None:
        log.info("trie.not_fused", reason="Triton is not installed")
        return None
    try:
        from genlm.core.trie.cuda import TritonReducer

        fused = TritonReducer(plan, device)
        _compare(fused, plain, plan.items, device)
    except Exception as error:  # a compiler or a driver may raise anything
        log.warning(
            "trie.not_fused",
            consequence="sums and maxima over a trie on this device take longer",
            reason=f"{type(error).__name__}: {error}",
        )
        return None
    return fused


def _compare(fused: TorchReducer, plain: TorchReducer, items: int, device: str) -> None:
    """Raise ``AssertionError`` where maxima are not equal, or sums not within the bound."""
    import torch

    source = torch.Generator().manual_seed(0)
    for name, operation in product(_BOUNDS, (SUM, MAX)):
        weights = torch.rand(_ROWS, items, generator=source, dtype=getattr(torch, name)).to(device)
        # In this order: memory that the plain way leaves may hold the very values.
        found, expected = fused.reduce(operation, weights), plain.reduce(operation, weights)
        torch.testing.assert_close(
            found,
            expected,
            rtol=_BOUNDS[name] if operation is SUM else 0.0,
            atol=0.0,
            msg=lambda difference: f"{operation.name} in {name}: {difference}",  # noqa: B023
        )
