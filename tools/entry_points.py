"""Write the metadata of our distributions into a folder, so that entry points are found without an
installation: python tools/entry_points.py FOLDER."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def write(folder: Path) -> None:
    version = (ROOT / "VERSION").read_text().strip()
    for file in [*ROOT.glob("*/pyproject.toml"), *ROOT.glob("plugins/*/pyproject.toml")]:
        project = tomllib.loads(file.read_text())["project"]
        place = folder / f"{project['name'].replace('-', '_')}-{version}.dist-info"
        place.mkdir(parents=True, exist_ok=True)
        (place / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version}\n"
        )
        groups = project.get("entry-points", {})
        (place / "entry_points.txt").write_text(
            "".join(
                f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in names.items())
                for group, names in groups.items()
            )
        )


if __name__ == "__main__":
    write(Path(sys.argv[1]))
