"""The MLX backend of genlm-core."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from genlm.mlx.lm import AsyncMlxLM

__all__ = ["AsyncMlxLM"]


def __getattr__(name: str) -> object:
    if name == "AsyncMlxLM":
        from genlm.mlx.lm import AsyncMlxLM

        return AsyncMlxLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
