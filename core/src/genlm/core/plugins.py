"""Finding backends through entry points, loading one, and building the plugin manager of one
model."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, TypeVar

import pluggy
from attrs import frozen

from genlm.core import hookspecs
from genlm.core.checks import describe_error
from genlm.core.errors import (
    BackendImportError,
    BackendNotFoundError,
    BackendUnavailableError,
    PluginError,
)
from genlm.core.hints import nearest
from genlm.core.installation import pip_install
from genlm.core.logs import get_logger
from genlm.core.types import BackendInfo, Engine

log = get_logger()

T = TypeVar("T")

BACKENDS = "genlm.backends"
WRAPPERS = "genlm.wrappers"

#: The distribution to install for a backend that is not there. Others are found once they are
#: installed.
KNOWN = {
    "hf": "genlm-hf",
    "vllm": "genlm-vllm",
    "mlx": "genlm-mlx",
    "sgl": "genlm-sgl",
    "ray": "genlm-ray",
}

#: What a backend may be called by who knows its engine.
ENGINES = {
    "transformers": "hf",
    "huggingface": "hf",
    "pytorch": "hf",
    "mlx-lm": "mlx",
    "sglang": "sgl",
}

#: The hooks that give rows, draws and scores.
EVALUATION = (
    "genlm_next_token_logprobs",
    "genlm_step",
    "genlm_sample",
    "genlm_sequence_logprobs",
)

#: How the names of hooks begin.
PREFIX = f"{hookspecs.PROJECT}_"

#: The hook that changes rows.
PROCESSOR = "genlm_process_logprobs"

ENGINE_ATTRIBUTES = ("tokenizer", "vocab_size", "max_context", "device", "model")


@frozen
class Backend:
    """An installed backend: its entry point and, once imported, its plugin module."""

    name: str
    entry_point: EntryPoint
    module: ModuleType

    @property
    def distribution(self) -> str:
        """Name and version of the distribution that provides it, for instance ``"genlm-hf
        0.1.0"``."""
        return distribution(self.entry_point)

    @property
    def _owner(self) -> str:
        return f"backend {self.name!r} ({self.distribution})"

    def info(self) -> BackendInfo:
        """What the backend says of itself. Imports no engine."""
        hook = self._hook("genlm_backend_info")
        try:
            info = hook()
        except (Exception, SystemExit) as error:
            text = describe_error(error)
            raise PluginError(f"{self._owner}: genlm_backend_info raised {text}") from error
        if not isinstance(info, BackendInfo):
            raise PluginError(f"{self._owner}: genlm_backend_info returned {info!r}")
        return info

    def load(self, model: str, options: Mapping[str, object]) -> Engine:
        """Load a model. Call it on the engine thread."""
        info = self.info()
        if not info.available:
            raise BackendUnavailableError(
                f"backend {self.name!r} cannot run on this machine: {info.unavailable}"
            )
        engine: Engine = self._hook("genlm_load")(model=model, options=options)
        return engine

    def _hook(self, name: str) -> Any:
        hook = getattr(plugin_manager(self._owner, self.module).hook, name)
        if not hook.get_hookimpls():
            raise PluginError(
                f"{self._owner}: module {self.module.__name__} has no hook {name}; define it and "
                "mark it with @hookimpl"
            )
        return hook


def backend_names() -> list[str]:
    """The names of the installed backends. Imports none of them."""
    return sorted({entry_point.name for entry_point in entry_points(group=BACKENDS)})


def find_backend(name: str) -> Backend:
    """Import the plugin module of one backend.

    Raises:
        BackendNotFoundError: nothing installed provides it.
        BackendImportError: its module cannot be imported; the cause is chained.
    """
    found = list(
        {(e.value, distribution(e)): e for e in entry_points(group=BACKENDS, name=name)}.values()
    )
    if not found:
        raise BackendNotFoundError(_not_found(name))
    if len(found) > 1:
        claims = ", ".join(sorted(f"{e.value} of {distribution(e)}" for e in found))
        raise BackendImportError(
            f"backend {name!r} is provided more than once: {claims}; keep only one of them"
        )
    entry_point = found[0]
    module = _attributed(
        "backend", entry_point, lambda found: importlib.import_module(found.module)
    )
    return Backend(name, entry_point, module)


