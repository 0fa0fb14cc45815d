"""AsyncSGLTransformer: the class that GenLM users know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from genlm.core.lm import NamedLM


class AsyncSGLTransformer(NamedLM):
    """A language model evaluated by SGLang in this process; use :meth:`from_name` to create one."""

    @classmethod
    def from_name(
        cls,
        model_id: str,
        engine_opts: Mapping[str, Any] | None = None,
        gpu_id: int = 0,
        **options: Any,
    ) -> Self:
        """Load a model.

        Args:
            model_id: A local folder or a hub name.
            engine_opts: SGLang's server arguments, for instance ``{"mem_fraction_static": 0.8,
                "enable_lora": True}``.
            gpu_id: The number of the GPU; ignored on the CPU.
            **options: Those of every backend: ``batch_size``, ``timeout``, ``cache_size``,
                ``cache_opts``, ...

        Raises:
            BackendUnavailableError: SGLang is not installed in a supported version, or this process
                holds an SGLang model.
            InvalidOptionError: an option is not accepted.
        """
        ours = {"engine_opts": engine_opts, "gpu_id": gpu_id, **options}
        return cls.from_backend("sgl", model_id, ours)
