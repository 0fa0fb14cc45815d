"""What the entry point ``sgl`` names. Importing it imports no engine."""

from __future__ import annotations

from collections.abc import Mapping

from genlm.core import BackendInfo, hookimpl
from genlm.core.types import Engine
from genlm.sgl.versions import why_unavailable


@hookimpl
def genlm_backend_info() -> BackendInfo:
    return BackendInfo(
        summary="SGLang's scheduler and radix cache, in process",
        engine="sglang",
        unavailable=why_unavailable(),
        preference=-1,  # never chosen automatically: vllm serves the same machines
    )


@hookimpl
def genlm_load(model: str, options: Mapping[str, object]) -> Engine:
    """Load a model folder or hub name; the options are those of
    ``AsyncSGLTransformer.from_name``."""
    from genlm.sgl.loading import load

    return load(model, options)
