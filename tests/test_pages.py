"""Every block of code on a page runs as it is shown: what it names stands before it on the page.

Run here, over the mock, is every page that nothing else runs. The project's README, tutorials and
the pages that show a real model's answers are run over that model, the README of a plugin over its
engine, and the page on plugins shows code that is a plugin's own.
"""

from __future__ import annotations

import ast
import builtins
import re
from pathlib import Path

import pytest
import structlog

from genlm.core import AsyncLM
from genlm.core.options import CoreOptions
from tests.pages import FENCED, parsed, run_page

ROOT = Path(__file__).parents[1]
RUN_ELSEWHERE = ("docs/index.md", "docs/start.md", "docs/writing-a-plugin.md")
PAGES = [page for page in (ROOT / "docs").glob("**/*.md") if FENCED.search(page.read_text("utf-8"))]


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


READMES = [*ROOT.glob("co*/README.md"), *ROOT.glob("plugins/*/README.md")]


@pytest.mark.parametrize(
    "page", [*PAGES, *READMES], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_what_a_block_names_stands_before_it(page: Path) -> None:
    known = {*vars(builtins)}
    for block in FENCED.findall(page.read_text("utf-8")):
        bound, read = names(block)
        known |= bound
        assert read <= known, block


RUN_HERE = [
    page
    for page in (*PAGES, *ROOT.glob("co*/README.md"))
    if page.relative_to(ROOT).as_posix() not in RUN_ELSEWHERE and page.parent.name != "tutorials"
]


@pytest.fixture
def mocks(monkeypatch, tmp_path):
    """Whatever a page loads is the mock, and what it writes is in a folder that goes."""
    load = AsyncLM.from_backend.__func__
    loaded = []

    def from_backend(cls, backend, name, options):
        core, _ = CoreOptions.split(options)
        loaded.append(load(cls, "mock", "mock", {"wrappers": core.get("wrappers", ())}))
        return loaded[-1]

    monkeypatch.setattr(AsyncLM, "from_backend", classmethod(from_backend))
    monkeypatch.chdir(tmp_path)
    yield
    for lm in loaded:
        lm.close()
    structlog.reset_defaults()


@pytest.mark.usefixtures("mocks")
@pytest.mark.parametrize("page", RUN_HERE, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_blocks_of_a_page_run(page: Path) -> None:
    text = re.sub(r"\b7042\b", "70", page.read_text("utf-8"))  # an id that the mock has as well
    run_page(page, text)
