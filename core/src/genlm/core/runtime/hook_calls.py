"""Calls the hooks of a loaded engine inside its wrappers, which observe each call.

pluggy finds the implementations and checks them, once. It could also make the calls, but then a
wrapper could skip the engine, lose or replace its result, and raise in its name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

from genlm.core.checks import describe_error
from genlm.core.errors import GenlmError, PluginError
from genlm.core.logs import get_logger
from genlm.core.plugins import (
    PROCESSOR,
    hook_names,
    hooked,
    implementations_of,
    name_of,
    wrappers_of,
)
from genlm.core.runtime.results import wrong_tensor
from genlm.core.types import Query, Request

if TYPE_CHECKING:
    import torch

log = get_logger()

#: What a hook may raise without ending the model. A task that is cancelled in an event loop of the
#: hook's own is none of ours.
STRAY = (Exception, asyncio.CancelledError)
CANCELLED = "CancelledError: something that it waited for was cancelled"

#: A wrapper that waits for the result of a call.
Observer = Generator[None, Any, Any]

#: Requests that wrappers fail, each with its error.
Failed = dict[Request, Exception]


class HookCalls:
    """Calls the hooks of one engine.

    Args:
        manager: Holds the engine object, the wrappers around its hooks, and what processes rows.
    """

    def __init__(self, manager: pluggy.PluginManager) -> None:
        self._own = {hook: implementations_of(manager, hook) for hook in hook_names()}
        self._around = {
            hook: [(f"{hooked(one).owner}: {hook}", one) for one in wrappers_of(manager, hook)]
            for hook in hook_names()
        }

    def forget(self) -> None:
        """Let go of the engine and its wrappers."""
        self._own = {hook: [] for hook in self._own}
        self._around = {hook: [] for hook in self._around}

    def call(self, hook: str, **arguments: Any) -> Any:
        """What the engine returns; ``None`` if it does not implement the hook.

        Raises:
            PluginError: a wrapper raised.
            Exception: the engine's own.
        """
        result, remarks = self._inside(hook, arguments)
        for remark in remarks:
            if isinstance(remark, Exception):
                raise remark
        return result

    def evaluate(self, hook: str, arguments: Mapping[str, Any]) -> tuple[Any, Failed]:
        """What an evaluation hook returns, and an error for each request that a wrapper fails. A
        wrapper that raises fails all that came or were answered in this call.

        Raises:
            Exception: the engine's own.
        """
        if not self._around[hook]:
            return self._engine(hook, arguments), {}
        result, remarks = self._inside(hook, arguments)
        failed: Failed = {}
        for remark in remarks:
            if not isinstance(remark, Exception):
                failed.update(remark)
                continue
            met = [r for kind in ("queries", "samples", "scores") for r in arguments.get(kind, ())]
            if hook == "genlm_step":
                met += [answer.request for answer in result]
            failed.update(dict.fromkeys(met, remark))
            if not met:
                log.warning("wrapper.failed", error=str(remark))
        return result, failed

    def _inside(
        self, hook: str, arguments: Mapping[str, Any]
    ) -> tuple[Any, list[PluginError | Failed]]:
        """Begin the wrappers, the last one first; make the call in every case; let them see its
        result, the first one first. Also what each has raised, or the requests that it fails."""
        remarks: list[PluginError | Failed] = []
        waiting: list[tuple[str, Observer]] = []
        for name, wrapper in reversed(self._around[hook]):
            try:
                generator = _call(wrapper, arguments)
                next(generator)
                waiting.insert(0, (name, generator))
            except STRAY as error:
                remarks.append(attributed(name, error))
        try:
            result = self._engine(hook, arguments)
        except BaseException as error:
            for name, generator in waiting:
                _fail(name, generator, error)
            raise
        # A copy of a list, so that what a wrapper removes from it is not lost.
        seen = [*result] if isinstance(result, list) else result
        return result, [*remarks, *(_end(name, generator, seen) for name, generator in waiting)]

    def _engine(self, hook: str, arguments: Mapping[str, Any]) -> Any:
        implementations = self._own[hook]
        if hook == PROCESSOR:
            return _processed(implementations, **arguments)
        result: Any = _call(implementations[0], arguments) if implementations else None
        return list(result) if hook == "genlm_step" else result


def attributed(name: str, error: BaseException) -> PluginError:
    """The error of a plugin, with the plugin's name."""
    if isinstance(error, PluginError):
        return error
    said = describe_error(error)
    if isinstance(error, StopIteration):
        said = "RuntimeError: it does not yield"
    elif isinstance(error, asyncio.CancelledError):
        said = CANCELLED
    attributed = PluginError(f"{name} raised {said}")
    attributed.__cause__ = error
    return attributed


def _call(implementation: pluggy.HookImpl, arguments: Mapping[str, Any]) -> Any:
    try:
        return implementation.function(*map(arguments.__getitem__, implementation.argnames))
    except asyncio.CancelledError as error:
        raise RuntimeError(CANCELLED) from error


def _processed(
    processors: Sequence[pluggy.HookImpl], queries: Sequence[Query], rows: torch.Tensor
) -> torch.Tensor:
    """Rows ``[len(queries), width]`` after each processor in turn has changed them."""
    import torch

    processed = rows
    for processor in processors:
        name = f"{name_of(hooked(processor).given)}: {PROCESSOR}"
        if processed is not rows:  # whoever gave it may still hold it
            processed = processed.clone(memory_format=torch.contiguous_format)
        try:
            processed = _call(processor, {"queries": queries, "rows": processed})
        except Exception as error:
            raise attributed(name, error) from error
        if (wrong := wrong_tensor(processed, tuple(rows.shape))) is not None:
            raise PluginError(f"{name} returned {wrong}")
    return processed


def _end(name: str, generator: Observer, result: Any) -> PluginError | Failed:
    """Let a wrapper see the result of a call. What it returns counts if it names requests to
    fail."""
    try:
        generator.send(result)
    except StopIteration as end:
        said = end.value if isinstance(end.value, dict) else {}
        return {
            request: error if isinstance(error, GenlmError) else attributed(name, error)
            for request, error in said.items()
            if isinstance(error, Exception)
        }
    except STRAY as error:
        return attributed(name, error)
    generator.close()
    return attributed(name, RuntimeError("it yields a second time"))


def _fail(name: str, generator: Observer, error: BaseException) -> None:
    """Let a wrapper see the error of a call. It remains the error to report."""
    try:
        generator.throw(error)
        generator.close()
    except StopIteration:
        pass
    except BaseException as own:
        if own is not error:
            log.warning("wrapper.failed", error=f"{name} raised {describe_error(own)}")
