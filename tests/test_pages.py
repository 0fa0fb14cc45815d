"""Every block of code on a page runs as it is shown: what it names stands before it on the page.
Links lead to files, and the backend of the README conforms.

Run here, over the mock, is every page that nothing else runs. The project's README, tutorials and
the pages that show a real model's answers are run over that model, the README of a plugin over its
engine, and the page on plugins shows code that is a plugin's own.
"""

from __future__ import annotations

import ast
import builtins
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest
import structlog

from genlm.core import AsyncLM
from genlm.core.options import CoreOptions
from tests.pages import FENCED, parsed, run_page
from tools.entry_points import write_metadata

ROOT = Path(__file__).parents[1]
RUN_ELSEWHERE = ("docs/index.md", "docs/start.md", "docs/writing-a-plugin.md")
PAGES = [page for page in (ROOT / "docs").glob("**/*.md") if FENCED.search(page.read_text("utf-8"))]


def names(block: str) -> tuple[set[str], set[str]]:
    """The names that a block binds anywhere, and the names that it reads."""
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
def test_names_of_a_block_are_bound_before_it(page: Path) -> None:
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
    """Every model that a page loads is the mock, and it writes into a temporary folder."""
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
    text = re.sub(r"\b7042\b", "70", page.read_text("utf-8"))  # an id that the mock has too
    run_page(page, text)


# --- links ----------------------------------------------------------------------------------------

#: Pages that are also read on GitHub, where their links point to files of the repository.
ON_GITHUB = [
    page
    for pattern in ("*.md", "*/README.md", "*/*/README.md", "docs/**/*.md", ".github/**/*.md")
    for page in ROOT.glob(pattern)
    if not any(part in (".nox", ".venv", "build") for part in page.relative_to(ROOT).parts)
]
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = HEADING.findall(CODE.sub("", page.read_text("utf-8")))
    texts = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in texts}


@pytest.mark.any_version
@pytest.mark.parametrize("page", ON_GITHUB, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    text = CODE.sub("", page.read_text("utf-8"))
    links = [(link, anchor) for link, anchor in LINK.findall(text) if ":" not in link]
    missing = [link for link, _ in links if not (page.parent / link).exists()]
    assert not missing
    lost = [
        f"{link}#{anchor}"
        for link, anchor in links
        if anchor
        and (link or page.name).endswith(".md")
        and anchor not in anchors(page.parent / link if link else page)
    ]
    assert not lost


PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+\.svg)\)")
PICTURES = [
    (page, *found) for page in ON_GITHUB for found in PICTURE.findall(page.read_text("utf-8"))
]


@pytest.mark.any_version
@pytest.mark.parametrize(("page", "text", "file"), PICTURES)
def test_picture_is_svg_and_has_a_text_alternative(page: Path, text: str, file: str) -> None:
    assert len(text.split()) > 10, "say what a reader would see"
    assert ElementTree.parse(page.parent / file).getroot().tag.endswith("svg")


# --- options --------------------------------------------------------------------------------------


def accepted_options(source: Path) -> set[str]:
    """The options that a backend accepts: the fields of its class of options, or ``OPTIONS``."""
    names: set[str] = set()
    for node in ast.parse(source.read_text("utf-8")).body:
        match node:
            case ast.ClassDef(name="Options" | "HFOptions" | "RayOptions" | "CoreOptions"):
                names |= {ast.unparse(f.target) for f in node.body if isinstance(f, ast.AnnAssign)}
            case ast.Assign(targets=[ast.Name(id="OPTIONS")], value=value):
                names |= set(ast.literal_eval(value))
    return names


SOURCES_OF_OPTIONS = {
    "every": ROOT / "core/src/genlm/core/options.py",
    **{file.parent.name: file for file in ROOT.glob("plugins/genlm-*/src/genlm/*/options.py")},
}


@pytest.mark.any_version
@pytest.mark.parametrize("backend", SOURCES_OF_OPTIONS)
def test_table_has_every_option_of_a_backend(backend: str) -> None:
    page = (ROOT / "docs/reference/options.md").read_text("utf-8")
    listed = set(re.findall(rf"^\| `?{backend}`? \| `(\w+)` \|", page, re.MULTILINE))
    assert listed == accepted_options(SOURCES_OF_OPTIONS[backend]) != set()


# --- the backend of the README --------------------------------------------------------------------


def block(before: str, language: str) -> str:
    """The first code block of the README after a text."""
    readme = (ROOT / "README.md").read_text("utf-8")
    found = re.search(rf"{re.escape(before)}.*?```{language}\n(.*?)```", readme, re.DOTALL)
    assert found, f"the README has no {language} block after {before!r}"
    return found[1]


@pytest.mark.any_version
def test_the_backend_of_the_readme_conforms(tmp_path: Path) -> None:
    project = tomllib.loads(block("Its `pyproject.toml` names the module", "toml"))["project"]
    ((name, module),) = project["entry-points"]["genlm.backends"].items()
    package, file = module.split(".")
    (tmp_path / package).mkdir()
    (tmp_path / package / f"{file}.py").write_text(block(f"file: {package}/{file}.py", "python"))
    write_metadata(tmp_path, project["name"], project["version"], project["entry-points"])
    command = "import sys; from genlm.core.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", command, "conformance", name, "--model", "any", "--quick"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{name} conforms" in done.stdout
