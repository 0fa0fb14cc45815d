"""Measures genlm-backend for comparison, if it is installed: ``pip install --no-deps --target
FOLDER genlm-backend==0.3.1``, with the folder on the path."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tools.smollm2 import default_folder

DROP_IN = Path(__file__).resolve().parents[2] / "compat"

#: The most bytes that genlm-backend's rows of all positions may take in a measured step.
MAX_ROW_BYTES = 24e9
#: The bytes of each number: one in the model's type, and its log-softmax in float32 with a copy.
BYTES_EACH = 10


def is_here() -> bool:
    """Whether genlm-backend itself, and not this project's replacement, can be imported, and a
    tokenizer for it exists."""
    try:
        found = find_spec("genlm.backend.llm.hf")
    except ModuleNotFoundError:
        return False
    real = found is not None and DROP_IN not in Path(str(found.origin)).parents
    return real and default_folder().exists()


def over(model: Any) -> Any:
    """Its hf backend over a loaded model."""
    from transformers import AutoTokenizer

    from genlm.backend.llm.hf import AsyncTransformer

    tokenizer = AutoTokenizer.from_pretrained(default_folder())
    return AsyncTransformer(model, tokenizer, batch_size=1024)


def fits(contexts: int, length: int, vocabulary: int) -> bool:
    return contexts * length * vocabulary * BYTES_EACH < MAX_ROW_BYTES
