"""docs/architecture.md agrees with the code."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path

import pytest

from genlm.core import hookspecs

PAGE = (Path(__file__).parent.parent / "docs" / "architecture.md").read_text()
HOOKS = {name: hook for name, hook in vars(hookspecs).items() if name.startswith("genlm_")}


@pytest.mark.parametrize("name", sorted(HOOKS))
def test_every_hook_is_in_the_table_with_its_arguments(name: str) -> None:
    arguments = inspect.signature(HOOKS[name]).parameters
    said = re.search(rf"`{name}\((.*?)\)`", PAGE)
    assert said, f"{name} is missing from docs/architecture.md"
    assert set(arguments) <= set(re.findall(r"\w+", said[1]))


def test_every_module_of_the_layout_exists() -> None:
    table = PAGE.split("stands at the top:")[1].split("A file is one noun")[0]
    modules = re.findall(
        r"`([a-z]+)`",
        "".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `")),
    )
    assert len(modules) > 10
    assert [
        name for name in modules if importlib.util.find_spec(f"genlm.core.{name}") is None
    ] == []
