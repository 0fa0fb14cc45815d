"""The vLLM backend of genlm-core. Importing it imports no engine."""

from genlm.vllm.lm import AsyncVirtualLM

__all__ = ["AsyncVirtualLM"]
