"""The module that the entry point ``sgl`` names. Importing it imports no engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from genlm.core import BackendInfo, hookimpl
from genlm.core.types import Engine

#: SGLang's scheduler may change with any release. The first and the last of these releases are
#: tested; others are rejected.
VERSIONS = ">=0.5.17,<0.5.24"


@hookimpl
def genlm_backend_info() -> BackendInfo:
    return BackendInfo(
        summary="SGLang's scheduler and radix cache, in process",
        engine="sglang",
        needs=("sglang",),
        install="pip install genlm-sgl",
        versions=VERSIONS,
        preference=-1,  # never chosen automatically, because vllm serves the same machines
    )


@hookimpl
def genlm_load(model: str, options: Mapping[str, object], verify: Any) -> Engine:
    """Load a model folder or hub name; the options are those of
    ``AsyncSGLTransformer.from_name``."""
    from genlm.kit.verify.loading import load_verified
    from genlm.sgl.loading import load
    from genlm.sgl.verified import subject_of

    return load_verified(subject_of(model, options), verify, lambda name: load(name, options))
