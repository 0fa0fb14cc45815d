"""The options that every backend has, checked once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from attrs import fields, frozen

from genlm.core.cache import OutputCache
from genlm.core.checks import flag, integer, number, safe_repr
from genlm.core.errors import InvalidOptionError, PluginError
from genlm.core.hints import nearest

CACHE_OPTIONS = ("maxsize", "max_bytes", "move_to_cpu")

#: The values that turn off an option in the environment.
OFF = ("", "0", "false", "no", "off")


@frozen
class CoreOptions:
    """Options of the core.

    Attributes:
        batch_size: The most requests in one batch, or in flight; ``None`` means no limit.
        timeout: Seconds to hold a batch open for more requests; 0 does not wait. This is not a time
            limit for requests: use ``asyncio.wait_for``.
        cache_size: The most rows in the output cache; 0 turns it off; ``None`` means
            ``cache_opts["maxsize"]``.
        cache_opts: ``maxsize`` (rows, default 1000), ``max_bytes`` (default 512 MiB),
            ``move_to_cpu`` (default false).
        check: Whether every result of the engine is checked against the contract. With ``True``, a
            result that breaks it raises its :class:`~genlm.core.errors.PluginError`, and errors of
            the engine keep the local variables of its calls, for a debugger. A function gets the
            error instead, on the engine thread (on any thread, if ``genlm_wake`` raises).
            ``None`` follows the environment (``GENLM_CHECK=1``), and otherwise checks the values
            of the first rows and scores. ``False`` checks no values.
        verify: Whether a model's rows are compared, when it is loaded, with the rows of the library
            that its folder is made for. With ``True``, a model whose rows differ by more than
            rounding is rejected; a function gets the report instead. ``None`` follows the
            environment (``GENLM_VERIFY=1`` or ``0``), and otherwise the backend decides.
            See also the command ``genlm verify``.
        wrappers: Objects whose hooks change rows (``genlm_process_logprobs``) or observe the
            engine's calls (``genlm_call_begins``, ``genlm_call_ended``); see
            :mod:`genlm.core.hookspecs`.
    """

    batch_size: int | None = None
    timeout: float = 0.0
    cache_size: int | None = None
    cache_opts: Mapping[str, Any] | None = None
    check: bool | Callable[[PluginError], None] | None = None
    verify: bool | Callable[[Any], None] | None = None
    wrappers: Sequence[object] = ()

    @staticmethod
    def split(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Split a user's options into the core's and the engine's."""
        core = {name: value for name, value in options.items() if name in CORE}
        return core, {name: value for name, value in options.items() if name not in CORE}

    def __attrs_post_init__(self) -> None:
        integer("batch_size", self.batch_size, least=1, optional=True)
        integer("cache_size", self.cache_size, least=0, optional=True)
        if not callable(self.check):
            flag("check", self.check)
        if not callable(self.verify):
            flag("verify", self.verify)
        number(
            "timeout",
            self.timeout,
            f"of at least 0 and at most {threading.TIMEOUT_MAX:.0f} (seconds)",
            lambda seconds: 0 <= seconds <= threading.TIMEOUT_MAX,
        )
        self._check_wrappers()
        self._check_cache_opts()

    def _check_wrappers(self) -> None:
        if not isinstance(self.wrappers, Sequence) or isinstance(self.wrappers, str | bytes):
            raise InvalidOptionError(
                f"wrappers must be a list of objects, [] for none; got {safe_repr(self.wrappers)}"
            )
        for wrapper in self.wrappers:
            if isinstance(wrapper, type):
                raise InvalidOptionError(
                    f"the wrapper {wrapper.__name__} is a class; give an instance of it"
                )

    def _check_cache_opts(self) -> None:
        given = self.cache_opts
        if given is None:
            return
        if not isinstance(given, Mapping):
            raise InvalidOptionError(
                f"cache_opts must be a dict of {', '.join(CACHE_OPTIONS)}; got {safe_repr(given)}"
            )
        unknown = [str(name) for name in given if name not in CACHE_OPTIONS]
        if unknown:
            raise InvalidOptionError(
                f"cache_opts has no {', '.join(unknown)}; it has {', '.join(CACHE_OPTIONS)}"
            )
        for name in ("maxsize", "max_bytes"):
            integer(f"cache_opts[{name!r}]", given.get(name), least=0, optional=True)
        flag("cache_opts['move_to_cpu']", given.get("move_to_cpu"))
        if self.cache_size is not None and given.get("maxsize", self.cache_size) != self.cache_size:
            raise InvalidOptionError(
                f"cache_size={self.cache_size} contradicts "
                f"cache_opts['maxsize']={given['maxsize']}; give one of them"
            )

    def output_cache(self) -> OutputCache:
        """Build the output cache."""
        given = dict(self.cache_opts or {})
        if self.cache_size is not None:
            given["maxsize"] = self.cache_size
        return OutputCache(**given)

    @property
    def keeps_frames(self) -> bool:
        """Whether errors keep the local variables of the calls that they ended."""
        return self.violated is _raise

    @property
    def verification(self) -> bool | Callable[[Any], None] | None:
        """Whether the model is verified, as the user or the environment wants it."""
        environment = os.environ.get("GENLM_VERIFY")
        if self.verify is not None or environment is None:
            return self.verify
        return environment.lower() not in OFF

    @property
    def violated(self) -> Callable[[PluginError], None] | None:
        """The function that gets violations of the contract, if the user or the environment wants
        results checked; otherwise ``None``."""
        if callable(self.check):
            return self.check
        environment = os.environ.get("GENLM_CHECK", "")
        wanted = environment.lower() not in OFF if self.check is None else self.check
        return _raise if wanted else None


#: The names of the core's options.
CORE = [attribute.name for attribute in fields(CoreOptions)]


def _raise(violation: PluginError) -> None:
    raise violation


def refuse_unknown(
    backend: str,
    options: Iterable[str],
    own: Iterable[str] = (),
    elsewhere: Mapping[str, str] | None = None,
    others: str = "",
) -> None:
    """Reject options that a backend does not have.

    Args:
        backend: The backend's name.
        options: The names that it was given, without the core's.
        own: The names of its own options, besides those of every backend.
        elsewhere: What to do with names that are none of its options, but that people know from its
            engine or another one: ``{"revision": "give it in hf_opts"}``.
        others: A sentence for the end of the message, on names that are in none of these.

    Raises:
        InvalidOptionError: it names the unknown ones, what may have been meant, and all that there
            are.
    """
    own = list(own)
    unknown = [str(name) for name in options if name not in own]
    if not unknown:
        return
    for name in unknown:
        if name in (elsewhere or {}):
            raise InvalidOptionError(
                f"backend {backend!r} has no option {name} of its own; {(elsewhere or {})[name]}"
            )
    meant = [near for name in unknown if (near := nearest(name, [*own, *CORE]))]
    hint = f" (did you mean {', '.join(meant)}?)" if meant else ""
    ours = f"it has {', '.join(own)}; " if own else ""
    raise InvalidOptionError(
        f"backend {backend!r} has no option {', '.join(unknown)}{hint}; {ours}every backend has "
        f"{', '.join(CORE)}{others and f'; {others}'}"
    )


def unknown_argument(engine: str, what: str, name: str, known: Iterable[str]) -> InvalidOptionError:
    """The error for an argument that would be passed to an engine, and that the engine lacks."""
    near = nearest(name, known)
    remedy = (
        f"did you mean {near!r}?"
        if near
        else "see its documentation for those of the installed version"
    )
    return InvalidOptionError(f"{engine} has no {what} {name!r}; {remedy}")