def available_backends() -> list[tuple[int, str]]:
    """The preferences and names of the backends that can run on this machine, the best first."""
    available: list[tuple[int, str]] = []
    for name in backend_names():
        try:
            info = find_backend(name).info()
        except (BackendImportError, PluginError) as error:
            log.warning("backend.skipped", backend=name, reason=str(error))
            continue
        if info.available:
            available.append((info.preference, name))
    return sorted(available, reverse=True)


def choose_backend() -> str:
    """The available backend that suits this machine best; the choice is logged.

    Raises:
        BackendNotFoundError: none is installed and available.
    """
    ranked = [name for preference, name in available_backends() if preference >= 0]
    if not ranked:
        raise BackendNotFoundError(
            "no backend can be chosen automatically on this machine; "
            f"{pip_install('genlm-hf')}, or name one of those installed: "
            f"{', '.join(backend_names()) or 'none'}; `genlm backends` says why one cannot run"
        )
    log.info("backend.chosen", backend=ranked[0], available=ranked)
    return ranked[0]


def plugin_manager(
    owner: str, plugin: object, wrappers: Iterable[object] = ()
) -> pluggy.PluginManager:
    """A plugin manager of its own for one plugin module or engine object, the wrappers around it,
    and what processes its rows.

    Raises:
        PluginError: a hook is misspelt, lacks its mark, or takes an argument that the hook does not
            have; or a wrapper has no hook, or one of the engine's.
    """
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(Hooked(owner, plugin))
        for wrapper in wrappers:
            around = Hooked(f"wrapper {name_of(wrapper)}", wrapper)
            manager.register(around)
            _check_wrapper(manager, around, owner)
        manager.check_pending()
    except (pluggy.PluginValidationError, ValueError) as error:
        raise PluginError(f"{owner}: {error}") from error
    return manager


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
        self.owner, self.given = owner, given
        for name in dir(given):
            hook = getattr(given, name, None) if name.startswith(PREFIX) else None
            if callable(hook) and not inspect.isclass(hook):
                self._check(name, hook)
                setattr(self, name, hook)

    def _check(self, name: str, hook: Any) -> None:
        spec = getattr(hookspecs, name, None)
        marked = hasattr(hook, f"{hookspecs.PROJECT}_impl")
        if spec is None:
            near = nearest(name, hook_names())
            meant = f"; did you mean {near}?" if near else ""
            if marked or near:
                raise PluginError(f"{self.owner}: there is no hook {name}{meant}")
        elif not marked:
            raise PluginError(
                f"{self.owner}: {name} is not marked; put @hookimpl (from genlm.core) above it"
            )
        else:
            there = list(inspect.signature(spec).parameters)
            takes = inspect.signature(hook).parameters.values()
            unknown = [
                one.name
                for one in takes
                if one.name not in there
                and one.default is one.empty
                and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
            ]
            if unknown:
                raise PluginError(
                    f"{self.owner}: {name} takes no argument {', '.join(unknown)}; it may take "
                    f"{', '.join(there) or 'none'}"
                )


def hooked(implementation: pluggy.HookImpl) -> Hooked:
    """What an implementation was registered with."""
    found = implementation.plugin
    assert isinstance(found, Hooked)
    return found


def hook_names() -> list[str]:
    """The names of all hooks."""
    return [name for name in vars(hookspecs) if name.startswith(PREFIX)]


def implementations_of(manager: pluggy.PluginManager, hook: str) -> list[pluggy.HookImpl]:
    """The implementations of a hook, wrappers apart: in the order in which they were registered,
    but for those that want to be first or last."""
    implementations = [i for i in getattr(manager.hook, hook).get_hookimpls() if not i.wrapper]
    return sorted(implementations, key=lambda i: i.trylast - i.tryfirst)


def wrappers_of(manager: pluggy.PluginManager, hook: str) -> list[pluggy.HookImpl]:
    """The wrappers around a hook, the outermost last."""
    return [i for i in getattr(manager.hook, hook).get_hookimpls() if i.wrapper]


