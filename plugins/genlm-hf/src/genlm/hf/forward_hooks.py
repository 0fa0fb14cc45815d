"""The forward hooks that are set on the modules of a model, walked over once a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.modules import module as of_torch


class ForwardHooks:
    """Looks at all forward hooks of a model's modules, and at those on all modules.

    Args:
        modules: All modules of the model, the model itself first.

    Attributes:
        inside: PyTorch's numbers, which are never reused, of the hooks that the user has set inside
            the model or for all modules, as of the last :meth:`look`. Hooks on the model itself are
            left out: they get token ids, and logits of the wanted positions only.
        are_foreign: Whether the user had set any hook then, also on the model itself.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._modules = modules
        self.inside: list[int] = []
        self.are_foreign = False

    def look(self, is_ours: Callable[[Any], bool]) -> None:
        """Update the attributes. This is called before each step.

        Args:
            is_ours: Whether a hook is the plugin's own. It is not kept: its object keeps this one,
                and a cycle would keep a closed model alive.
        """
        model, *others = self._modules
        self.inside = _foreign(_tables(others, everywhere=True), is_ours)
        self.are_foreign = bool(self.inside or _foreign(_tables([model]), is_ours))

    def functions(self) -> list[tuple[int, Any]]:
        """The functions of all hooks inside the model or for all modules, the plugin's own
        included, each with the index of its table."""
        tables = _tables(self._modules[1:], everywhere=True)
        return [(at, hook) for at, hooks in enumerate(tables) for hook in hooks.values()]


def _tables(
    modules: Sequence[torch.nn.Module], *, everywhere: bool = False
) -> Iterator[dict[int, Any]]:
    """The tables of hooks of modules, and of all modules. They are read anew for each look, because
    a program may give a module another table."""
    if everywhere:
        yield from (of_torch._global_forward_hooks, of_torch._global_forward_pre_hooks)
    for own in map(vars, modules):
        yield own["_forward_hooks"]
        yield own["_forward_pre_hooks"]


def _foreign(tables: Iterable[dict[int, Any]], is_ours: Callable[[Any], bool]) -> list[int]:
    some = filter(None, tables)
    return [at for hooks in some for at, hook in hooks.items() if not is_ours(hook)]
