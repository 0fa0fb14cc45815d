"""The forward hooks that are set on the modules of a model, walked over once a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
        # The tables of hooks are listed once, because they are walked over before each step.
        model, *others = modules
        self._inside = [
            (-1, of_torch._global_forward_hooks),
            (-1, of_torch._global_forward_pre_hooks),
            *((at, hooks) for at, one in enumerate(others) for hooks in _hooks_of(one)),
        ]
        self._tables: list[dict[int, Any]] = [hooks for _, hooks in self._inside]
        self._on_model = _hooks_of(model)
        self.inside: list[int] = []
        self.are_foreign = False

    def look(self, is_ours: Callable[[Any], bool]) -> None:
        """Update the attributes. This is called before each step.

        Args:
            is_ours: Whether a hook is the plugin's own. It is not kept: its object keeps this one,
                and a cycle would keep a closed model alive.
        """
        self.inside = _foreign(self._tables, is_ours)
        self.are_foreign = bool(self.inside or _foreign(self._on_model, is_ours))

    def functions(self) -> list[tuple[int, Any]]:
        """The functions of all hooks inside the model or for all modules, the plugin's own
        included, each with the index of its module."""
        return [(at, hook) for at, hooks in self._inside for hook in hooks.values()]


def _foreign(tables: Iterable[dict[int, Any]], is_ours: Callable[[Any], bool]) -> list[int]:
    some = filter(None, tables)
    return [at for hooks in some for at, hook in hooks.items() if not is_ours(hook)]


def _hooks_of(module: torch.nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    return module._forward_hooks, module._forward_pre_hooks
