"""The vLLM backend. This module can be imported where neither plugin nor engine is installed."""

from typing import TYPE_CHECKING

from genlm.backend._removed import ADAPTERS, removed_names
from genlm.backend.llm._classes import backend_class, installed
from genlm.core import AsyncLM as AsyncLM

if TYPE_CHECKING:
    from genlm.vllm import AsyncVirtualLM as AsyncVirtualLM
else:
    AsyncVirtualLM = backend_class("vllm", "AsyncVirtualLM")

HAS_VLLM = installed("genlm.vllm") and installed("vllm")

__getattr__ = removed_names(
    __name__,
    {**ADAPTERS, "BackendScheduler": "live sessions are inside: AsyncVirtualLM.from_name(name)"},
)
