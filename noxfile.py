"""The tasks of this repository, each in an environment of its own. ``nox --list`` shows them.

Only nox must be installed (``python -m pip install nox``). A plugin's environment follows from its
``pyproject.toml``. A plugin whose engine needs other steps lists them in ``environment.txt``, so
this file knows no engine.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import nox
from packaging.markers import Marker
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from tools import smollm2  # noqa: E402

CORE = ROOT / "core"
PLUGINS = {
    folder.parent.name.removeprefix("genlm-"): folder.parent
    for folder in ROOT.glob("plugins/*/pyproject.toml")
}
GROUPS = nox.project.load_toml(ROOT / "pyproject.toml")["dependency-groups"]
PEER = "genlm-backend==0.3.1"

nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True

each_plugin = nox.parametrize("name", [nox.param(name, id=name) for name in sorted(PLUGINS)])


# --------------------------------------------------------------------------------------------------
# What a newcomer runs
# --------------------------------------------------------------------------------------------------


@nox.session(default=False)
def demo(session: nox.Session) -> None:
    """Sequential Monte Carlo on a real model: nox -s demo -- --prompt "Once upon a time"
    --particles 64."""
    prepare(session)
    install_plugin(session, "hf")
    model = [] if "mock" in session.posargs else ["--model", real_model(session)]
    session.run("python", "examples/smc.py", *model, *session.posargs)


# --------------------------------------------------------------------------------------------------
# What every change must pass: plain `nox`. Arguments after `--` go to the tool.
# --------------------------------------------------------------------------------------------------


@nox.session
def lint(session: nox.Session) -> None:
    """Rules and formatting, by ruff."""
    prepare(session)
    session.install(*GROUPS["lint"])
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check")


@nox.session
def types(session: nox.Session) -> None:
    """Strict types, by mypy, for everything but the tests. No engine is needed."""
    prepare(session)
    session.install("--editable", "core[conformance]", *GROUPS["types"])
    sources = [str(folder / "src") for folder in (CORE, *PLUGINS.values())]
    session.env["MYPYPATH"] = os.pathsep.join(sources)
    session.run("mypy", *sources, "examples", "tools", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Tests of the core, the mock, the conformance suite and the contents of the wheels."""
    prepare(session)
    session.install("--editable", with_extras(CORE), *GROUPS["test"])
    session.env["GENLM_TEST_MODEL"] = real_model(session)
    session.run("pytest", "tests", *session.posargs)


@nox.session
@each_plugin
def plugin(session: nox.Session, name: str) -> None:
    """A plugin's own tests and its conformance, on its real engine."""
    check_plugin(session, name, PLUGINS[name] / "tests")


@nox.session(default=False)
@each_plugin
def conformance(session: nox.Session, name: str) -> None:
    """Only the conformance tests of a plugin."""
    check_plugin(session, name, PLUGINS[name] / "tests" / "test_conformance.py")


@nox.session(default=False)
@each_plugin
def lowest(session: nox.Session, name: str) -> None:
    """A plugin's tests on the lowest version of its engine, by ``environment-lowest.txt`` in its
    folder."""
    if not (PLUGINS[name] / "environment-lowest.txt").exists():
        session.skip(
            f"genlm-{name} has no environment-lowest.txt; `minimums` runs hf on its lowest versions"
        )
    check_plugin(session, name, PLUGINS[name] / "tests", "environment-lowest.txt")


@nox.session(default=False)
@each_plugin
def costly(session: nox.Session, name: str) -> None:
    """The slow tests of a plugin, such as those with several engine processes; one process for
    each file."""
    files = sorted((PLUGINS[name] / "tests").glob("costly_*.py"))
    if not files:
        session.skip(f"genlm-{name} has no costly tests")
    for file in files:
        check_plugin(session, name, file)


