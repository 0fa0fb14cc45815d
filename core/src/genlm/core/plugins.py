"""Finding backends and wrappers through entry points, and loading a backend."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from attrs import frozen

from genlm.core.checks import describe_error
from genlm.core.errors import (
    BackendImportError,
    BackendNotFoundError,
    BackendUnavailableError,
    GenlmError,
    PluginError,
)
from genlm.core.hints import nearest
from genlm.core.hook_calls import HookCalls
from genlm.core.installation import pip_install
from genlm.core.logs import get_logger
from genlm.core.types import BackendInfo, Engine

log = get_logger()

BACKENDS = "genlm.backends"
WRAPPERS = "genlm.wrappers"

#: The distribution to install for a missing backend. Other backends are found once they are
#: installed.
KNOWN = {
    "hf": "genlm-hf",
    "vllm": "genlm-vllm",
    "mlx": "genlm-mlx",
    "sgl": "genlm-sgl",
    "ray": "genlm-ray",
}

#: The backend for each name by which users know its engine.
ENGINES = {
    "transformers": "hf",
    "huggingface": "hf",
    "pytorch": "hf",
    "mlx-lm": "mlx",
    "sglang": "sgl",
}


@frozen
class Backend:
    """An installed backend: its entry point, and the plugin module that the entry point names."""

    name: str
    entry_point: EntryPoint
    module: object

    @property
    def distribution(self) -> str:
        """Name and version of the distribution that provides it, for instance ``"genlm-hf
        0.1.0"``."""
        return distribution(self.entry_point)

    @property
    def _owner(self) -> str:
        return f"backend {self.name!r} ({self.distribution})"

    def info(self) -> BackendInfo:
        """The description that the backend gives of itself. Imports no engine."""
        hooks = self._hooks("genlm_backend_info")
        try:
            info = hooks.call("genlm_backend_info")
        except (Exception, SystemExit) as error:
            text = describe_error(error)
            raise PluginError(f"{self._owner}: genlm_backend_info raised {text}") from error
        if not isinstance(info, BackendInfo):
            raise PluginError(
                f"{self._owner}: genlm_backend_info returned {info!r}, no BackendInfo"
            )
        return info

    @property
    def verifies(self) -> bool:
        """Whether the backend can compare a loaded model's rows with those of another library."""
        return self._hooks("genlm_load").supports("genlm_load", "verify")

    def load(self, model: str, options: Mapping[str, object], verify: Any = None) -> Engine:
        """Load a model. Call it on the engine thread.

        Args:
            model, options: See :func:`genlm.core.hookspecs.genlm_load`.
            verify: See there; a backend that does not name this argument ignores it.

        Raises:
            BackendUnavailableError: the backend cannot run here.
            Exception: the engine's own error, with a note (:meth:`BaseException.add_note`) that
                names the backend and the model.
        """
        info = self.info()
        if not info.available:
            raise BackendUnavailableError(
                f"backend {self.name!r} cannot run on this machine: {info.unavailable}"
            )
        hooks = self._hooks("genlm_load")
        try:
            engine: Engine = hooks.call("genlm_load", model=model, options=options, verify=verify)
        except GenlmError:
            raise
        except Exception as error:
            # The engine's own error may say as little as KeyError: 'linnear'.
            error.add_note(f"while {self._owner} loaded {model!r}")
            raise
        return engine

    def _hooks(self, needed: str) -> HookCalls:
        hooks = HookCalls(self._owner, self.module)
        if not hooks.supports(needed):
            raise PluginError(
                f"{self._owner}: module {self.entry_point.value} has no hook {needed}; define it "
                "and mark it with @hookimpl"
            )
        return hooks


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
    return Backend(name, found[0], _loaded("backend", found[0]))


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


def installed_wrappers() -> list[object]:
    """The wrappers that installed distributions provide (entry-point group
    ``genlm.wrappers``)."""
    return [_loaded("wrapper", entry_point) for entry_point in entry_points(group=WRAPPERS)]


def distribution(entry_point: EntryPoint) -> str:
    """Name and version of the distribution of an entry point."""
    found = entry_point.dist
    return f"{found.name} {found.version}" if found else "unknown distribution"


def _loaded(kind: str, entry_point: EntryPoint) -> object:
    """Load an entry point's object; a class is instantiated. If this fails, the error names the
    distribution to blame."""
    try:
        found = entry_point.load()
        return found() if inspect.isclass(found) else found
    # A module that calls sys.exit must not end the whole program.
    except (Exception, SystemExit) as error:
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
