"""The description of a model that verification compares with transformers' rows of its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from genlm.kit.verify.subject import Subject, engine_opts_of, served_subject

#: Options that ask for other arithmetic than the folder's.
QUANTISATIONS = ("quantization", "torchao_config", "quantize_and_serve")


def subject_of(model: str, options: Mapping[str, Any]) -> Subject:
    """A model, and the changes that SGLang's options make to it."""
    changes = _changes(engine_opts_of(options).get("json_model_override_args"))
    return served_subject(model, "sglang", options, changes, QUANTISATIONS, backend="sgl")


def _changes(overrides: Any) -> dict[str, Any]:
    """The settings of the options, as if they were in ``config.json``. A value that is not JSON is
    rejected when the model is loaded."""
    try:
        return dict(json.loads(overrides or "{}"))
    except (TypeError, ValueError):
        return {}
