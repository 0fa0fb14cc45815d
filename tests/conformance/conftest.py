from __future__ import annotations

import pytest

from .kit import ROOT, CleanEnvironment


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> CleanEnvironment:
    """One with what the author of a backend installs."""
    environment = CleanEnvironment(tmp_path_factory.mktemp("clean"))
    environment.install(*(ROOT / name for name in ("core", "kit", "conformance")))
    return environment
