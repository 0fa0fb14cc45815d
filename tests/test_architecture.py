"""docs/architecture.md agrees with the code, and no modules import one another in a circle."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import os
import re
import tomllib
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from genlm.core import hookspecs

pytestmark = pytest.mark.any_version

TOP = Path(__file__).parent.parent
PAGE = (TOP / "docs" / "architecture.md").read_text()
HOOKS = {name: hook for name, hook in vars(hookspecs).items() if name.startswith("genlm_")}


@pytest.mark.parametrize("name", sorted(HOOKS))
def test_every_hook_is_in_the_table_with_its_arguments(name: str) -> None:
    arguments = inspect.signature(HOOKS[name]).parameters
    said = re.search(rf"`{name}\((.*?)\)`", PAGE)
    assert said, f"{name} is missing from docs/architecture.md"
    assert set(arguments) <= set(re.findall(r"\w+", said[1]))


def test_every_module_of_the_layout_exists() -> None:
    table = PAGE.split("`genlm.core` has modules for")[1].split("`genlm.kit` has")[0]
    modules = re.findall(
        r"`([a-z]+)`",
        "".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `")),
    )
    assert len(modules) > 10
    assert [
        name for name in modules if importlib.util.find_spec(f"genlm.core.{name}") is None
    ] == []


def test_private_modules_are_imported_in_the_core_alone() -> None:
    rows = re.findall(r"^\| (`.+?) \| internal\b", PAGE, re.MULTILINE)
    private = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert "runtime" in private
    files = [*TOP.glob("*/src/**/*.py"), *TOP.glob("plugins/*/src/**/*.py")]
    files += [*TOP.glob("compat/*/src/**/*.py"), *TOP.glob("examples/**/*.py")]
    core = TOP / "core"
    used = {
        f"{file.relative_to(TOP)}: {name}"
        for file in files
        if core not in file.parents
        for name in re.findall(r"genlm\.core(?:\.| import )(\w+)", file.read_text("utf-8"))
        if name in private
    }
    assert not used


@pytest.mark.parametrize(
    "page",
    [TOP / "core" / "ROW.md", *sorted(TOP.glob("plugins/*/ROW.md"))],
    ids=lambda page: page.parent.name,
)
def test_files_named_on_the_row_pages_exist(page: Path) -> None:
    """Files are named within their own distribution, or in the kit by their whole path."""
    (own,) = (page.parent / "src" / "genlm").iterdir()
    text = page.read_text(encoding="utf-8")
    files = re.findall(r"\b([a-z_]+(?:/[a-z_]+)*\.py)\b", text)
    assert len(files) > 4
    places = {
        name: TOP / "kit/src/genlm" / name if name[:4] == "kit/" else own / name for name in files
    }
    assert [name for name, place in places.items() if not place.is_file()] == []
    assert f"({os.path.relpath(page, TOP / 'docs')})" in PAGE
    assert len(text.splitlines()) <= 100, "two screens at most"


def test_every_plugin_has_a_page_of_one_row() -> None:
    plugins = {folder.name for folder in (TOP / "plugins").iterdir() if folder.is_dir()}
    assert {page.parent.name for page in TOP.glob("plugins/*/ROW.md")} == plugins


def modules_below(package: Path) -> dict[str, Path]:
    """The modules of a package, by name."""
    return {
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for path in package.rglob("*.py")
    }


def imports_of(path: Path, modules: Mapping[str, Path]) -> set[str]:
    """The modules that a file imports anywhere, also for type checkers alone."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} imports relatively: name the module in full"
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= members & modules.keys()
            if members - modules.keys():
                found.add(str(node.module))
    return found & modules.keys()


@pytest.mark.parametrize(
    "package",
    [
        TOP / "benchmarks",
        *sorted(TOP.glob("*/src/genlm")),
        *sorted(TOP.glob("plugins/*/src/genlm")),
    ],
    ids=lambda package: str(package.relative_to(TOP)),
)
def test_no_modules_import_one_another_in_a_circle(package: Path) -> None:
    modules = modules_below(package)
    graph = {name: imports_of(path, modules) for name, path in modules.items()}
    assert any(graph.values())
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as circle:
        pytest.fail(f"a circle of imports: {' <- '.join(circle.args[1])}")


