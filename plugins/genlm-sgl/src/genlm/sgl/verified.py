"""What of a model is compared with transformers' own rows of its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from genlm.kit.verify.subject import Subject, engine_opts_of, served_subject

#: Options that ask for other arithmetic than the folder's.
QUANTISATIONS = ("quantization", "torchao_config", "quantize_and_serve")


def subject_of(model: str, options: Mapping[str, Any]) -> Subject:
    """A model, and what SGLang's options change in it."""
    changes = _changes(engine_opts_of(options).get("json_model_override_args"))
    return served_subject(model, "sglang", options, changes, QUANTISATIONS, backend="sgl")


def _changes(overrides: Any) -> dict[str, Any]:
    """Settings as if they stood in ``config.json``; what is no JSON is rejected at the load."""
    try:
        return dict(json.loads(overrides or "{}"))
    except (TypeError, ValueError):
        return {}
