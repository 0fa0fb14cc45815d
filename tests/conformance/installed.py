"""Pretended installations of plugins."""

from __future__ import annotations

from pathlib import Path

from tools.entry_points import write_metadata


def pretend_installed(site: Path, name: str, module: str, source: str) -> None:
    """Write a module to ``site``, and the metadata of a distribution that offers it as the backend
    ``name``."""
    (site / f"{module}.py").write_text(source)
    write_metadata(site, module.replace("_", "-"), "1.0", {"genlm.backends": {name: module}})
