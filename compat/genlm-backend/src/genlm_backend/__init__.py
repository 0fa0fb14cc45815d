"""The name that genlm-backend had before 0.1: every module of it is the one of genlm.backend."""

import importlib
import sys

from genlm.backend import *  # noqa: F403

for _name in ("cache", "llm", "llm.base", "llm.hf", "llm.vllm", "tokenization", "trie"):
    _module = importlib.import_module(f"genlm.backend.{_name}")
    sys.modules[f"{__name__}.{_name}"] = _module
    globals().setdefault(_name, _module)  # `import` does this only for modules that it loads itself
