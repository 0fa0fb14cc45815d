"""The hooks of one object: a plugin module, an engine or a wrapper. Found and checked."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from genlm.core import hookspecs
from genlm.core.errors import PluginError
from genlm.core.hints import nearest

#: The prefix of the names of hooks, and the names of all hooks.
PREFIX = f"{hookspecs.PROJECT}_"
HOOKS = [name for name in vars(hookspecs) if name.startswith(PREFIX)]

#: The hooks of wrappers: one that changes rows, and two that observe calls.
PROCESS, BEGINS, ENDED = WRAPPER_HOOKS = (
    "genlm_process_logprobs",
    "genlm_call_begins",
    "genlm_call_ended",
)
TWO_WAYS = (
    f"to change rows, implement {PROCESS}(queries, rows); to observe calls, {BEGINS}(hook, "
    f"arguments) or {ENDED}(hook, arguments, result, error)"
)


class Hooked:
    """The hooks of one object, checked. pluggy compares and hashes what it holds: these are alike
    only where they are the same, for any ``__eq__`` and ``__hash__`` of the object.

    Args:
        owner: How messages name the object.
        given: The object.

    Raises:
        PluginError: a hook is misspelt, lacks its mark, is marked as a wrapper, or takes an
            argument that it does not have.
    """

    def __init__(self, owner: str, given: object) -> None:
        if inspect.isroutine(given):
            raise PluginError(
                f"{owner} is a function; make it a method of a class, and give an object of the "
                "class"
            )
        self.owner, self.given = owner, given
        #: For each hook, the arguments that the object's implementation takes.
        self.arguments: dict[str, list[str]] = {}
        for attribute in dir(given):
            # getattr_static runs no property.
            static = inspect.getattr_static(given, attribute, None)
            mark = getattr(getattr(static, "__func__", static), f"{PREFIX}impl", None)
            marked = isinstance(mark, dict) and (mark.get("specname") or attribute[0] != "_")
            if not (marked or attribute.startswith(PREFIX)):
                continue
            function = getattr(given, attribute, None)
            if callable(function) and not inspect.isclass(function):
                self._add(attribute, function, mark)

    def _add(self, attribute: str, function: Any, mark: Mapping[str, Any] | None) -> None:
        """Take a method or function if it is meant to be a hook."""
        name = (mark and mark.get("specname")) or attribute
        what = f"{self.owner}: {name}"
        if name not in HOOKS:
            near = nearest(name, HOOKS)
            if (mark and not mark.get("optionalhook")) or (near and not mark):
                meant = f"; did you mean {near}?" if near else ""
                raise PluginError(f"{self.owner}: there is no hook {name}{meant}")
            return
        if mark is None:
            raise PluginError(f"{what} is not marked; put @hookimpl (from genlm.core) above it")
        if mark.get("wrapper") or mark.get("hookwrapper"):
            raise PluginError(
                f"{what} is marked as a wrapper (wrapper=True), which no hook here may be; "
                f"{TWO_WAYS}"
            )
        if inspect.iscoroutinefunction(function):
            raise PluginError(f"{what} is async; hooks are plain functions: write def")
        there = list(inspect.signature(getattr(hookspecs, name)).parameters)
        # Like pluggy, leave out arguments that have a default.
        taken = [
            each.name
            for each in inspect.signature(function).parameters.values()
            if each.default is each.empty
            and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        ]
        if unknown := [each for each in taken if each not in there]:
            raise PluginError(
                f"{what} takes no argument {', '.join(unknown)}; it may take "
                f"{', '.join(there) or 'none'}"
            )
        self.arguments[name] = taken
        setattr(self, attribute, function)

    def check_wrapper(self, around: str) -> None:
        """Raises: PluginError: the object has no hook, or one of the engine's."""
        if not self.arguments:
            raise PluginError(f"{self.owner} has no hook; {TWO_WAYS}, each marked with @hookimpl")
        if own := [hook for hook in self.arguments if hook not in WRAPPER_HOOKS]:
            raise PluginError(
                f"{self.owner} implements {own[0]}, a hook of engines, which would shadow "
                f"{around}; {TWO_WAYS}"
            )


def name_of(plugin: object) -> str:
    """How a message names an object with hooks."""
    kind: Any = plugin if isinstance(plugin, ModuleType) else type(plugin)
    if inspect.isroutine(plugin):
        kind = plugin
    module = "" if isinstance(plugin, ModuleType) else f"{kind.__module__}."
    return f"{module}{getattr(kind, '__qualname__', kind.__name__)}"
