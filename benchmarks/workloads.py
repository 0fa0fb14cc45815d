"""The workloads that there are, and what each declares. They are read, not imported: nox asks
before there is an environment."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
SIDES = ("floor", "ours", "theirs")


def workloads() -> list[str]:
    """The names of the workloads: the modules that have a side."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if sides_of(path.stem))


def sides_of(name: str) -> list[str]:
    functions = {one.name for one in module(name).body if isinstance(one, ast.FunctionDef)}
    return [side for side in SIDES if side in functions]


def title_of(name: str) -> str:
    """The heading, and the text below it."""
    return ast.get_docstring(module(name)) or name


def plugin_of(name: str) -> str:
    """The plugin in whose environment `ours` and `floor` run."""
    return str(constant(name, "PLUGIN") or "hf")


def peer_of(name: str) -> list[str] | None:
    """The further requirement of `theirs`, if it needs more than for hf."""
    peer: list[str] | None = constant(name, "PEER")
    return peer


def environment_of(name: str, side: str) -> str:
    """The label of the environment that a side runs in."""
    if side != "theirs":
        return plugin_of(name)
    return f"theirs-{plugin_of(name)}" if peer_of(name) else "theirs"


def constant(name: str, wanted: str) -> Any:
    for one in module(name).body:
        if isinstance(one, ast.Assign) and getattr(one.targets[0], "id", None) == wanted:
            return ast.literal_eval(one.value)
    return None


def module(name: str) -> ast.Module:
    return ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
