"""The options of the hf backend, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, fields, frozen

from genlm.core.checks import integer
from genlm.core.options import refuse_unknown


def _mapping(given: Mapping[str, Any] | None) -> dict[str, Any]:
    return dict(given or {})


def _without_token(given: Mapping[str, Any]) -> str:
    """For ``repr``: logs must not show the user's hub token."""
    return repr({name: "..." if name == "token" else value for name, value in given.items()})


def _positive(instance: object, attribute: Any, value: Any) -> None:
    integer(attribute.name, value, least=1)


@frozen
class HFOptions:
    """Options of the hf backend.

    Attributes:
        hf_opts: Passed to ``from_pretrained``: ``dtype``, ``device_map``, ``attn_implementation``,
            ``revision``, ``gguf_file``, ...; ``tokenizer`` may name another folder or hub name for
            the tokenizer.
        bitsandbytes_opts: Arguments of ``transformers.BitsAndBytesConfig``, for instance
            ``{"load_in_4bit": True}``.
        compile_opts: Arguments of ``torch.compile``, for instance ``{"dynamic": True}``; ``None``
            compiles nothing. Attention and the row pool, whose shapes differ in every forward, are
            left out of it. On CUDA, modes that capture CUDA graphs are refused.
        device: Where the model goes, as PyTorch spells it; ``None`` is CUDA where it is, else the
            CPU. Not with ``device_map``.
        dtype: Of the weights: a ``torch.dtype``, its name, or ``"auto"``; ``None`` is float32 on
            the CPU, else ``"auto"``.
        kv_cache_bytes: The most bytes of key/value state to keep, least recently used first out; 0
            keeps none; ``None`` is half of the free device memory, on the CPU a quarter of the
            available memory and at most 4 GiB.
        max_batch_tokens: The most new tokens in one forward; longer work is done in chunks.
    """

    hf_opts: Mapping[str, Any] = field(factory=dict, converter=_mapping, repr=_without_token)
    bitsandbytes_opts: Mapping[str, Any] | None = None
    compile_opts: Mapping[str, Any] | None = None
    device: str | None = None
    dtype: Any = None
    kv_cache_bytes: int | None = field(default=None)
    max_batch_tokens: int = field(default=2048, validator=_positive)

    @kv_cache_bytes.validator
    def _check_bytes(self, attribute: Any, value: int | None) -> None:
        integer(attribute.name, value, least=0, optional=True)

    @classmethod
    def parse(cls, options: Mapping[str, object]) -> HFOptions:
        """Raises: InvalidOptionError: an option is unknown or has a value that is not accepted."""
        refuse_unknown("hf", options, [attribute.name for attribute in fields(cls)])
        return cls(**options)  # type: ignore[arg-type]  # each field checks its own value
