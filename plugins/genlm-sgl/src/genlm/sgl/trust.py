"""Trust: a model folder may not run its own code, unless the user trusts it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from genlm.core.errors import InvalidOptionError


def refuse_code(arguments: Mapping[str, Any]) -> None:
    """Reject a model whose configuration names code, before SGLang sees it.

    If SGLang has no implementation of a model, it uses transformers' and runs the code that
    ``auto_map`` names, even with ``trust_remote_code=False``.

    Args:
        arguments: SGLang's server arguments.

    Raises:
        InvalidOptionError: the configuration names code, and ``trust_remote_code`` is not given.
    """
    if arguments.get("trust_remote_code"):
        return
    model = arguments["model_path"]
    for config in _configurations(model, arguments.get("revision")):
        if _names_code(json.loads(config.read_text())):
            raise InvalidOptionError(
                f"the model {model!r} names Python code of its own (auto_map in {config.name}), "
                "which SGLang would run; if you trust it, load with "
                "engine_opts={'trust_remote_code': True}"
            )


def _configurations(model: str, revision: str | None) -> list[Path]:
    """The model's configuration, from its folder or from the hub."""
    if Path(model).exists():
        file = Path(model) / "config.json"
        return [file] if file.exists() else []
    from transformers.utils.hub import cached_file

    found = cached_file(model, "config.json", revision=revision)
    return [] if found is None else [Path(found)]


def _names_code(value: Any) -> bool:
    """Whether ``auto_map`` occurs at any depth."""
    if isinstance(value, dict):
        return bool(value.get("auto_map")) or any(map(_names_code, value.values()))
    return isinstance(value, list) and any(map(_names_code, value))
