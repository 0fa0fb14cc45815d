"""The SGLang backend. This module can be imported where neither plugin nor engine is installed."""

from typing import TYPE_CHECKING

from genlm.backend._removed import ADAPTERS, removed_names
from genlm.backend.llm._classes import backend_class, installed
from genlm.core import AsyncLM as AsyncLM

if TYPE_CHECKING:
    from genlm.sgl import AsyncSGLTransformer as AsyncSGLTransformer
else:
    AsyncSGLTransformer = backend_class("sgl", "AsyncSGLTransformer")

HAS_SGL = installed("genlm.sgl") and installed("sglang")

__getattr__ = removed_names(__name__, ADAPTERS)
