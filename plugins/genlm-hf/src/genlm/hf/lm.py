"""AsyncTransformer: the class that GenLM users know."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any, Self

from genlm.core import AsyncLM, InvalidOptionError
from genlm.core.checks import safe_repr
from genlm.core.options import CoreOptions, refuse_unknown
from genlm.core.types import Engine

#: The options of :class:`~genlm.hf.options.HFOptions` that apply to a loaded model. The others say
#: how to load a model.
ENGINE_OPTIONS = ("kv_cache_bytes", "max_batch_tokens", "static")


class AsyncTransformer(AsyncLM):
    """A Hugging Face causal language model in this process.

    Args:
        hf_model: A causal language model. Until ``close``, it is in evaluation mode, and its
            attention implementation is wrapped; ``close`` restores both.
        hf_tokenizer: Its tokenizer.
        batch_size, timeout, **options: The options of every backend
            (:class:`~genlm.core.options.CoreOptions`), and ``kv_cache_bytes``,
            ``max_batch_tokens`` and ``static`` of :class:`~genlm.hf.options.HFOptions`.

    Raises:
        InvalidOptionError: an option is not accepted.
    """

    def __init__(
        self,
        hf_model: Any,
        hf_tokenizer: Any = None,
        batch_size: int | None = None,
        timeout: float = 0.0,
        **options: Any,
    ) -> None:
        if isinstance(hf_model, str | PathLike):
            raise InvalidOptionError(
                "AsyncTransformer(model, tokenizer) takes a model that is loaded; write "
                f"AsyncTransformer.from_name({safe_repr(hf_model)})"
            )
        if hf_tokenizer is None:
            raise InvalidOptionError("AsyncTransformer(model, tokenizer) needs a tokenizer")
        core, ours = CoreOptions.split({"batch_size": batch_size, "timeout": timeout, **options})
        refuse_unknown("hf", ours, ENGINE_OPTIONS)

        def load() -> Engine:
            from genlm.hf.engine import HFEngine
            from genlm.hf.options import HFOptions

            return HFEngine(hf_model, hf_tokenizer, HFOptions.parse(ours))

        super().__init__(load, backend="hf", **core)

    @classmethod
    def from_name(
        cls,
        model_id: str,
        bitsandbytes_opts: Mapping[str, Any] | None = None,
        hf_opts: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Self:
        """Load a model.

        Args:
            model_id: A folder, a folder with a GGUF file, or a hub name.
            bitsandbytes_opts, hf_opts, **options: The options of the backend
                (:class:`~genlm.hf.options.HFOptions`), and those of every backend.

        Raises:
            InvalidOptionError: an option is not accepted.
            OSError: there is no such model.
        """
        ours = {"bitsandbytes_opts": bitsandbytes_opts, "hf_opts": hf_opts, **options}
        return cls.from_backend("hf", model_id, ours)
