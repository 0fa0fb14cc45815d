"""One version for all distributions, which is in the file ``VERSION``.

``check`` shows that everything else agrees with it, ``notes`` prints the changelog of this version.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]


def version() -> Version:
    return Version((ROOT / "VERSION").read_text().strip())


def projects() -> dict[str, dict[str, Any]]:
    """The table ``project`` of every distribution, by its folder."""
    files = [*ROOT.glob("*/pyproject.toml"), *ROOT.glob("*/*/pyproject.toml")]
    return {
        file.parent.relative_to(ROOT).as_posix(): tomllib.loads(file.read_text())
        for file in sorted(files)
        if file.parent.parent.name in (ROOT.name, "plugins", "compat")
    }


def problems(tag: str | None) -> list[str]:
    """The places that do not agree with the version."""
    ours = version()
    found = []
    if tag is not None and tag != f"v{ours}":
        found.append(f"the tag is {tag}, and VERSION says {ours}; tag v{ours}, or change VERSION")
    for folder, declared in projects().items():
        project = declared["project"]
        # genlm-backend continues the version numbers of the distribution that it replaces.
        if "version" not in project.get("dynamic", []) and not folder.startswith("compat/"):
            found.append(f"{folder}/pyproject.toml has a version of its own; read that of VERSION")
        found += [f"{folder}: {problem}" for problem in pin_problems(project, ours)]
    citation = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    if citation is None or citation[1] != str(ours):
        found.append(f"CITATION.cff must say version: {ours}")
    if not notes().strip():
        found.append(f"CHANGELOG.md has no section on {ours}")
    return found


def pin_problems(project: dict[str, Any], ours: Version) -> list[str]:
    """The errors in the ranges of genlm-core and genlm-kit that a distribution requires.

    The minor version stands for the hooks and for the kit's interface, so a distribution must
    require exactly that minor version.
    """
    within = f">={ours.major}.{ours.minor},<{ours.major}.{ours.minor + 1}"
    taken = {one.name: one for one in map(Requirement, project["dependencies"])}
    found = []
    for name in ("genlm-core", "genlm-kit"):
        needed = name == "genlm-core" and project["name"] != name
        if name in taken and set(taken[name].specifier) != set(
            Requirement(name + within).specifier
        ):
            found.append(f"takes {taken[name]}; it must be {name}{within}")
        elif needed and name not in taken:
            found.append(f"needs the dependency {name}{within}; has none")
    return found


def notes() -> str:
    """The section of the changelog on this version, without its heading."""
    text = (ROOT / "CHANGELOG.md").read_text()
    found = re.search(
        rf"^## {re.escape(str(version()))}\b[^\n]*\n(.*?)(?=^## |\Z)",
        text,
        re.DOTALL | re.MULTILINE,
    )
    return found[1].strip() if found else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="show that everything agrees with VERSION")
    check.add_argument("--tag", help="the tag of the release, such as v0.1.0")
    commands.add_parser("notes", help="print the changelog of this version")
    options = parser.parse_args()
    if options.command == "notes":
        print(notes())
    elif found := problems(options.tag):
        sys.exit("\n".join(found))
    else:
        print(f"{len(projects())} distributions of version {version()}")


if __name__ == "__main__":
    main()
