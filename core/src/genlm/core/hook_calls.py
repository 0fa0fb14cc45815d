"""Calls the hooks of a plugin module, or of an engine and its wrappers, through pluggy."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pluggy

from genlm.core import hookspecs
from genlm.core.checks import describe_error
from genlm.core.errors import InvalidInputError, PluginError
from genlm.core.hints import nearest
from genlm.core.hooked import HOOKS, PROCESS, WRAPPER_HOOKS, Hooked, name_of
from genlm.core.logs import get_logger
from genlm.core.types import Answer

if TYPE_CHECKING:
    import torch

log = get_logger()

#: The exceptions of a wrapper that end the model. Any other exception that is not an ``Exception``
#: (a cancelled task, a panic of a Rust library) counts as an ``Exception``.
FATAL = (KeyboardInterrupt, SystemExit)
CANCELLED = "CancelledError: something that it waited for was cancelled"

#: pluggy's caller of one ``genlm_process_logprobs``, which returns a list of the new rows.
Processor = Callable[..., "torch.Tensor"]


class HookCalls:
    """Calls the hooks of one plugin module or engine object, and notifies observers.

    Args:
        owner: How messages name the module or object.
        given: The module or object.
        wrappers: Objects that change rows or observe calls. pluggy orders their hooks: as given,
            but for those marked ``tryfirst`` or ``trylast``.
        violated: Is told of an observer that has written into a result; ``None`` does not look.

    Raises:
        PluginError: a hook is misspelt, lacks its mark, is marked as a wrapper, or takes an
            argument that the hook does not have; or a wrapper has no hook, or one of the engine's.
    """

    def __init__(
        self,
        owner: str,
        given: object,
        wrappers: Iterable[object] = (),
        violated: Callable[[PluginError], None] | None = None,
    ) -> None:
        self._owner, self._violated = owner, violated
        own = Hooked(owner, given)
        around = [Hooked(f"wrapper {name_of(wrapper)}", wrapper) for wrapper in wrappers]
        for wrapper in around:
            wrapper.check_wrapper(owner)
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        try:
            # Pluggy calls the hook that was registered last first.
            for hooked in (*reversed(around), own):
                self._manager.register(hooked)
            self._manager.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            raise PluginError(f"{owner}: {error}") from error
        self._arguments = own.arguments
        processors, self._begins, self._ended = map(self._one_by_one, WRAPPER_HOOKS)
        #: The wrappers that change rows, by name, in the order in which they are applied.
        self.processors: list[tuple[str, Processor]] = processors
        self._observed = bool(self._begins or self._ended)
        self._failed_observers: set[str] = set()

    def _one_by_one(self, hook: str) -> list[tuple[str, Callable[..., Any]]]:
        """pluggy's callers for single implementations of a hook, by name, in pluggy's order. Each
        processor gets the result of the previous one, and an observer must not miss a call because
        another one has raised, so every implementation is called separately."""
        implementations = [*reversed(getattr(self._manager.hook, hook).get_hookimpls())]
        plugins = {implementation.plugin for implementation in implementations}

        def caller(plugin: Any) -> tuple[str, Callable[..., Any]]:
            alone = self._manager.subset_hook_caller(hook, plugins - {plugin})
            return f"{name_of(plugin.given)}: {hook}", alone

        return [caller(implementation.plugin) for implementation in implementations]

    # --- what there is ----------------------------------------------------------------------------

    def supports(self, hook: str, argument: str | None = None) -> bool:
        """Whether the object itself implements ``hook``, and takes ``argument`` there; the same
        after :meth:`forget`.

        Raises:
            InvalidInputError: there is no such hook.
        """
        if hook not in HOOKS:
            near = nearest(hook, HOOKS)
            meant = [name for name in HOOKS if str(hook) in name or name == near]
            hint = f"did you mean {' or '.join(map(repr, meant))}?"
            if not meant:
                hint = f"there are {', '.join(HOOKS)}"
            raise InvalidInputError(f"there is no hook {hook!r}; {hint}")
        taken = self._arguments.get(hook)
        return taken is not None and (argument is None or argument in taken)

    def forget(self) -> None:
        """Release the engine and its wrappers. A plugin manager refers to itself, so otherwise they
        would stay until a garbage collection."""
        for plugin in self._manager.get_plugins():
            self._manager.unregister(plugin)

    # --- calls ------------------------------------------------------------------------------------

    def call(self, hook: str, **arguments: Any) -> Any:
        """Call a hook and return the engine's result: ``None``, or an empty list, if the engine
        does not implement the hook.

        Raises:
            Exception: the engine's own.
        """
        return self.evaluate(hook, arguments)[0]

    def evaluate(self, hook: str, arguments: Mapping[str, Any]) -> tuple[Any, PluginError | None]:
        """Call an evaluation hook. Returns the engine's result and, if an observer has written into
        it, the error for all callers that get a part of it.

        Raises:
            Exception: the engine's own.
        """
        if not self._observed or hook not in self._arguments:
            return self._call_engine(hook, arguments), None
        shown: dict[str, Any] = {"hook": hook, "arguments": MappingProxyType(arguments)}
        self._notify(self._begins, shown)
        try:
            result = self._call_engine(hook, arguments)
        except BaseException as error:
            self._notify(self._ended, {**shown, "result": None, "error": error})
            raise
        spoilt = self._notify(self._ended, {**shown, "result": _shown(result), "error": None})
        return result, spoilt

    def _call_engine(self, hook: str, arguments: Mapping[str, Any]) -> Any:
        try:
            result = getattr(self._manager.hook, hook)(**arguments)
            if hook != "genlm_step":
                return result
            if isinstance(result, Answer):  # an answer is itself a tuple
                return (result,)
            several = isinstance(result, (list, Iterable))
            return tuple(result) if several else (result,)
        except asyncio.CancelledError as error:  # a CancelledError would end the engine thread
            raise RuntimeError(CANCELLED) from error
        except BaseException as error:
            clear_pluggy(error)
            raise

    def _notify(
        self, observers: Sequence[tuple[str, Callable[..., Any]]], shown: Mapping[str, Any]
    ) -> PluginError | None:
        """Notify observers. If one raises, the log names it once, and the call continues. With
        checked results, return the error for an observer that has written into the result."""
        spoilt = None
        written = _writes(shown.get("result")) if self._violated else 0
        for name, observer in observers:
            try:
                observer(**shown)
            except FATAL:
                raise
            except BaseException as error:
                clear_pluggy(error)
                if name not in self._failed_observers:
                    log.warning("observer.failed", error=str(attributed(name, error)))
                self._failed_observers.add(name)
            if self._violated and written != (written := _writes(shown.get("result"))):
                wrote = "wrote into what the engine gave; write into a copy (.clone()), or change "
                try:
                    self._violated(PluginError(f"{name} {wrote}rows by {PROCESS}"))
                except PluginError as error:
                    spoilt = error
        return spoilt


def clear_pluggy(error: BaseException) -> None:
    """Clear the frames of pluggy that an error has passed through. They refer to the error, and it
    to them: this circle would keep what the hook was computing until a garbage collection."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").startswith("pluggy."):
            frame.clear()


def attributed(name: str, error: BaseException) -> PluginError:
    """The error of a plugin, with the plugin's name."""
    if isinstance(error, PluginError):
        return error
    said = CANCELLED if isinstance(error, asyncio.CancelledError) else describe_error(error)
    attributed = PluginError(f"{name} raised {said}")
    attributed.__cause__ = error
    return attributed


def _shown(result: Any) -> Any:
    """A result in the form that observers get. Sequences become tuples, so that nothing can be
    removed. Tensors are the engine's own, since copying them would cost too much."""
    if isinstance(result, Answer):
        return Answer(result.request, _shown(result.result))
    if isinstance(result, Sequence) and not isinstance(result, str):
        return tuple(map(_shown, result))
    return result


def _writes(shown: Any) -> int:
    """How often the tensors of a result have been written into, as PyTorch counts. PyTorch does not
    count writes through NumPy or ``.data``, or into tensors of inference mode."""
    if isinstance(shown, tuple):
        return sum(_writes(each) for each in shown)
    counted = hasattr(shown, "is_inference") and not shown.is_inference()
    return int(shown._version) if counted else 0
