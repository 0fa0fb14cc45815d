"""Operators: recorded steps without CUDA, for the probe and for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Operators that a CUDA graph cannot hold: they copy a value between the device and the host, or
#: the shape of their result depends on values.
REFUSED = frozenset({
    "_local_scalar_dense", "_unique2", "equal", "is_nonzero", "lift_fresh", "lift_fresh_copy",
    "masked_select", "nonzero", "unique_consecutive", "unique_dim",
})  # fmt: skip

#: An operator, its arguments, and the new tensors that it returned.
Call = tuple[Any, Any, Any, list[torch.Tensor]]


class Operators:
    """Records the operators of steps with the tensors that they read and write, and replays them on
    the same tensors, as a CUDA graph does. Python values and the memory of views are those of the
    recording.

    As with graphs that share a pool of memory, a replay overwrites the results of all other
    recordings.

    Attributes:
        nbytes: See :class:`~genlm.hf.graphs.Recorder`.
        recordings: The recordings since the last :meth:`forget`.
        replays: How many replays there have been.
    """

    def __init__(self) -> None:
        self.replays = 0
        self.forget()

    def record(self, step: Callable[[], torch.Tensor]) -> Operations:
        """Raises: ValueError: the step has an operator that a CUDA graph cannot hold."""
        with _Listing() as listing:
            result = step()
        recording = Operations(self, listing.calls, result)
        self.recordings.append(recording)
        self.nbytes += sum(one.nbytes for *_, made in listing.calls for one in made)
        return recording

    def forget(self) -> None:
        self.recordings: list[Operations] = []
        self.nbytes = 0


class Operations:
    """The operators of a step.

    Args:
        recorder: The recorder that made the recording.
        calls: The operators, in order.
        result: The result of the step.
    """

    def __init__(self, recorder: Operators, calls: list[Call], result: torch.Tensor) -> None:
        self._recorder, self._calls = recorder, calls
        self.result = result

    @torch.inference_mode()
    def replay(self) -> None:
        self._recorder.replays += 1
        for other in self._recorder.recordings:
            other.result.fill_(torch.nan)
        for call, args, kwargs, made in self._calls:
            again = filter(_is_tensor, tree_leaves(call(*args, **kwargs)))
            for target, value in zip(made, again, strict=False):
                target.copy_(value)


class _Listing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lists the operators that compute something, in this thread. Views need not be made again,
    since the memory that they show stays."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = call._schema.name.removeprefix("aten::"), kwargs or {}
        if name in REFUSED or (name == "index" and _has_mask(args[1])):
            raise ValueError(f"{name} is an operator that cannot be recorded")
        if call._can_decompose():  # then the operators that make it up are recorded
            with self:
                parts = call.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        result = call(*args, **kwargs)
        given = {_memory(one) for one in tree_leaves((args, kwargs)) if _is_tensor(one)}
        made = [one for one in tree_leaves(result) if _is_tensor(one)]
        fresh = [one for one in made if _memory(one) not in given]
        if call._schema.is_mutable or fresh:
            if fresh and len(fresh) < len(made):
                raise ValueError(f"{name} gives new memory beside old, and cannot be recorded")
            self.calls.append((call, args, kwargs, fresh))
        return result


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _has_mask(indices: Any) -> bool:
    return any(_is_tensor(one) and one.dtype == torch.bool for one in indices)
