"""Counts the copies between host and device in a step, and finds waits for the device, on a machine
without one."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from attrs import define
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Stands for the device. It has no memory, so any copy from there to the host, and any wait for a
#: value, raises.
META = torch.device("meta")

INDEXED = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


def _picks_by_list(call: Any, args: Any) -> bool:
    """Whether a tensor is indexed by a list, which PyTorch copies to the tensor's device and waits
    for."""
    if call not in INDEXED:
        return False
    index = args[1] if isinstance(args[1], tuple) else args[1:2]
    return any(isinstance(one, list | np.ndarray) for one in index)


# --- tensors on a device that has no memory -------------------------------------------------------


class _Made(TorchFunctionMode):
    """Counts tensors made on the device from numbers of the host."""

    count = 0

    def __torch_function__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = call in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None
        self.count += made or _picks_by_list(call, args)
        return call(*args, **kwargs)


class _Moved(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts copies to the device, including those that an operation makes of its arguments, and
    operations that wait for a value from the device."""

    up = down = 0

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        there = [one for one in given if one.device == META]
        host = [one for one in given if one.device != META and one.ndim]
        chooses = call in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default)
        if chooses and any(one.dtype == torch.bool for one in args[1] if one is not None):
            self.down += 1  # the number of elements must be known on the host
        result = call(*args, **(kwargs or {}))
        made = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        if there or any(one.device == META for one in made):
            self.up += len(host)
        if there:
            self.down += sum(one.device != META for one in made)
        return result


@define
class Counts:
    """The number of copies to the device, and of waits for it."""

    up: int = 0
    down: int = 0


@contextmanager
def counted() -> Iterator[Counts]:
    """Inside the block, count copies between the host and :data:`META`."""
    counts = Counts()
    with _Made() as made, _Moved() as moved:  # type: ignore[no-untyped-call]
        yield counts
    counts.up, counts.down = made.count + moved.up, moved.down


# --- an engine that computes on the CPU -----------------------------------------------------------

T = torch.Tensor
WAITS = {
    T.item, T.tolist, T.__bool__, T.__int__, T.__float__, T.__index__, T.cpu, T.nonzero,
    torch.nonzero, torch.equal, T.equal, torch.allclose, T.allclose, torch.masked_select,
    T.masked_select, torch.unique, T.unique,
}  # fmt: skip


class Transfers(TorchFunctionMode):
    """Counts, by place in the code, what the code of this repository would copy to a device or wait
    for, if the engine's tensors were on one. The engine's own code is left out.

    Attributes:
        waits: Calls for which the host waits until the device has done all that it was given.
        copies: Copies for which it does not wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()

    def __torch_function__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if place := _ours():
            if call in WAITS or _picks_by_list(call, args):
                self.waits[place] += 1
            elif call is T.to and _names_a_device(args[1:], kwargs):
                (self.copies if kwargs.get("non_blocking") else self.waits)[place] += 1
        return call(*args, **kwargs)


def _names_a_device(args: Any, kwargs: Any) -> bool:
    kinds = (str, torch.device, torch.Tensor)
    return any(isinstance(one, kinds) for one in (*args, kwargs.get("device"), kwargs.get("other")))


def _ours() -> str | None:
    """The place in this repository's code that calls PyTorch."""
    frame = sys._getframe(2)
    name: str = frame.f_globals.get("__name__", "")
    return f"{name}:{frame.f_lineno}" if name.startswith("genlm.") else None
