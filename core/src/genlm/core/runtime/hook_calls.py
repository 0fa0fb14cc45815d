"""Calls the hooks of a loaded engine inside its wrappers, which observe each call.

pluggy finds the implementations and checks them. It could also make the calls, but then a wrapper
could skip the engine, lose or replace its result, and raise in its name.
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy
from attrs import frozen

from genlm.core.checks import describe_error, safe_repr
from genlm.core.errors import PluginError
from genlm.core.logs import get_logger
from genlm.core.plugins import hooked, implementations_of, name_of, wrappers_of
from genlm.core.runtime.results import wrong_tensor
from genlm.core.types import Answer, Query, Request

if TYPE_CHECKING:
    import torch

log = get_logger()

#: What a hook may raise without ending the model. A task that is cancelled in an event loop of the
#: hook's own is none of ours.
STRAY = (Exception, asyncio.CancelledError)

#: A wrapper that is waiting for the result of a call.
Waiting = Generator[None, Any, Any]


@frozen
class Remark:
    """What a wrapper did with the result of a call.

    Attributes:
        wrapper: The wrapper, for messages.
        returned: What it returned; ``None`` says nothing.
        error: What it raised.
    """

    wrapper: str
    returned: Any = None
    error: Exception | None = None

    def raised(self) -> PluginError | None:
        """The error that it raised, with its name."""
        return None if self.error is None else attributed(self.wrapper, self.error)

    def interfered(self, did: str) -> PluginError:
        """The error for a wrapper that did more than observe."""
        return PluginError(
            f"{self.wrapper} {did}; a wrapper observes: return what `yield` gave, or nothing, and "
            "change rows by the hook genlm_process_logprobs"
        )


class HookCalls:
    """Calls the hooks of one engine.

    Args:
        manager: Holds the engine object, the wrappers around its hooks, and what processes rows.
    """

    def __init__(self, manager: pluggy.PluginManager) -> None:
        self._manager = manager

    def call(self, hook: str, **arguments: Any) -> Any:
        """What the engine returns; ``None`` if it does not implement the hook.

        Raises:
            PluginError: a wrapper raised, or returned another result.
            Exception: the engine's own.
        """
        return self._observed(hook, arguments, lambda: self._engine(hook, arguments))

    def step(self, **arguments: Any) -> tuple[Sequence[Answer], dict[Request, Exception]]:
        """What ``genlm_step`` returns, and an error for each request whose answer a wrapper
        changed.

        Raises:
            Exception: the engine's own.
        """
        answers: list[Answer] = []

        def engine() -> list[Answer]:
            answers.extend(self._engine("genlm_step", arguments))
            return [*answers]  # a copy for wrappers: what one removes from it is not lost

        _, remarks = self._inside("genlm_step", arguments, engine)
        errors: dict[Request, Exception] = {}
        for remark in remarks:
            if (error := remark.raised()) is not None:
                newcomers = [
                    r for kind in ("queries", "samples", "scores") for r in arguments[kind]
                ]
                met = [*newcomers, *(answer.request for answer in answers)]
                errors.update(dict.fromkeys(met, error))
                if not met:
                    log.warning("wrapper.failed", error=str(error))
            elif remark.returned is not None:
                errors.update(_differences(answers, remark))
        return answers, errors

    def process(self, queries: Sequence[Query], rows: torch.Tensor) -> torch.Tensor:
        """Rows ``[len(queries), width]`` after each implementation of ``genlm_process_logprobs`` in
        turn has changed them.

        Raises:
            PluginError: one of them raised, or returned something else.
        """
        hook = "genlm_process_logprobs"

        def processors() -> torch.Tensor:
            processed = rows
            for one in implementations_of(self._manager, hook):
                if processed is not rows:  # whoever gave it may still hold it
                    processed = processed.clone(memory_format=torch.contiguous_format)
                processed = _processed(one, queries, processed)
            return processed

        import torch

        result: torch.Tensor = self._observed(hook, {"queries": queries, "rows": rows}, processors)
        return result

    def _engine(self, hook: str, arguments: Mapping[str, Any]) -> Any:
        result = None
        for implementation in implementations_of(self._manager, hook):  # one, or none
            result = _call(implementation, arguments)
        return result

    def _observed(self, hook: str, arguments: Mapping[str, Any], inner: Callable[[], Any]) -> Any:
        """The result of ``inner``, if no wrapper changed it."""
        result, remarks = self._inside(hook, arguments, inner)
        for remark in remarks:
            if (error := remark.raised()) is not None:
                raise error
            if remark.returned is not None and remark.returned is not result:
                raise remark.interfered(f"returned another result: {safe_repr(remark.returned)}")
        return result

    def _inside(
        self, hook: str, arguments: Mapping[str, Any], inner: Callable[[], Any]
    ) -> tuple[Any, list[Remark]]:
        """Begin the wrappers, the last one first; make the call in every case; let them see its
        result, the first one first."""
        remarks: list[Remark] = []
        waiting: list[tuple[str, Waiting]] = []
        for wrapper in reversed(wrappers_of(self._manager, hook)):
            name = f"{hooked(wrapper).owner}: {hook}"
            try:
                generator = _call(wrapper, arguments)
                next(generator)
                waiting.insert(0, (name, generator))
            except STRAY as error:
                remarks.append(Remark(name, error=_unyielding(error)))
        try:
            result = inner()
        except BaseException as error:
            for name, generator in waiting:
                _fail(name, generator, error)
            raise
        return result, [*remarks, *(_end(name, generator, result) for name, generator in waiting)]


def attributed(name: str, error: Exception) -> PluginError:
    """The error of a plugin, with the plugin's name."""
    if isinstance(error, PluginError):
        return error
    attributed = PluginError(f"{name} raised {describe_error(error)}")
    attributed.__cause__ = error
    return attributed


