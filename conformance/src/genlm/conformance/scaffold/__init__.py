"""``genlm new-plugin``: writes a complete plugin package to start from."""

from __future__ import annotations

import re
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from string import Template

from genlm.core.errors import InvalidOptionError
from genlm.core.plugins import KNOWN, backend_names

#: Names for which a distribution genlm-NAME exists, besides the known plugins.
TAKEN = ("backend", "bytes", "conformance", "control", "core", "kit")

#: The place of each template in the new package.
FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "init.py": "src/{module}/__init__.py",
    "py.typed": "src/{module}/py.typed",
    "plugin.py": "src/{module}/plugin.py",
    "engine.py": "src/{module}/engine.py",
    "lm.py": "src/{module}/lm.py",
    "test_conformance.py": "tests/test_conformance.py",
}


def write_plugin(name: str, folder: Path | None = None) -> Path:
    """Write the package of a backend called ``name``; returns its folder.

    Args:
        name: What users will type: a lower-case letter, then letters, digits and dashes.
        folder: Where to write it; default ``genlm-NAME`` in the working directory.

    Raises:
        InvalidOptionError: the name cannot be used, or there is something in the folder.
    """
    name = name.removeprefix("genlm-")
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise InvalidOptionError(
            f"{name!r} cannot be a backend's name; begin with a letter, and use lower-case "
            "letters, digits and single dashes"
        )
    if name in TAKEN or name in KNOWN:
        raise InvalidOptionError(
            f"the distribution genlm-{name} exists already; choose another name"
        )
    if name in backend_names():
        raise InvalidOptionError(f"a backend {name!r} is installed already; choose another name")
    folder = Path(f"genlm-{name}") if folder is None else folder
    if folder.exists() and any(folder.iterdir()):
        raise InvalidOptionError(f"{folder} is not empty; give another --folder")
    module = f"genlm_{name.replace('-', '_')}"
    kind = "".join(map(str.capitalize, name.split("-")))
    core = core_requirement()
    for template, target in FILES.items():
        text = files(__name__).joinpath("template", f"{template}.template").read_text("utf-8")
        path = folder / target.format(module=module)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            Template(text).substitute(name=name, module=module, **{"class": kind}, core=core)
        )
    return folder


def core_requirement() -> str:
    """The core's versions with the same hooks as this one: the minor version is that of the
    hooks."""
    major, minor, *_ = version("genlm-core").split(".")
    return f">={major}.{minor},<{major}.{int(minor) + 1}"
