"""The trie's kernel for rows on a device: PyTorch, and on CUDA kernels of its own."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from genlm.core.errors import InvalidOptionError
from genlm.core.logs import get_logger
from genlm.core.trie.plan import Indices, Plan, Rest, Round
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


class TorchReducer:
    """Reduces rows of weights on any device, in PyTorch's own functions.

    Every gather makes a tensor of its own: into a part of another, PyTorch on a CPU takes four
    times as long.
    """

    def __init__(self, plan: Plan, device: str) -> None:
        """Move the plan to the device.

        Raises:
            RuntimeError, AssertionError: PyTorch cannot use the device; which one, depends on it.
        """
        self._plan = plan
        self._first = on_device(plan.first, device)
        self._others = [on_device(step.other, device) for step in plan.rounds]
        self._rest = on_device(_padded(plan.rest, plan.width), device)
        self._place = on_device(np.append(plan.place, np.arange(plan.items)), device)

    def reduce(self, operation: Operation, weights: torch.Tensor) -> torch.Tensor:
        """Combine each row of weights for all nodes and leaves, in the work rows that
        :mod:`genlm.core.trie.plan` describes.

        Args:
            operation: How.
            weights: ``[rows, items]`` in float32 or float64, with any strides.

        Returns:
            ``[rows, nodes + items]``, contiguous, in the type of the weights.
        """
        import torch

        plan = self._plan
        work = weights.new_empty((len(weights), plan.width + 1))
        work[:, : plan.items] = weights
        work[:, plan.width].fill_(operation.identity)  # pads the rest
        first = slice(plan.items, plan.items + len(self._first))
        work[:, first] = weights.index_select(1, self._first)
        for step, other in zip(plan.rounds, self._others, strict=True):
            self._combine(operation, work, step, other)
        values = work.index_select(1, self._rest.flatten()).view(len(work), *self._rest.shape)
        reduce = getattr(torch, operation.reduction)
        reduce(values, dim=2, out=work[:, plan.rest.results])
        return work.index_select(1, self._place)

    def _combine(
        self, operation: Operation, work: torch.Tensor, step: Round, other: torch.Tensor
    ) -> None:
        """One round, in every work row."""
        import torch

        others = work.index_select(1, other)
        operation.of(torch)(work[:, step.new], others, out=work[:, step.results])


def on_device(indices: Indices, device: str) -> torch.Tensor:
    """Indices as int32 on a device: half as much to read as int64."""
    import torch

    return torch.from_numpy(indices.astype(np.int32)).to(device)


def _padded(rest: Rest, padding: int) -> Indices:
    """``[results, most values]`` The values of each result, followed by ``padding``."""
    counts = np.diff(rest.starts, append=len(rest.values))
    result = np.repeat(np.arange(len(counts)), counts)
    padded = np.full((len(counts), int(counts.max(initial=1))), padding, np.intp)
    padded[result, np.arange(len(rest.values)) - rest.starts[result]] = rest.values
    return padded


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
