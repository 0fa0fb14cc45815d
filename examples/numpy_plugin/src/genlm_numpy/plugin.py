"""The description of the backend, and its loader. Imports no engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from genlm.core import BackendInfo, hookimpl
from genlm.core.options import refuse_unknown

if TYPE_CHECKING:
    from genlm_numpy.engine import NumpyEngine


@hookimpl
def genlm_backend_info() -> BackendInfo:
    return BackendInfo("transformers in NumPy", engine="numpy")


@hookimpl
def genlm_load(model: str, options: Mapping[str, object]) -> NumpyEngine:
    from genlm_numpy.engine import NumpyEngine

    refuse_unknown("numpy", options)
    return NumpyEngine(model)
