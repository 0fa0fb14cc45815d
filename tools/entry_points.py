"""Write the metadata of our distributions into a folder, so that entry points are found without an
installation: python tools/entry_points.py FOLDER."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def write(folder: Path) -> None:
    version = (ROOT / "VERSION").read_text().strip()
    for file in [*ROOT.glob("*/pyproject.toml"), *ROOT.glob("plugins/*/pyproject.toml")]:
        project = tomllib.loads(file.read_text())["project"]
        write_metadata(folder, project["name"], version, project.get("entry-points", {}))


def write_metadata(
    folder: Path, name: str, version: str, groups: Mapping[str, Mapping[str, str]]
) -> Path:
    """Write the metadata of one distribution with its entry points by group, and return its
    folder."""
    place = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    place.mkdir(parents=True, exist_ok=True)
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, names in groups.items():
        lines += [f"[{group}]", *(f"{entry} = {target}" for entry, target in names.items())]
    (place / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return place


if __name__ == "__main__":
    write(Path(sys.argv[1]))