def _call(implementation: pluggy.HookImpl, arguments: Mapping[str, Any]) -> Any:
    try:
        return implementation.function(*(arguments[name] for name in implementation.argnames))
    except asyncio.CancelledError as error:
        raise _cancelled() from error


def _processed(
    processor: pluggy.HookImpl, queries: Sequence[Query], rows: torch.Tensor
) -> torch.Tensor:
    name = f"{name_of(hooked(processor).given)}: genlm_process_logprobs"
    try:
        processed: torch.Tensor = _call(processor, {"queries": queries, "rows": rows})
    except Exception as error:
        raise attributed(name, error) from error
    if (wrong := wrong_tensor(processed, tuple(rows.shape))) is not None:
        raise PluginError(f"{name} returned {wrong}")
    return processed


def _end(name: str, generator: Waiting, result: Any) -> Remark:
    """Let a wrapper see the result of a call."""
    try:
        generator.send(result)
    except StopIteration as end:
        return Remark(name, returned=end.value)
    except STRAY as error:
        return Remark(name, error=_unyielding(error))
    generator.close()
    return Remark(name, error=RuntimeError("it yields a second time"))


def _fail(name: str, generator: Waiting, error: BaseException) -> None:
    """Let a wrapper see the error of a call. It remains the error to report."""
    try:
        generator.throw(error)
        generator.close()
    except StopIteration:
        pass
    except BaseException as own:
        if own is not error:
            log.warning("wrapper.failed", error=f"{name} raised {describe_error(own)}")


def _unyielding(error: Exception | asyncio.CancelledError) -> Exception:
    if isinstance(error, asyncio.CancelledError):
        return _cancelled()
    return RuntimeError("it does not yield") if isinstance(error, StopIteration) else error


def _cancelled() -> RuntimeError:
    return RuntimeError("something that it waited for was cancelled (CancelledError)")


def _differences(answers: Sequence[Answer], remark: Remark) -> Iterator[tuple[Request, Exception]]:
    """The requests whose answers a wrapper lost, doubled, changed or invented, each with its error.
    An exception instead of a result is the wrapper's error for the request."""
    results: dict[Request, list[Any]] = {answer.request: [] for answer in answers}
    own = {answer.request: answer.result for answer in answers}
    try:
        returned = list(remark.returned)
        if len(returned) == len(answers) and all(map(operator.is_, returned, answers)):
            return
        for answer in returned:
            results.setdefault(answer.request, []).append(answer.result)
    except Exception:
        wrong = remark.interfered(f"returned {safe_repr(remark.returned)}, not a list of answers")
        yield from dict.fromkeys(own, wrong).items()
        return
    for request, given in results.items():
        if request not in own:
            yield request, remark.interfered(f"invented an answer to {safe_repr(request)}")
        elif len(given) != 1:
            did = "gave more than one answer" if given else "lost the answer"
            yield request, remark.interfered(f"{did} to {safe_repr(request)}")
        elif isinstance(given[0], Exception) and given[0] is not own[request]:
            yield request, given[0]
        elif given[0] is not own[request]:
            yield request, remark.interfered(f"changed the answer to {safe_repr(request)}")
