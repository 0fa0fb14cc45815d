"""Loads: which tensors of a checkpoint an engine's loader reads."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any

import torch
from attrs import frozen
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Unread tensors of up to this many bytes are kept until the end of a load: their values are
#: looked at, and no other tensor takes their place in memory.
KEPT_BYTES = 1 << 20


class Reading:
    """Sees which tensors of a checkpoint an engine's loader reads.

    A tensor is read by an operation that makes something else of its values: a copy, another type,
    a sum. A view of it is not. So nothing depends on how a loader renames, splits and joins what
    it reads.
    """

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._unread: dict[int, _Unread] = {}
        self._freed: list[_Unread] = []
        self._lock = Lock()  # loaders read in several threads

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While a loader works in this thread, and in others to which it gives work."""
        here, submit = get_ident(), ThreadPoolExecutor.submit

        def watched_too(work: Callable[..., Any]) -> Callable[..., Any]:
            def do(*args: Any, **named: Any) -> Any:
                with _Operations(self._has_read):
                    return work(*args, **named)

            return do

        def submit_watched(
            pool: ThreadPoolExecutor, work: Callable[..., Any], /, *args: Any, **named: Any
        ) -> Any:
            if get_ident() == here:
                work = watched_too(work)
            return submit(pool, work, *args, **named)

        ThreadPoolExecutor.submit = submit_watched  # type: ignore[method-assign, assignment]
        try:
            with _Operations(self._has_read):
                yield
        finally:
            ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]

    def of(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The names and tensors of a checkpoint, on their way to the loader."""
        return map(self._added, weights)  # which keeps no tensor

    def unread(self, model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
        """The names and shapes of tensors that no operation has read, that are no weights of the
        loaded model themselves, and not all zeros."""
        for one in (*model.parameters(), *model.buffers()):
            if not one.is_meta:
                self._has_read(one)
        found = (*self._freed, *(self._unread[begin] for begin in self._begins))
        return {one.name: one.shape for one in found if not one.is_known_to_be_zeros}

    def _added(self, weight: tuple[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
        name, tensor = weight
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        if begin == end:
            return weight
        values = tensor if tensor.nbytes <= KEPT_BYTES else None
        storage = StorageWeakRef(tensor.untyped_storage())
        with self._lock:
            # What was there before has been freed, or is the same tensor under another name.
            first, last = bisect_left(self._begins, begin), bisect_left(self._begins, end)
            before = [self._unread.pop(each) for each in self._begins[first:last]]
            self._freed += [one for one in before if one.storage.expired()]
            self._begins[first:last] = [begin]
            self._unread[begin] = _Unread(name, tuple(tensor.shape), end, values, storage)
        return weight

    def _has_read(self, tensor: torch.Tensor) -> None:
        address = tensor.data_ptr()
        with self._lock:
            at = bisect_right(self._begins, address) - 1
            if at >= 0 and address < self._unread[self._begins[at]].end:
                one = self._unread.pop(self._begins.pop(at))
                if one.storage.expired():  # another tensor is where it was
                    self._freed.append(one)


@frozen(eq=False)
class _Unread:
    """A tensor of a checkpoint.

    Attributes:
        name: Its name.
        shape: Its shape.
        end: The address behind it.
        values: The tensor, if it is small.
        storage: Whether its memory has been freed.
    """

    name: str
    shape: tuple[int, ...]
    end: int
    values: torch.Tensor | None
    storage: Any

    @property
    def is_known_to_be_zeros(self) -> bool:
        return self.values is not None and not bool(self.values.count_nonzero())


class _Operations(TorchDispatchMode):
    """Tells of the tensors that operations read in a thread."""

    def __init__(self, has_read: Callable[[torch.Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._has_read = has_read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            for one in tree_leaves((args, kwargs)):
                if type(one) is torch.Tensor and not one.is_meta:
                    self._has_read(one)
        return func(*args, **(kwargs or {}))
