"""The forward hooks that are set on the modules of a model, and the forwards that are set in place
of those of their classes, walked over once a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch.nn.modules import module as of_torch

#: The tables of a module's hooks. They are read anew for each look, because a program may give a
#: module another table. One getter for both would take twice as long.
HOOKS, PRE_HOOKS = map(itemgetter, ("_forward_hooks", "_forward_pre_hooks"))


class ForwardHooks:
    """Looks at all forward hooks of a model's modules, at those on all modules, and at forwards
    that were set on modules.

    Args:
        modules: All modules of the model, the model itself first.

    Attributes:
        inside: PyTorch's numbers, which are never reused, of the hooks that the user has set inside
            the model or for all modules, as of the last :meth:`look`. Hooks on the model itself are
            left out: they get token ids, and logits of the wanted positions only.
        forwards: The functions that were set as the ``forward`` of modules then, also of the model
            itself, each with the identity of its module.
        are_foreign: Whether the user had set any hook then, also on the model itself.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._own = [*map(vars, modules)]
        self._model, *self._parts = self._own
        self.inside: list[int] = []
        self.forwards: list[tuple[int, Any]] = []
        self.are_foreign = False

    def look(self, is_ours: Callable[[Any], bool]) -> None:
        """Update the attributes. This is called before each step.

        Args:
            is_ours: Whether a hook is the plugin's own. It is not kept: its object keeps this one,
                and a cycle would keep a closed model alive.
        """
        self.inside = _foreign(self._inside(), is_ours)
        on_model = HOOKS(self._model), PRE_HOOKS(self._model)
        self.are_foreign = bool(self.inside or _foreign(on_model, is_ours))
        self.forwards = [(id(own), own["forward"]) for own in self._own if "forward" in own]

    def functions(self) -> list[tuple[int, Any]]:
        """The functions of all hooks inside the model or for all modules, the plugin's own
        included, each with the index of its table; and the forwards as of the last look."""
        hooks = [(at, hook) for at, table in enumerate(self._inside()) for hook in table.values()]
        return [*hooks, *self.forwards]

    def _inside(self) -> Iterable[dict[int, Any]]:
        everywhere = (of_torch._global_forward_hooks, of_torch._global_forward_pre_hooks)
        return chain(everywhere, map(HOOKS, self._parts), map(PRE_HOOKS, self._parts))


def identities(functions: Iterable[tuple[int, Any]]) -> tuple[tuple[int, int], ...]:
    """What is equal only for the same functions at the same places, as long as they exist. Their
    ``==`` is not asked: for objects with a ``__call__`` it may fail, and methods of one object are
    equal although the object has changed since the first was set."""
    return tuple((at, id(function)) for at, function in functions)


def _foreign(tables: Iterable[dict[int, Any]], is_ours: Callable[[Any], bool]) -> list[int]:
    some = filter(None, tables)
    return [at for hooks in some for at, hook in hooks.items() if not is_ours(hook)]