def test_the_trie_knows_no_model() -> None:
    modules = modules_below(TOP / "core" / "src" / "genlm")
    of_a_model = {f"genlm.core.{name}" for name in ("adapters", "context", "lm", "rows", "types")}
    trie = [path for name, path in modules.items() if name.startswith("genlm.core.trie.")]
    assert len(trie) > 5
    assert not {name for path in trie for name in imports_of(path, modules)} & of_a_model


#: For each row of the page on choosing, the hooks or arguments of a step that provide it.
NATIVE = {
    "requests join between steps": {"genlm_step"},
    "native sampling": {"genlm_sample", "samples"},
    "native scoring": {"genlm_sequence_logprobs", "scores"},
    "LoRA, mixed in a batch": {"genlm_add_lora"},
    "pinned prompts": {"genlm_cache_prefix"},
}


@functools.cache
def implemented(package: Path) -> set[str]:
    """The hooks that a backend's modules define, and the arguments of its ``genlm_step``."""
    found: set[str] = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name in HOOKS:
                found.add(node.name)
                if node.name == "genlm_step":
                    found |= {argument.arg for argument in node.args.args}
    return found


def test_the_page_on_choosing_says_what_each_backend_implements() -> None:
    page = (TOP / "docs" / "how-to" / "choosing.md").read_text(encoding="utf-8")
    table = page.split("What each backend implements natively:")[1].split("\n\n")[1]
    head, _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()
    )
    assert {row[0] for row in rows} == NATIVE.keys()
    for name, *cells in rows:
        # The last column is the mock.
        for backend, cell in zip(head[1:-1], cells[:-1], strict=True):
            has = bool(NATIVE[name] & implemented(TOP / "plugins" / f"genlm-{backend}" / "src"))
            assert (cell != "no") == has, f"{name}: {backend} is said to be {cell!r}"


def test_workflows_run_existing_sessions_for_every_python_and_plugin() -> None:
    said = "".join(file.read_text() for file in (TOP / ".github" / "workflows").glob("*.yml"))
    tasks = {
        node.name.replace("_", "-")
        for node in ast.parse((TOP / "noxfile.py").read_text()).body
        if isinstance(node, ast.FunctionDef) and node.decorator_list
    }
    run = [word.strip('"') for line in re.findall(r"nox .*-s (.+)", said) for word in line.split()]
    # Removes parameters, as in tests-${PYTHON} and plugin(${PLUGIN}).
    run = [re.split(r"-\$|\(\$", name)[0] for name in run]
    listed = re.findall(r"^ +- ([a-z]+)(?:\(\w+\))?$", said, re.MULTILINE)  # the tasks of a matrix
    run = [*(name for name in run if not name.startswith("$")), *listed]
    assert {"lint", "types", "tests", "plugin", "minimums", "docs", "release-check"} <= {*run}
    assert {*run} <= tasks
    project = tomllib.loads((TOP / "core" / "pyproject.toml").read_text())["project"]
    stated = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    (matrix,) = re.findall(r"python: \[(.+)\]", said)
    assert {*stated} <= {*re.findall(r"3\.\d+", matrix)}
    plugins = {folder.name.removeprefix("genlm-") for folder in (TOP / "plugins").glob("genlm-*")}
    assert {*re.findall(r"plugin: (\w+)", said)} == plugins


def test_picture_of_a_request_names_files_that_exist() -> None:
    picture = (TOP / "docs/assets/request.svg").read_text("utf-8")
    files = re.findall(r">([\w/]+\.py)<", picture)
    assert len(files) == 8
    missing = [file for file in files if not (TOP / "core/src/genlm/core" / file).exists()]
    assert not missing