def check_plugin(
    session: nox.Session, name: str, tests: Path, recipe: str = "environment.txt"
) -> None:
    """Run tests of a plugin, unless its ``pyproject.toml`` says that it does not run on this
    machine."""
    prepare(session)
    where = (
        nox.project.load_toml(PLUGINS[name] / "pyproject.toml")
        .get("tool", {})
        .get("genlm", {})
        .get("runs-on")
    )
    if where and not Marker(where).evaluate():
        session.skip(f"genlm-{name} is tested where {where}; this machine is different")
    install_plugin(session, name, recipe)
    session.env["GENLM_TEST_MODEL"] = real_model(session)
    session.run("pytest", str(tests), *session.posargs)


@nox.session
def minimums(session: nox.Session) -> None:
    """Tests of the core and hf on the lowest versions that they declare.

    The versions in constraints.txt stay: old CPU builds of PyTorch are not on PyPI.
    """
    constraints = Path(session.create_tmp()).resolve() / "lowest.txt"
    constraints.write_text("\n".join(lowest_versions(CORE, PLUGINS["hf"])))
    prepare(session, constraints)
    session.install(
        "--editable", with_extras(CORE), "--editable", with_extras(PLUGINS["hf"]), *GROUPS["test"]
    )
    session.env["GENLM_TEST_MODEL"] = real_model(session)
    session.run("pytest", "tests", str(PLUGINS["hf"] / "tests"), *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation site, strictly, and a look at it in a browser: nox -s docs -- --only smc.

    Arguments go to ``tools/site.py``. The site is in ``build/site``, pictures of it are in
    ``build/screenshots``.
    """
    prepare(session)
    install_plugin(session, "hf")
    session.install(*GROUPS["docs"])
    session.env["GENLM_TEST_MODEL"] = model = real_model(session)
    session.run("python", "-m", "tools.site", "--model", model, *session.posargs)
    session.run("zensical", "build", "--strict", "--clean")
    screenshots = ROOT / "build" / "screenshots"
    screenshots.mkdir(parents=True, exist_ok=True)
    session.env |= {
        "GENLM_SITE": str(ROOT / "build" / "site"),
        "GENLM_SCREENSHOTS": str(screenshots),
    }
    session.run("pytest", "tests/site/browser.py", "tests/site/test_programs.py")


@nox.session(reuse_venv=False)
def wheels(session: nox.Session) -> None:
    """Build every wheel, install them in an empty environment, and run the demo on the mock."""
    prepare(session)
    built = Path(session.create_tmp())
    for old in built.glob("*.whl"):
        old.unlink()
    folders = [str(folder) for folder in (CORE, *PLUGINS.values())]
    session.run(
        "python",
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--wheel-dir",
        str(built),
        *folders,
        silent=True,
    )
    core, *others = (str(wheel) for wheel in sorted(built.glob("*.whl")))
    session.install(core)
    # Without their engines: listing the backends must not need them.
    session.install("--no-deps", *others)
    session.run("genlm", "backends")
    session.run("python", "examples/smc.py", "--backend", "mock", *session.posargs)


# --------------------------------------------------------------------------------------------------
# Figures
# --------------------------------------------------------------------------------------------------


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Benchmarks beside genlm-backend on the same model: nox -s bench -- --quick, or by name:
    nox -s bench -- trie."""
    prepare(session)
    install_plugin(session, "hf")
    session.install(*GROUPS["bench"])
    environments = {"hf": str(Path(session.bin).resolve() / "python")}
    environments["theirs"] = further_environment(
        session, "theirs", [["pip", "install", "torch", PEER]]
    )
    for said in constants_of_workloads(session.posargs):
        name = said.get("PLUGIN", "hf")
        if name not in environments:
            environments[name] = further_environment(session, name, plugin_steps(name))
        if "PEER" in said and f"theirs-{name}" not in environments:
            steps = [["pip", "install", "torch"], ["pip", "install", *said["PEER"]]]
            environments[f"theirs-{name}"] = further_environment(session, f"theirs-{name}", steps)
    pythons = [f"--python={name}={python}" for name, python in sorted(environments.items())]
    session.run(
        "python", "-m", "benchmarks", "--model", real_model(session), *pythons, *session.posargs
    )


def constants_of_workloads(names: list[str]) -> list[dict[str, Any]]:
    """The environments that the named workloads declare, one constant a line.

    ``PLUGIN = "hf"`` is the environment of `ours` and `floor`. ``PEER = [...]`` is what `theirs`
    installs instead of what it needs for hf.
    """
    modules = [ROOT / "benchmarks" / f"{name}.py" for name in names]
    found = [
        re.findall(r"^(PLUGIN|PEER) = (.+)$", module.read_text(), re.MULTILINE)
        for module in modules
        if module.exists()
    ]
    return [{name: ast.literal_eval(value) for name, value in constants} for constants in found]


# --------------------------------------------------------------------------------------------------
# Environments
# --------------------------------------------------------------------------------------------------


def prepare(session: nox.Session, constraints: Path = ROOT / "constraints.txt") -> None:
    """Set the versions that pip may install, and the number of threads.

    One thread, because on a small shared machine two threads wait for each other. That can be
    twenty times slower, and it varies.
    """
    session.env["PIP_CONSTRAINT"] = constraints.as_uri()
    session.env["OMP_NUM_THREADS"] = "1"


def install_plugin(session: nox.Session, name: str, recipe: str = "environment.txt") -> None:
    """Install a plugin, as its recipe says, in the session's environment."""
    for command in plugin_steps(name, recipe):
        session.run_install("python", "-m", *command, silent=not session.interactive)


def plugin_steps(name: str, recipe: str = "environment.txt") -> list[list[str]]:
    """The pip commands that install the core and a plugin with all its extras.

    If the plugin's folder has the recipe, its lines are used instead: each is a pip command, run
    in the root of the repository.
    """
    file = PLUGINS[name] / recipe
    if not file.exists():
        return [
            [
                "pip",
                "install",
                "--editable",
                "core[conformance]",
                "--editable",
                with_extras(PLUGINS[name]),
            ]
        ]
    lines = [shlex.split(line, comments=True) for line in file.read_text().splitlines()]
    return [["pip", *words] for words in lines if words]


def further_environment(session: nox.Session, name: str, steps: list[list[str]]) -> str:
    """The Python of a second environment for a session, made the first time."""
    folder = Path(session.virtualenv.location).resolve().with_name(f"{session.name}-{name}")
    python = str(folder / "bin" / "python")
    if not (folder / "complete").exists():
        session.run_install("python", "-m", "venv", "--clear", str(folder))
        for command in steps:
            session.run_install(
                python, "-m", *command, external=True, silent=not session.interactive
            )
        (folder / "complete").touch()
    return python


def with_extras(folder: Path) -> str:
    """How pip names a distribution's folder together with all its optional dependencies."""
    extras = nox.project.load_toml(folder / "pyproject.toml")["project"].get(
        "optional-dependencies", {}
    )
    return str(folder.relative_to(ROOT)) + (f"[{','.join(extras)}]" if extras else "")


def lowest_versions(*folders: Path) -> list[str]:
    """The lines of constraints.txt, and the lowest version of every other dependency."""
    fixed = (ROOT / "constraints.txt").read_text().splitlines()
    names = {Requirement(line).name for line in fixed if line and not line.startswith("#")}
    lowest = {}
    for folder in folders:
        project = nox.project.load_toml(folder / "pyproject.toml")["project"]
        for line in chain(
            project["dependencies"], *project.get("optional-dependencies", {}).values()
        ):
            requirement = Requirement(line)
            (version,) = (
                limit.version for limit in requirement.specifier if limit.operator == ">="
            )
            if requirement.name not in names and not requirement.name.startswith("genlm-"):
                lowest[requirement.name] = version
    return [*fixed, *(f"{name}=={version}" for name, version in lowest.items())]


def real_model(session: nox.Session) -> str:
    """The folder of a small real model. It is made first if it is missing."""
    folder = smollm2.default_folder()
    if not folder.exists():
        session.install(*GROUPS["model"])
        session.run("python", "tools/smollm2.py")
    return str(folder)
