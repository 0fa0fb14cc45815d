"""The Hugging Face transformers backend of genlm-core."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from genlm.hf.lm import AsyncTransformer

__all__ = ["AsyncTransformer"]


def __getattr__(name: str) -> object:
    if name == "AsyncTransformer":
        from genlm.hf.lm import AsyncTransformer

        return AsyncTransformer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
