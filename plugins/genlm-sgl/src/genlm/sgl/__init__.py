"""The SGLang backend of genlm-core."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from genlm.sgl.lm import AsyncSGLTransformer

__all__ = ["AsyncSGLTransformer"]


def __getattr__(name: str) -> object:
    if name == "AsyncSGLTransformer":
        from genlm.sgl.lm import AsyncSGLTransformer

        return AsyncSGLTransformer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
