"""AsyncVirtualLM: the class that GenLM users know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from genlm.core import AsyncLM
from genlm.core.types import Engine


class AsyncVirtualLM(AsyncLM):
    """A language model evaluated by vLLM; make one with :meth:`from_name`."""

    @classmethod
    def from_name(
        cls,
        model_name: str,
        engine_opts: Mapping[str, Any] | None = None,
        *,
        live_sessions: bool | int = True,
        **core_options: Any,
    ) -> Self:
        """Load a model.

        Args:
            model_name: A local folder or a hub name.
            engine_opts: Options of ``vllm.LLM``: ``gpu_memory_utilization``,
                ``tensor_parallel_size``, ``dtype``, ``enforce_eager``, ``max_model_len``,
                ``enable_lora``, ``distributed_executor_backend``, ...
            live_sessions: Whether answered contexts stay with vLLM, so that extending one costs
                only the new tokens. A number is the most that stay; ``True`` is half of
                ``max_num_seqs``.
            **core_options: Those of every backend: ``batch_size``, ``timeout``, ``cache_size``,
            ``cache_opts``, ...

        Raises:
            InvalidOptionError: an unknown option, or one that full rows cannot be had with.
            BackendUnavailableError: the installed vLLM is outside the supported range.
            Exception: whatever vLLM raises when it cannot load the model.
        """

        def load() -> Engine:
            from genlm.vllm.loading import load

            return load(model_name, {"engine_opts": engine_opts, "live_sessions": live_sessions})

        return cls._open(load, backend="vllm", **core_options)
