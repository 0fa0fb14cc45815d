"""The hooks of a plugin or an engine and those of the wrappers around it: found, checked, called.

pluggy finds the implementations and checks them, once. It could also make the calls, but then a
wrapper could skip the engine, lose or replace its result, and raise in its name.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import pluggy

from genlm.core import hookspecs
from genlm.core.checks import describe_error
from genlm.core.errors import GenlmError, InvalidInputError, PluginError
from genlm.core.hints import nearest
from genlm.core.logs import get_logger
from genlm.core.runtime.results import wrong_tensor
from genlm.core.types import Answer, Query, Request

if TYPE_CHECKING:
    import torch

log = get_logger()

#: How the names of hooks begin, and all of them.
PREFIX = f"{hookspecs.PROJECT}_"
HOOKS = [name for name in vars(hookspecs) if name.startswith(PREFIX)]

#: The hook that changes rows, and those that give rows, draws and scores.
PROCESSOR = "genlm_process_logprobs"
EARLIER = ("genlm_backend_info", "genlm_load")  # than wrappers go around anything
EVALUATION = (
    "genlm_next_token_logprobs",
    "genlm_step",
    "genlm_sample",
    "genlm_sequence_logprobs",
)

#: What ends the model when a wrapper raises it. What else is no ``Exception`` (a cancelled task of
#: its own, a panic of a library in Rust) fails what was asked, as an exception does.
FATAL = (KeyboardInterrupt, SystemExit)
CANCELLED = "CancelledError: something that it waited for was cancelled"

#: A wrapper that waits for the result of a call.
Observer = Generator[None, Any, Any]

#: Requests that wrappers fail, each with its error.
Failed = dict[Request, Exception]


class HookCalls:
    """Calls the hooks of one plugin module or engine object.

    Args:
        owner: How messages name it.
        given: The module or object.
        wrappers: Objects that process rows, in this order, or observe hooks; the last one is
            outermost.

    Raises:
        PluginError: a hook is misspelt, lacks its mark, or takes an argument that the hook does not
            have; or a wrapper has no hook, or one of the engine's.
    """

    def __init__(self, owner: str, given: object, wrappers: Iterable[object] = ()) -> None:
        manager = pluggy.PluginManager(hookspecs.PROJECT)
        manager.add_hookspecs(hookspecs)
        self._owner, own = owner, Hooked(owner, given)
        around = [Hooked(f"wrapper {name_of(wrapper)}", wrapper) for wrapper in wrappers]
        try:
            for hooked in (own, *around):
                manager.register(hooked)
            manager.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            raise PluginError(f"{owner}: {error}") from error
        found = {hook: getattr(manager.hook, hook).get_hookimpls() for hook in HOOKS}
        for hooked in (own, *around):  # else the manager, a circle, keeps the engine for a while
            manager.unregister(hooked)
        # In the order in which they were registered, but for those that want to be first or last.
        self._own: dict[str, list[pluggy.HookImpl]] = {
            hook: sorted((i for i in each if not i.wrapper), key=lambda i: i.trylast - i.tryfirst)
            for hook, each in found.items()
        }
        self._around: dict[str, list[pluggy.HookImpl]] = {  # the outermost last
            hook: [i for i in each if i.wrapper] for hook, each in found.items()
        }
        # For every hook the arguments that the object's own implementation takes.
        self._arguments: dict[str, Sequence[str] | None] = {
            hook: next((i.argnames for i in each if i.plugin is own), None)
            for hook, each in self._own.items()
        }
        for hooked in around:
            self._check_wrapper(hooked)

    def _check_wrapper(self, wrapper: Hooked) -> None:
        if not wrapper.hooks:
            raise PluginError(
                f"{wrapper.owner} has no hook; mark its methods with @hookimpl(wrapper=True)"
                f", or with @hookimpl where one is {PROCESSOR}"
            )
        for hook in wrapper.hooks:
            if hook != PROCESSOR and any(i.plugin is wrapper for i in self._own[hook]):
                raise PluginError(
                    f"{wrapper.owner} implements {hook} itself, which would shadow "
                    f"{self._owner}; mark it with @hookimpl(wrapper=True)"
                )

    def check_observers(self, evaluates: str, called: Collection[str]) -> None:
        """Refuse a wrapper of loading and evaluation hooks none of which is ever called.

        Args:
            evaluates: The hook that gives this engine's rows.
            called: All the evaluation hooks by which this engine is called.

        Raises:
            PluginError: it names the wrapper, its hook and the one to take.
        """
        observed: dict[Hooked, list[str]] = {}
        for hook in (*EARLIER, *EVALUATION, PROCESSOR):
            for wrapper in self._around[hook]:
                observed.setdefault(cast(Hooked, wrapper.plugin), []).append(hook)
        for plugin, hooks in observed.items():
            if not any(hook in called for hook in hooks):
                raise PluginError(
                    f"{plugin.owner} goes around {' and '.join(hooks)}, by which {self._owner} is "
                    f"never called; to observe, let it go around {evaluates}; to change rows, "
                    f"implement {PROCESSOR}"
                )

    # --- what there is ----------------------------------------------------------------------------

    @property
    def process(self) -> bool:
        """Whether anything changes rows."""
        return bool(self._own[PROCESSOR])

    def supports(self, hook: str, argument: str | None = None) -> bool:
        """Whether the object itself implements ``hook``, and takes ``argument`` there; the same
        after :meth:`forget`.

        Raises:
            InvalidInputError: there is no such hook.
        """
        if hook not in self._arguments:
            near = nearest(hook, HOOKS)
            meant = [name for name in HOOKS if str(hook) in name or name == near]
            hint = f"did you mean {' or '.join(map(repr, meant))}?"
            if not meant:
                hint = f"there are {', '.join(HOOKS)}"
            raise InvalidInputError(f"there is no hook {hook!r}; {hint}")
        taken = self._arguments[hook]
        return taken is not None and (argument is None or argument in taken)

    def forget(self) -> None:
        """Let go of the engine and its wrappers."""
        self._own = {hook: [] for hook in HOOKS}
        self._around = {hook: [] for hook in HOOKS}

    # --- calls ------------------------------------------------------------------------------------

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
        for wrapper in reversed(self._around[hook]):
            name = f"{cast(Hooked, wrapper.plugin).owner}: {hook}"
            try:
                generator = _call(wrapper, arguments)
                next(generator)
                waiting.insert(0, (name, generator))
            except StopIteration:
                remarks.append(attributed(name, RuntimeError("it does not yield")))
            except FATAL:
                raise
            except BaseException as error:
                remarks.append(attributed(name, error))
        try:
            result = self._engine(hook, arguments)
        except BaseException as error:
            for name, generator in waiting:
                _fail(name, generator, error)
            raise
        # A copy of a list, so that what a wrapper removes from it is not lost.
        seen = [*result] if isinstance(result, list) else result
        written = _writes(result)
        for name, generator in waiting:
            remark = _end(name, generator, seen)
            if written != (written := _writes(result)):
                remark = PluginError(
                    f"{name} wrote into what the engine gave; write into a copy (.clone()), or "
                    f"change rows by {PROCESSOR}"
                )
            remarks.append(remark)
        return result, remarks

    def _engine(self, hook: str, arguments: Mapping[str, Any]) -> Any:
        implementations = self._own[hook]
        if hook == PROCESSOR:
            return _processed(implementations, **arguments)
        result: Any = _call(implementations[0], arguments) if implementations else None
        if hook != "genlm_step":
            return result
        several = isinstance(result, Iterable) and not isinstance(result, Answer)  # itself a pair
        return list(result) if several else [result]


class Hooked:
    """The hooks of an object. pluggy compares and hashes what it holds: these are alike only where
    they are the same, for any ``__eq__`` and ``__hash__`` of the object.

    Args:
        owner: How messages name the object.
        given: The object.

    Raises:
        PluginError: a hook is misspelt, lacks its mark, or takes an argument that it does not have.
    """

    def __init__(self, owner: str, given: object) -> None:
        if inspect.isroutine(given):
            raise PluginError(
                f"{owner} is a function; make it a method of a class, and give an object of that"
            )
        self.owner, self.given = owner, given
        self.hooks: list[str] = []
        for name in dir(given):
            hook = getattr(given, name, None) if name.startswith(PREFIX) else None
            if callable(hook) and not inspect.isclass(hook) and self._is_hook(name, hook):
                self.hooks.append(name)
                setattr(self, name, hook)

    def _is_hook(self, name: str, hook: Any) -> bool:
        """Whether it is meant to be one."""
        spec = getattr(hookspecs, name, None)
        marked = hasattr(hook, f"{hookspecs.PROJECT}_impl")
        if spec is None:
            near = nearest(name, HOOKS)
            meant = f"; did you mean {near}?" if near else ""
            if marked or near:
                raise PluginError(f"{self.owner}: there is no hook {name}{meant}")
            return False
        if not marked:
            raise PluginError(
                f"{self.owner}: {name} is not marked; put @hookimpl (from genlm.core) above it"
            )
        if inspect.iscoroutinefunction(hook):
            raise PluginError(
                f"{self.owner}: {name} is async; hooks are plain functions: write def"
            )
        if getattr(hook, f"{hookspecs.PROJECT}_impl")[
            "wrapper"
        ] and not inspect.isgeneratorfunction(hook):
            raise PluginError(
                f"{self.owner}: {name} is a wrapper without a yield; write `result = yield` where "
                "the call is made, and return the result"
            )
        there = list(inspect.signature(spec).parameters)
        unknown = [
            each.name
            for each in inspect.signature(hook).parameters.values()
            if each.name not in there
            and each.default is each.empty
            and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        ]
        if unknown:
            raise PluginError(
                f"{self.owner}: {name} takes no argument {', '.join(unknown)}; it may take "
                f"{', '.join(there) or 'none'}"
            )
        return True


def name_of(plugin: object) -> str:
    """How a message names an object with hooks."""
    kind: Any = plugin if isinstance(plugin, ModuleType) else type(plugin)
    if inspect.isroutine(plugin):
        kind = plugin
    module = "" if isinstance(plugin, ModuleType) else f"{kind.__module__}."
    return f"{module}{getattr(kind, '__qualname__', kind.__name__)}"


def attributed(name: str, error: BaseException) -> PluginError:
    """The error of a plugin, with the plugin's name."""
    if isinstance(error, PluginError):
        return error
    said = CANCELLED if isinstance(error, asyncio.CancelledError) else describe_error(error)
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
        name = f"{name_of(cast(Hooked, processor.plugin).given)}: {PROCESSOR}"
        if processed is not rows:  # whoever gave it may still hold it
            processed = processed.clone(memory_format=torch.contiguous_format)
        try:
            processed = _call(processor, {"queries": queries, "rows": processed})
        except FATAL:
            raise
        except BaseException as error:
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
    except FATAL:
        raise
    except BaseException as error:
        return attributed(name, error)
    generator.close()
    return attributed(name, RuntimeError("it yields a second time"))


def _writes(result: Any) -> list[Any]:
    """What changes when a result is written into: how often each tensor has been, which PyTorch
    counts (but not through NumPy or ``.data``), and the ids of each draw. It does not count for
    tensors of its inference mode, and outside of that it lets nobody write into them."""
    given: Sequence[Any] = result if isinstance(result, Sequence) else [result]
    written: list[Any] = []
    for each in given:
        each = getattr(each, "result", each)
        if isinstance(each, Sequence):
            written.append(tuple(each))
        elif hasattr(each, "is_inference") and not each.is_inference():
            written.append(each._version)
    return written


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
