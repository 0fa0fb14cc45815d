"""AsyncMlxLM: the class that GenLM users know."""

from __future__ import annotations

from typing import Any, Self

from genlm.core.lm import NamedLM


class AsyncMlxLM(NamedLM):
    """A language model evaluated by mlx-lm; use :meth:`from_name` to create one."""

    @classmethod
    def from_name(
        cls,
        model_name: str,
        prefill_step_size: int = 2048,
        kv_cache_bytes: int | None = None,
        **options: Any,
    ) -> Self:
        """Load a model.

        Args:
            model_name: A local folder or a hub name; checkpoints of transformers and of mlx-lm,
                quantized ones too.
            prefill_step_size: The most tokens in one forward pass, over all sequences of a batch.
            kv_cache_bytes: The most bytes of the KV cache, without those of the current batch and
                of pinned prompts. ``None`` means that all of it may take 2.5 times what the largest
                batch took, and that at least 64 MiB may be kept besides any batch.
            **options: Those of every backend: ``batch_size``, ``timeout``, ``cache_size``,
                ``cache_opts``, ...

        Raises:
            BackendUnavailableError: mlx-lm is not installed.
            InvalidOptionError: an option is not accepted.
        """
        ours = {
            "prefill_step_size": prefill_step_size,
            "kv_cache_bytes": kv_cache_bytes,
            **options,
        }
        return cls.from_backend("mlx", model_name, ours)
