"""The MLX backend of genlm-core. Importing it imports no engine."""

from genlm.mlx.lm import AsyncMlxLM

__all__ = ["AsyncMlxLM"]
