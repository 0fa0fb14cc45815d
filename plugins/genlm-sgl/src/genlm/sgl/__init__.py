"""The SGLang backend of genlm-core. Importing it imports no engine."""

from genlm.sgl.lm import AsyncSGLTransformer

__all__ = ["AsyncSGLTransformer"]
