"""The backends' classes, whether or not their distributions are installed."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any, Self

from genlm.core import AsyncLM, BackendUnavailableError


def installed(module: str) -> bool:
    """Whether a module is there; it is not imported."""
    return find_spec(module) is not None


def backend_class(backend: str, name: str) -> Any:
    """The class of a backend; where its plugin is not installed, one that says so when it is used.

    Either way ``isinstance(model, cls)`` can be asked.
    """
    if installed(f"genlm.{backend}"):
        return getattr(importlib.import_module(f"genlm.{backend}"), name)
    remedy = f"{name} needs the plugin genlm-{backend}: pip install 'genlm-backend[{backend}]'"

    class Absent(AsyncLM):
        def __init__(self, *arguments: object, **options: object) -> None:
            raise BackendUnavailableError(remedy)

        @classmethod
        def from_name(cls, *arguments: object, **options: object) -> Self:
            raise BackendUnavailableError(remedy)

    Absent.__name__ = Absent.__qualname__ = name
    Absent.__doc__ = f"{name}, whose plugin genlm-{backend} is not installed."
    return Absent
