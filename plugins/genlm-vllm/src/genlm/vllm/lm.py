"""AsyncVirtualLM: the class that GenLM users know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from genlm.core.lm import NamedLM


class AsyncVirtualLM(NamedLM):
    """A language model evaluated by vLLM; use :meth:`from_name` to create one."""

    @classmethod
    def from_name(
        cls,
        model_name: str,
        engine_opts: Mapping[str, Any] | None = None,
        *,
        live_sessions: bool | int = True,
        **options: Any,
    ) -> Self:
        """Load a model.

        Args:
            model_name: A local folder or a hub name.
            engine_opts: Options of ``vllm.LLM``: ``gpu_memory_utilization``,
                ``tensor_parallel_size``, ``dtype``, ``enforce_eager``, ``max_model_len``,
                ``enable_lora``, ``distributed_executor_backend``, ...
            live_sessions: Whether answered contexts stay in vLLM, so that extending one costs only
                the new tokens. A number limits how many stay. With ``True``, the limit is half of
                ``max_num_seqs``, and more while requests leave places free.
            **options: Those of every backend: ``batch_size``, ``timeout``, ``cache_size``,
                ``cache_opts``, ...

        Raises:
            InvalidOptionError: an option is unknown, or does not work with full rows.
            BackendUnavailableError: vLLM is not installed, or not in a supported version.
            Exception: vLLM's own error when it cannot load the model.
        """
        ours = {"engine_opts": engine_opts, "live_sessions": live_sessions, **options}
        return cls.from_backend("vllm", model_name, ours)
