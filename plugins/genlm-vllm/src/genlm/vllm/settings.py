"""Settings of a model's configuration that vLLM reads otherwise than transformers: set right where
vLLM can compute them, else contexts end before them, or the model is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from genlm.core.errors import EngineError
from genlm.core.logs import get_logger
from genlm.kit.settings import settings_of, windows

log = get_logger()

#: Families whose windows vLLM makes one token wider than transformers.
WIDER = ("cohere2", "cohere2_moe")

#: Families of which vLLM gives all layers the same window.
ONE_WINDOW = ("qwen2", "qwen3")


def corrections(model: str, engine_opts: Mapping[str, Any]) -> dict[str, Any]:
    """Options of vLLM with which it computes what transformers does; what the user gives in
    ``hf_overrides`` stays.

    Raises:
        EngineError: vLLM cannot compute that at every length that was asked for.
    """
    given = engine_opts.get("hf_overrides") or {}
    settings = settings_of(model, engine_opts.get("revision"))
    if settings is None or not isinstance(given, Mapping):
        return {}
    longest = engine_opts.get("max_model_len")
    found = windows(settings, settings.num_hidden_layers)
    window = next((one for one in found if one is not None), None)
    if settings.model_type in ONE_WINDOW and window is not None and None in found:
        _refuse_mixed(settings, found, window, longest)
        whole = ["full_attention"] * len(found)
        return {"hf_overrides": {"use_sliding_window": False, "layer_types": whole, **given}}
    if settings.model_type in WIDER and window is not None:
        return {"hf_overrides": {"sliding_window": window - 1, **given}}
    rope = getattr(settings, "rope_parameters", None) or {}
    if rope.get("llama_4_scaling_beta"):
        begins = rope["original_max_position_embeddings"]
        if longest is None or longest > begins:
            log.warning("vllm.context_ends", at=begins, before="the scaling of queries by position")
            return {"max_model_len": begins}
    return {}


def _refuse_mixed(settings: Any, found: list[int | None], window: int, longest: int | None) -> None:
    if longest is None or longest > window:
        raise EngineError(
            f"{len(found) - found.count(None)} of the {len(found)} layers have a window of "
            f"{window} tokens, and vLLM gives all layers of {settings.model_type} the same; load "
            f'the model with engine_opts={{"max_model_len": {window}}}, within which no window '
            'matters, or with backend="hf"'
        )
