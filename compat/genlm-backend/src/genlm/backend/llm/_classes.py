"""The backends' classes, whether or not their distributions are installed."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any, NoReturn, Self

from genlm.core import AsyncLM, BackendUnavailableError
from genlm.core.installation import pip_install


def installed(module: str) -> bool:
    """Whether a module is installed. It is not imported."""
    return find_spec(module) is not None


def backend_class(backend: str, name: str) -> Any:
    """The class of a backend; where its plugin is not installed, one that says so when it is used.

    Either way ``isinstance(model, cls)`` can be asked.
    """
    if installed(f"genlm.{backend}"):
        return getattr(importlib.import_module(f"genlm.{backend}"), name)

    def refuse() -> NoReturn:
        remedy = pip_install(f"genlm-{backend}")
        raise BackendUnavailableError(f"{name} needs the plugin genlm-{backend}: {remedy}")

    class Absent(AsyncLM):
        def __init__(self, *arguments: object, **options: object) -> None:
            refuse()

        @classmethod
        def from_name(cls, *arguments: object, **options: object) -> Self:
            refuse()

    Absent.__name__ = Absent.__qualname__ = name
    Absent.__doc__ = f"{name}, whose plugin genlm-{backend} is not installed."
    return Absent
