"""The families that SGLang serves, and their small models in SGLang."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from genlm.core import Query
from genlm.sgl.loading import load
from tests.sweep import Row, Sweep


def served() -> set[str]:
    """The types of the causal models of transformers for which SGLang has a class of the same
    name."""
    folder = Path(str(find_spec("sglang").origin)).parent / "srt" / "models"
    defined = {
        node.name
        for file in folder.glob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef)
    }
    return {
        config.model_type
        for config, kind in MODEL_FOR_CAUSAL_LM_MAPPING.items()
        if kind.__name__ in defined
    }


@contextmanager
def opened(folder: Path) -> Iterator[tuple[int | None, Row]]:
    """The longest context of a model in SGLang, and a function for its rows."""
    engine = load(str(folder), {"engine_opts": {"max_total_tokens": 512}})
    try:
        yield engine.max_context, lambda context: engine.evaluate_alone(Query(context, cold=True))
    finally:
        engine.genlm_close()


SWEEP = Sweep(load=opened)
