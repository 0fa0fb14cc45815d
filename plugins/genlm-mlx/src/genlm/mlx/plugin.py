"""The module that the entry point ``mlx`` names. Importing it imports no engine."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

from genlm.core import BackendInfo, hookimpl
from genlm.core.types import Engine

PREFERENCE_ON_APPLE = 100
# Elsewhere it is never chosen automatically, because transformers is faster there.
PREFERENCE_ELSEWHERE = -1


@hookimpl
def genlm_backend_info() -> BackendInfo:
    return BackendInfo(
        summary="mlx-lm, with a KV cache of its own",
        engine="mlx-lm",
        needs=("mlx", "mlx_lm"),
        install="pip install mlx-lm on Apple silicon, pip install 'mlx-lm[cpu]' on Linux",
        preference=PREFERENCE_ON_APPLE if _apple_silicon() else PREFERENCE_ELSEWHERE,
    )


@hookimpl
def genlm_load(model: str, options: Mapping[str, object], verify: Any) -> Engine:
    """Load a model folder or hub name; the options are those of ``AsyncMlxLM.from_name``."""
    import mlx.core as mx
    from genlm.mlx.open_files import never_fewer

    with never_fewer():
        from genlm.mlx.loading import load

    from genlm.kit.verify.loading import load_verified
    from genlm.mlx.verified import subject_of

    try:
        return load_verified(subject_of(model, options), verify, lambda name: load(name, options))
    except BaseException:
        mx.clear_streams()  # cleared as in genlm_close, because the thread ends now
        raise


def _apple_silicon() -> bool:
    return platform.system() == "Darwin" and platform.machine() == "arm64"
