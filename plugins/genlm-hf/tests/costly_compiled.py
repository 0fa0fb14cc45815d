"""A model that inductor compiles, which takes more than a minute."""

from __future__ import annotations

import shutil

import pytest

from .test_precision import check_compiled


def test_model_compiled_by_inductor_has_right_rows(tiny: str) -> None:
    if not any(map(shutil.which, ("c++", "g++", "clang++", "cl"))):
        pytest.skip("torch.compile needs a C++ compiler, and none is installed")
    check_compiled(tiny, backend="inductor")
