"""load_model_by_name: from the name of a model to an AsyncLM over the backend that suits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from genlm.core.lm import AsyncLM
from genlm.core.options import CoreOptions
from genlm.core.plugins import choose_backend, find_backend


def load_model_by_name(name: str, backend: str | None = None, llm_opts: Mapping[str, Any] | None = None) -> AsyncLM:
    """Load a language model.

    Args:
        name: A local path or a hub name, as the backend takes it.
        backend: An installed backend (``genlm backends`` lists them); ``None`` chooses the best for this machine: vLLM
            where CUDA is, MLX on Apple silicon, else hf. The choice is logged.
        llm_opts: Options of the backend, and of the core (:class:`~genlm.core.options.CoreOptions`).

    Raises:
        BackendNotFoundError, BackendImportError, BackendUnavailableError: there is no such backend, it is broken, or it
            cannot run here.
        InvalidOptionError: an option is not accepted.
    """
    core, engine_options = CoreOptions.split(llm_opts or {})
    chosen = find_backend(backend if backend is not None else choose_backend())
    return AsyncLM(lambda: chosen.load(name, engine_options), backend=chosen.name, options=core)
