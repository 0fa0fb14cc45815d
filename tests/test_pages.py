"""Every block of code on a page runs as it is shown: what it names stands before it on the page."""

from __future__ import annotations

import ast
import builtins
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FENCED = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [page for page in (ROOT / "docs").glob("**/*.md") if FENCED.search(page.read_text("utf-8"))]


def parsed(block: str) -> ast.Module:
    """A block as a module; one that is the part of a class, as that class."""
    block = block + "    ...\n" if block.rstrip().endswith(":") else block
    return ast.parse("class Part:\n" + block if block.startswith("    ") else block)


def names(block: str) -> tuple[set[str], set[str]]:
    """The names that a block binds anywhere, and those that it reads."""
    bound: set[str] = set()
    read: set[str] = set()
    for node in ast.walk(parsed(block)):
        match node:
            case ast.Name(id=name):
                (read if isinstance(node.ctx, ast.Load) else bound).add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                bound.add(name)
            case ast.ClassDef(name=name) | ast.arg(arg=name) | ast.MatchAs(name=str(name)):
                bound.add(name)
            case ast.alias(name=name, asname=asname):
                bound.add(asname or name.partition(".")[0])
            case ast.ExceptHandler(name=str(name)):
                bound.add(name)
    return bound, read


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_block_names_stands_before_it(page: Path) -> None:
    known = {*vars(builtins)}
    for block in FENCED.findall(page.read_text("utf-8")):
        bound, read = names(block)
        known |= bound
        assert read <= known, block
