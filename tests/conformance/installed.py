"""Pretended installations of plugins."""

from __future__ import annotations

from pathlib import Path


def pretend_installed(site: Path, name: str, module: str, source: str) -> None:
    """Write a module to ``site``, and the metadata of a distribution that offers it as the backend
    ``name``."""
    (site / f"{module}.py").write_text(source)
    metadata = site / f"{module}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {module.replace('_', '-')}\nVersion: 1.0\n"
    )
    (metadata / "entry_points.txt").write_text(f"[genlm.backends]\n{name} = {module}\n")
