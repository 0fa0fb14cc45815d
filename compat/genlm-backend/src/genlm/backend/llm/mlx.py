"""The MLX backend. This module can be imported where neither plugin nor engine is installed."""

from typing import TYPE_CHECKING

from genlm.backend._removed import ADAPTERS, removed_names
from genlm.backend.llm._classes import backend_class, installed
from genlm.core import AsyncLM as AsyncLM

if TYPE_CHECKING:
    from genlm.mlx import AsyncMlxLM as AsyncMlxLM
else:
    AsyncMlxLM = backend_class("mlx", "AsyncMlxLM")

HAS_MLX = installed("genlm.mlx") and installed("mlx_lm")

__getattr__ = removed_names(__name__, ADAPTERS)
