"""The search for the setting that explains why an engine's rows differ."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from genlm.kit.scaled_copy import INNER_WIDTH, LAYERS, WIDTH

#: Settings that do not affect the computation, or on which the shapes of weights depend.
UNTRIED_SETTINGS = re.compile(
    r"token_(id|ids|index)$|dropout|initializer|label|architectures|dtype|name_or|version|cache"
    r"|^output_|return_dict|vocab|num_.*heads|model_type|_attn_impl|max_position|id2|layer_types"
)


def defaults(config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Settings that differ from the family's defaults: a description of each, and the change that
    sets it to the default."""
    text = config.get_text_config(decoder=True)
    part = next((n for n in config.sub_configs if getattr(config, n, None) is text), None)
    try:
        usual = type(text)().to_dict()
    except Exception:  # some classes have no such attribute
        return
    for name, value in text.to_dict().items():
        if name not in usual or value == usual[name] or _is_size(name):
            continue
        changes = {name: usual[name]}
        yield f"{name}={usual[name]!r}", {part: changes} if part else changes
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        plain = {"rope_type": "default", "rope_theta": rope.get("rope_theta")}
        changes = {"rope_parameters": plain, "rope_scaling": None}
        yield f"rope_parameters={plain!r}", {part: changes} if part else changes


def apart(rows: np.ndarray, reference: np.ndarray) -> float:
    """How far rows are apart from reference rows: the median of :func:`distances`.

    One row may be far off although the engine is right: in half precision, rounding may change the
    choice of an expert.
    """
    return float(np.median(distances(rows, reference)))


def distances(rows: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """The largest difference in each row, in nats: ``[contexts]``.

    Tokens that the engine leaves out do not count. Mass that it gives to tokens which the reference
    does not have is missing from the others.

    Args:
        rows: Log-probabilities ``[contexts, tokens]``.
        reference: The same, perhaps of more or fewer tokens.
    """
    width = min(rows.shape[-1], reference.shape[-1])
    rows, reference = rows[:, :width], _normalised(reference[:, :width])
    with np.errstate(invalid="ignore"):
        off = np.abs(rows - reference)
    off[rows == reference] = 0.0
    largest: np.ndarray = np.nan_to_num(off, nan=np.inf, posinf=np.inf).max(-1)
    return largest


def spread(rows: np.ndarray) -> float:
    """The standard deviation of a row's log-probabilities in nats; the median over the rows."""
    return float(np.median([row[np.isfinite(row)].std() for row in rows]))


def _normalised(rows: np.ndarray) -> np.ndarray:
    """Log-probabilities over the tokens that are left."""
    normalised: np.ndarray = torch.from_numpy(rows).log_softmax(-1).numpy()
    return normalised


def _is_size(name: str) -> bool:
    return name in LAYERS or any(
        kind.search(name) for kind in (UNTRIED_SETTINGS, WIDTH, INNER_WIDTH)
    )
