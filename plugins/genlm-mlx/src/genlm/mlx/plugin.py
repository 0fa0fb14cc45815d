"""What the entry point ``mlx`` names. Importing it imports no engine."""

from __future__ import annotations

import platform
from collections.abc import Mapping

from genlm.core import BackendInfo, hookimpl
from genlm.core.types import Engine

PREFERENCE_ON_APPLE = 100
PREFERENCE_ELSEWHERE = -1  # never chosen automatically: there transformers is faster


@hookimpl
def genlm_backend_info() -> BackendInfo:
    return BackendInfo(
        summary="mlx-lm, with a store of key/value state",
        engine="mlx-lm",
        needs=("mlx", "mlx_lm"),
        install="pip install mlx-lm on Apple silicon, pip install 'mlx-lm[cpu]' on Linux",
        preference=PREFERENCE_ON_APPLE if _apple_silicon() else PREFERENCE_ELSEWHERE,
    )


@hookimpl
def genlm_load(model: str, options: Mapping[str, object]) -> Engine:
    """Load a model folder or hub name; the options are those of ``AsyncMlxLM.from_name``."""
    import mlx.core as mx
    from genlm.mlx.open_files import never_fewer

    with never_fewer():
        from genlm.mlx.loading import load

    try:
        return load(model, options)
    except BaseException:
        mx.clear_streams()  # as genlm_close does: the thread ends now
        raise


def _apple_silicon() -> bool:
    return platform.system() == "Darwin" and platform.machine() == "arm64"
