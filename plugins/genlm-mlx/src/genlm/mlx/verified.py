"""The description of a model that verification compares with transformers' rows of its folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from genlm.kit.verify.subject import Subject


def subject_of(model: str, options: Mapping[str, Any]) -> Subject:
    """The description of a model. No option of this backend changes what a model computes."""
    return Subject(
        model=model,
        engine="mlx-lm",
        backend="mlx",
        options=options,
        on_request="it loads in less time than transformers needs to start",
    )
