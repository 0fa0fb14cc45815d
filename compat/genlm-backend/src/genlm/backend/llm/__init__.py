"""Language models: :class:`genlm.core.AsyncLM` and the classes of the backends."""

from collections.abc import Mapping
from typing import Any

import genlm.core
from genlm.backend.llm.base import AsyncLM, MockAsyncLM
from genlm.backend.llm.hf import AsyncTransformer
from genlm.backend.llm.mlx import AsyncMlxLM
from genlm.backend.llm.sgl import AsyncSGLTransformer
from genlm.backend.llm.vllm import AsyncVirtualLM
from genlm.core.plugins import choose_backend

CLASSES: Mapping[str, Any] = {
    "hf": AsyncTransformer,
    "mlx": AsyncMlxLM,
    "mock": MockAsyncLM,
    "sgl": AsyncSGLTransformer,
    "vllm": AsyncVirtualLM,
}


def load_model_by_name(
    name: str, backend: str | None = None, llm_opts: Mapping[str, Any] | None = None
) -> AsyncLM:
    """:func:`genlm.core.load_model_by_name`, but what comes back is of the backend's own class."""
    chosen = choose_backend() if backend is None else backend
    if chosen in CLASSES:
        model: AsyncLM = CLASSES[chosen].from_name(name, **(llm_opts or {}))
        return model
    return genlm.core.load_model_by_name(name, chosen, llm_opts)


__all__ = [
    "AsyncLM",
    "AsyncMlxLM",
    "AsyncSGLTransformer",
    "AsyncTransformer",
    "AsyncVirtualLM",
    "MockAsyncLM",
    "load_model_by_name",
]
