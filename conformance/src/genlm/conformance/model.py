"""The life of a model: it is loaded, brought to a clean state, and closed."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import pytest

from genlm.conformance.compare import Violation
from genlm.conformance.declaration import Declaration
from genlm.conformance.driver import Awaited, Driver
from genlm.conformance.gate import EngineGate
from genlm.conformance.settings import Settings
from genlm.core.errors import BackendNotFoundError, EngineDeadError
from genlm.core.lm import AsyncLM
from genlm.core.plugins import Backend, find_backend
from genlm.kit.kv import history

#: How long a model may take to load, in units of the patience.
LOADING_PATIENCES = 10

#: The most seconds that an interpreter needs to start and look at a backend, on any machine.
IMPORT_SECONDS = 60.0

#: How many times a model whose engine has died is loaded again, for the clause after.
MAX_RELOADS = 3


class Model:
    """A model that is loaded when first needed, and again if a clause has closed it or its engine
    has died.

    Args:
        suite: Which one, and how it is loaded.
        driver: Waits for what may hang.
    """

    def __init__(self, suite: Declaration, driver: Driver) -> None:
        self.suite = suite
        self.gate = EngineGate(driver)
        #: The paths of the given adapters, and of those that are bound now, by name.
        self.adapters = {name: os.fspath(path) for name, path in suite.adapters.items()}
        self.bound: dict[str, str] = {}
        #: The part of a message on the contexts that were asked together last.
        self.together = ""
        #: Whether the model has been reset in this clause.
        self.is_clean = False
        #: The last commands to the engine's key/value state, where genlm-kit plans it here.
        self.commands = history.keep()
        #: The settings of the process when this object was made.
        self._settings = Settings.now()
        self._driver = driver
        self._lm: AsyncLM | None = None
        self._broken: Exception | None = None
        self._deaths = 0

    @property
    def lm(self) -> AsyncLM:
        """The model itself, in a clean state the first time that a clause asks for it."""
        if self._lm is None:
            self._lm = self._load()
        if not self.is_clean:
            self.is_clean = True
            try:
                self.reset()
            except EngineDeadError:
                # It may have died in an earlier clause that did not see it.
                if self._deaths < MAX_RELOADS:
                    self._deaths += 1
                    self.end()
                raise
        return self._lm

    def _load(self) -> AsyncLM:
        if self._broken is not None:
            pytest.skip(
                f"the model could not be loaded: {type(self._broken).__name__}; see the first "
                "failure"
            )
        try:
            # A suite that overrides load() may test a model without a registered backend.
            with suppress(BackendNotFoundError):
                imported(self.suite.backend, self._driver)
            seen: Any = {"wrappers": [self.gate], "check": self.gate.violations.append}
            lm = self.loaded(lambda: self.suite.load(**seen))
        except Exception as error:
            self._broken = error
            raise
        self.bound.clear()
        return lm

    def loaded(self, load: Callable[[], AsyncLM]) -> AsyncLM:
        """The model that ``load`` returns, within ten times the patience. If a blocking call of the
        model hangs, it ends in a violation."""
        lm = self._driver.wait(
            self._driver.thread(load), "loading the model", times=LOADING_PATIENCES
        )
        return cast(AsyncLM, Awaited(lm, self._driver))

    def told(self) -> str:
        """The events before a failure, as the end of a message."""
        return self._driver.told()

    @property
    def changed_settings(self) -> list[str]:
        """The changes in the process since the model was first loaded."""
        return Settings.now().changes(self._settings)

    @property
    def rows(self) -> int:
        """How many rows it has computed; 0 where none is open."""
        return self._lm.stats.rows if self._lm is not None else 0

    @property
    def ids(self) -> int:
        """How many token ids it has; its tokenizer may have more, or fewer."""
        return self.lm.context([0]).vocab_size

    def reset(self) -> None:
        """Bring it to the state that every example begins in: caches empty, the given adapters
        bound."""
        self.gate.reset()
        self.together = ""
        self.lm.clear_lora()
        if self.lm.supports("genlm_add_lora"):
            for name in sorted(self.bound.keys() - self.adapters.keys()):
                self.remove(name)
            for name, path in self.adapters.items():
                if self.bound.get(name) != path:
                    self.bind(name, name)
        self.clear()
        self._driver.story.clear()

    def clear(self) -> None:
        """Clear the rows and the key/value state."""
        self.lm.clear_cache()
        self.lm.clear_kv_cache()
        self.gate.look_back()  # Rows that the suite keeps would look like the engine's.
        self.commands.clear()

    def bind(self, name: str, to: str) -> None:
        """Bind a name to the files of a given adapter, by its name, or to those at a path."""
        path = self.adapters.get(to, to)
        self.lm.add_new_lora(path, name)
        self.bound[name] = path

    def remove(self, name: str) -> None:
        """Remove an adapter."""
        # The entry goes first: if the engine raises, the core has forgotten the name all the same.
        del self.bound[name]
        self.lm.remove_lora(name)

    def path_of(self, name: str | None) -> str | None:
        """The path of the adapter that a name stands for now."""
        return None if name is None else self.bound[name]

    def end(self, closed: bool = False) -> None:
        """Close it if it is open, unless it is ``closed`` already. A clause that needs one loads it
        again."""
        self.gate.reset()
        if self._lm is not None and not closed:
            # A failure to close has a clause of its own, and must not hide what was found before.
            with suppress(Violation):
                self._lm.close()
        self._lm = None


def imported(backend: str, driver: Driver) -> Backend:
    """A backend by its name, whose module may take :data:`IMPORT_SECONDS` to import."""
    what = f"importing the plugin module of {backend!r}"
    times = max(1.0, IMPORT_SECONDS / driver.patience)
    return driver.wait(driver.thread(lambda: find_backend(backend)), what, times)
