"""What of a model is compared with transformers' own rows of its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from genlm.kit.verify.subject import Subject

#: Options that ask for other arithmetic than the folder's.
OTHER_MODEL = ("quantization", "torchao_config", "quantize_and_serve")


def subject_of(model: str, options: Mapping[str, Any]) -> Subject:
    """A model, and what SGLang's options change in it."""
    given = options.get("engine_opts")
    given = given if isinstance(given, Mapping) else {}
    return Subject(
        model=model,
        engine="sglang",
        backend="sgl",
        options=options,
        revision=given.get("revision"),
        cache_dir=given.get("download_dir"),
        changes=_changes(given.get("json_model_override_args")),
        unknown=_other_model(given),
    )


def _other_model(given: Mapping[str, Any]) -> str | None:
    if given.get("load_format") == "dummy":
        return "load_format='dummy' gives random weights"
    if str(given.get("kv_cache_dtype", "auto")).startswith("fp8"):
        return "kv_cache_dtype rounds keys and values"
    asked = next((name for name in OTHER_MODEL if given.get(name)), None)
    return None if asked is None else f"{asked} rounds the folder's weights"


def _changes(overrides: Any) -> dict[str, Any]:
    """Settings as if they stood in ``config.json``; what is no JSON is refused at the load."""
    try:
        return dict(json.loads(overrides or "{}"))
    except (TypeError, ValueError):
        return {}
