"""What of a model is compared with transformers' own rows of its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from genlm.kit.settings import whole_settings_of
from genlm.kit.verify.subject import Subject

#: Options that ask for other arithmetic than the folder's.
OTHER_MODEL = ("quantization", "quantization_config")


def subject_of(model: str, options: Mapping[str, Any]) -> Subject:
    """A model, and what vLLM's options change in it."""
    given = options.get("engine_opts")
    given = given if isinstance(given, Mapping) else {}
    return Subject(
        model=model,
        engine="vllm",
        backend="vllm",
        options=options,
        revision=given.get("revision"),
        cache_dir=given.get("download_dir"),
        changes=_changes(model, given),
        unknown=_other_model(given),
    )


def _other_model(given: Mapping[str, Any]) -> str | None:
    if given.get("load_format") == "dummy":
        return "load_format='dummy' gives random weights"
    if str(given.get("kv_cache_dtype", "auto")).startswith("fp8"):
        return "kv_cache_dtype rounds keys and values"
    asked = next((name for name in OTHER_MODEL if given.get(name)), None)
    return None if asked is None else f"{asked} rounds the folder's weights"


def _changes(model: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as if they stood in ``config.json``."""
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
