"""The table of kinds of adapters in ``docs/adapters.md``: what the plugins' tests found."""

from __future__ import annotations

import os
from pathlib import Path

from genlm.core.conformance.adapter_kinds import Kind

#: Set to 1, it makes :func:`tabled` write what was found.
WRITE = "GENLM_WRITE_ADAPTER_TABLE"


def tabled(docs: Path, kind: Kind, backend: str, found: str) -> str:
    """What the table in a file says of a kind on a backend; with :data:`WRITE` set, ``found`` is
    written there first."""
    lines = docs.read_text().splitlines()
    head = next(line for line in lines if line.startswith("| kind |"))
    column = [cell.strip() for cell in head.split("|")].index(backend)
    for at, line in enumerate(lines):
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > column and cells[1] == kind.name:
            if os.environ.get(WRITE) == "1":
                cells[column] = found
                lines[at] = " | ".join(cells).strip()
                docs.write_text("\n".join(lines) + "\n")
            return cells[column]
    raise LookupError(f"{docs} has no line of {kind.name!r}")
