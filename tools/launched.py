"""Counts the operations of a step for which a GPU would launch kernels."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

#: The operators that allocate memory without writing into it.
UNWRITTEN = {"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty"}


class Launched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what computes while it lasts, in this thread: not views, nor memory that nothing is
    written into.

    Attributes:
        count: How many operations of PyTorch.
    """

    count = 0

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = [one.alias_info for one in call._schema.returns]
        views = any(alias is not None and not alias.is_write for alias in returned)
        self.count += not (views or call._schema.name.removeprefix("aten::") in UNWRITTEN)
        return call(*args, **(kwargs or {}))
