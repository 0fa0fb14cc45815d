"""The configuration of an adapter folder, as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from genlm.core.errors import InvalidAdapterError

CONFIG = "adapter_config.json"

#: The largest configuration that is read, in bytes.
MAX_CONFIG_BYTES = 4 << 20


def read_config(folder: Path) -> dict[str, Any]:
    """Read the ``adapter_config.json`` of an adapter folder.

    Raises:
        InvalidAdapterError: the file is missing, too large, or not a JSON object.
    """
    file = folder / CONFIG
    if not file.is_file():
        raise InvalidAdapterError(
            f"{file} does not exist; give the folder that a LoRA adapter was saved in"
        )
    size = file.stat().st_size
    if size > MAX_CONFIG_BYTES:
        raise InvalidAdapterError(
            f"{file} has {size} bytes; at most {MAX_CONFIG_BYTES} are read; save the adapter again"
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidAdapterError(
            f"{file} is not JSON ({type(error).__name__}: {error!s:.100}); save the adapter again"
        ) from None
    if not isinstance(config, dict):
        raise InvalidAdapterError(f"{file} must hold a JSON object; save the adapter again")
    return config


def brief(value: Any) -> str:
    """A value of the configuration as messages show it: at most 100 characters."""
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
