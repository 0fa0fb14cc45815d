"""The description of a model that verification compares with transformers' rows of its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from genlm.kit.settings import whole_settings_of
from genlm.kit.verify.subject import Subject, engine_opts_of, served_subject

#: Options that ask for other arithmetic than the folder's.
QUANTISATIONS = ("quantization", "quantization_config")


def subject_of(model: str, options: Mapping[str, Any]) -> Subject:
    """A model, and the changes that vLLM's options make to it."""
    changes = _changes(model, engine_opts_of(options))
    return served_subject(model, "vllm", options, changes, QUANTISATIONS)


def _changes(model: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the options, as if they were in ``config.json``."""
    changes: dict[str, Any] = {}
    if another := given.get("hf_config_path"):
        file = Path(another) / "config.json"
        if file.is_file():
            changes |= json.loads(file.read_text(encoding="utf-8"))
    overrides = given.get("hf_overrides") or {}
    if isinstance(overrides, Mapping):
        return changes | dict(overrides)
    settings = whole_settings_of(given.get("hf_config_path") or model, given.get("revision"))
    return changes if settings is None else dict(overrides(settings).to_dict())
