"""The vLLM backend of genlm-core. Importing it imports neither vLLM nor PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from genlm.vllm.lm import AsyncVirtualLM as AsyncVirtualLM

__all__ = ["AsyncVirtualLM"]


def __getattr__(name: str) -> object:
    if name == "AsyncVirtualLM":
        from genlm.vllm.lm import AsyncVirtualLM

        return AsyncVirtualLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
