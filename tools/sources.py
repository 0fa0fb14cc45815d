"""The modules, classes and functions of the sources, with their docstrings, read by griffe."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [*ROOT.glob("*/src"), *ROOT.glob("plugins/*/src")]


@functools.cache
def found(name: str) -> Any:
    """The object of a name: a module, class or function, with its docstring."""
    loaded: Any = _modules()[name]
    while loaded.is_alias:
        loaded = loaded.final_target
    return loaded


@functools.cache
def _modules() -> Any:
    """All modules of ``genlm``, by their names.

    They are read once: ``GriffeLoader.load`` of one name reads the whole package again.
    """
    # A description of the result is one text: its lines are not items, and a word before a colon is
    # not a name.
    whole: Any = {"returns_multiple_items": False, "returns_named_value": False}
    loader = griffe.GriffeLoader(
        search_paths=SOURCES, docstring_parser=griffe.Parser.google, docstring_options=whole
    )
    loader.load("genlm")
    return loader.modules_collection
