"""The options of the backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import fields, frozen

from genlm.core import checks
from genlm.core.options import refuse_unknown

#: Names that users know from other backends and from mlx-lm, each with the option to use instead.
ELSEWHERE = {
    "adapter_path": "load the adapter with lm.add_new_lora(path, name)",
    "device": "the model is on MLX's default device",
    "dtype": "it is the checkpoint's own; mlx_lm.convert writes another",
    "engine_opts": "it is an option of vllm and sgl",
    "hf_opts": "it is an option of hf",
}


@frozen
class Options:
    """The user's options, which :meth:`genlm.mlx.AsyncMlxLM.from_name` describes."""

    prefill_step_size: int = 2048
    kv_cache_bytes: int | None = None

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> Options:
        """Check the options of a user; ``None`` is the default.

        Raises:
            InvalidOptionError: an option is unknown or out of range.
        """
        refuse_unknown("mlx", options, [attribute.name for attribute in fields(cls)], ELSEWHERE)
        given = {name: value for name, value in options.items() if value is not None}
        for name, least in (("prefill_step_size", 1), ("kv_cache_bytes", 0)):
            if name in given:
                given[name] = checks.integer(name, given[name], least)
        return cls(**given)