def name_of(plugin: object) -> str:
    """How a message names an object with hooks."""
    kind = plugin if isinstance(plugin, ModuleType) else type(plugin)
    module = "" if isinstance(plugin, ModuleType) else f"{kind.__module__}."
    return f"{module}{getattr(kind, '__qualname__', kind.__name__)}"


def installed_wrappers() -> list[object]:
    """The wrappers that installed distributions bring along (entry-point group
    ``genlm.wrappers``)."""
    return [
        _attributed("wrapper", entry_point, _wrapper)
        for entry_point in entry_points(group=WRAPPERS)
    ]


def _wrapper(entry_point: EntryPoint) -> object:
    wrapper = entry_point.load()
    return wrapper() if inspect.isclass(wrapper) else wrapper


def distribution(entry_point: EntryPoint) -> str:
    """Name and version of the distribution of an entry point."""
    found = entry_point.dist
    return f"{found.name} {found.version}" if found else "unknown distribution"


def _attributed(kind: str, entry_point: EntryPoint, load: Callable[[EntryPoint], T]) -> T:
    """What ``load`` makes of an entry point; if it fails, the error names the distribution to
    blame."""
    try:
        return load(entry_point)
    except (Exception, SystemExit) as error:  # a module that exits must not end the whole program
        raise BackendImportError(
            f"{kind} {entry_point.name!r} is installed ({distribution(entry_point)}), but "
            f"importing {entry_point.value} failed: {describe_error(error)}; repair or uninstall it"
        ) from error


def _not_found(name: str) -> str:
    installed = backend_names()
    if not isinstance(name, str):
        names = ", ".join(installed) or "none"
        return (
            f"the backend must be named by a string, one of those installed: {names}; got {name!r}"
        )
    message = f"no backend {name!r}; installed: {', '.join(installed) or 'none'}"
    if "/" in name or os.sep in name or name.endswith(".gguf"):
        return f"{message}; the model comes first: load_model_by_name({name!r}, backend=...)"
    if name in KNOWN:
        return f"{message}; {pip_install(KNOWN[name])}"
    near = {**ENGINES, **{name: name for name in (*installed, *KNOWN)}}
    close = nearest(name.lower(), near)
    if close is None:
        return message
    meant = near[close]
    remedy = "" if meant in installed else f"; {pip_install(KNOWN[meant])}"
    return f"{message}; did you mean {meant!r}?{remedy}"


def _check_wrapper(manager: pluggy.PluginManager, wrapper: Hooked, owner: str) -> None:
    hooks = manager.get_hookcallers(wrapper) or []
    if not hooks:
        raise PluginError(
            f"{wrapper.owner} has no hook; mark its methods with @hookimpl(wrapper=True)"
            f", or with @hookimpl where one is {PROCESSOR}"
        )
    for hook in hooks:
        own = [i for i in implementations_of(manager, hook.name) if i.plugin is wrapper]
        if own and hook.name != PROCESSOR:
            raise PluginError(
                f"{wrapper.owner} implements {hook.name} itself, which would shadow "
                f"{owner}; mark it with @hookimpl(wrapper=True)"
            )


def check_observers(
    manager: pluggy.PluginManager, owner: str, evaluates: str, called: Collection[str]
) -> None:
    """Refuse a wrapper of evaluation hooks none of which is ever called.

    Args:
        manager: Holds the engine and the wrappers.
        owner: The engine, for messages.
        evaluates: The hook that gives this engine's rows.
        called: All the evaluation hooks by which this engine is called.

    Raises:
        PluginError: it names the wrapper, its hook and the one to take.
    """
    around: dict[Hooked, list[str]] = {}
    for hook in (*EVALUATION, PROCESSOR):
        for wrapper in wrappers_of(manager, hook):
            around.setdefault(hooked(wrapper), []).append(hook)
    for plugin, hooks in around.items():
        if not any(hook in called for hook in hooks):
            raise PluginError(
                f"{plugin.owner} goes around {' and '.join(hooks)}, by which {owner} is "
                f"never called; to observe, let it go around {evaluates}; to change rows, "
                f"implement {PROCESSOR}"
            )
