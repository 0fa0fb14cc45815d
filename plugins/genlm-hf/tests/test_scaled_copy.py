"""The scaled copy: thresholds that the probe of short contexts cannot reach are crossed at load."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from structlog.testing import capture_logs

from genlm.hf import probe
from genlm.hf.reuse import ReuseMode
from genlm.hf.runner import Runner
from genlm.kit.scaled_copy import Threshold, small_config, small_model, thresholds

from . import shapes
from .models import draw, sweep, unproven

#: Other families are in test_thresholds.py, and all of them in costly_sweep.py.
FAMILIES = ["gemma3_text", "gpt_neo", "roberta", "moshi"]

SHAPE = {**shapes.SHAPE, "max_position_embeddings": 4096}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "llama_4_scaling_beta": 0.5,
}


def windowed(**changes: Any) -> transformers.MistralConfig:
    return transformers.MistralConfig(**SHAPE, sliding_window=1024, **changes)


@pytest.mark.any_version
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_right_around_every_threshold_of_a_family(family: str) -> None:
    found = sweep(family)
    assert (found.outcome, found.why) == ("right", "")


def test_rows_that_are_random_are_rejected() -> None:
    found = sweep("reformer")
    assert found.outcome == "refused"
    assert "from forward to forward" in found.why


def test_thresholds_are_found_at_any_depth() -> None:
    config = transformers.Ministral3Config(**SHAPE, sliding_window=2048, rope_parameters=YARN)
    found = {".".join(one.path): one.value for one in thresholds(config.to_dict())}
    path = "rope_parameters.original_max_position_embeddings"
    assert found == {"sliding_window": 2048, path: 1024}


def test_a_scaled_copy_has_a_layer_of_every_kind() -> None:
    kinds = ["full_attention", *["sliding_attention"] * 3]
    config = transformers.Gemma3TextConfig(
        **{**SHAPE, "num_hidden_layers": 4}, layer_types=kinds, sliding_window=1024, head_dim=8
    )
    kind = transformers.Gemma3ForCausalLM
    state = torch.random.get_rng_state()
    scaled = small_model(kind, config, torch.device("cpu"), {("sliding_window",): 8})
    assert scaled.config.layer_types == ["full_attention", "sliding_attention"]
    assert scaled.model.layers[1].self_attn.sliding_window == 8
    assert (config.num_hidden_layers, config.sliding_window) == (4, 1024)
    assert torch.equal(torch.random.get_rng_state(), state)


class Settings(dict[str, Any]):
    """A configuration of any class."""

    to_dict = dict.copy

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> Settings:
        return cls(settings)


@pytest.mark.parametrize(
    ("given", "small"),
    [
        (  # two kinds of layers
            {"num_layers": 4, "layer_types": ["full", "sliding", "sliding", "full"]},
            {"num_layers": 2, "layer_types": ["full", "sliding"]},
        ),
        (  # a kind whose layers are listed by number
            {"num_layers": 5, "attn_layer_indices": [2, 4]},
            {"num_layers": 2, "attn_layer_indices": [1]},
        ),
        (  # settings for single layers
            {"num_layers": 4, "per_layer_config": {"2": {"heads": 3}, "3": {"heads": 3}}},
            {"num_layers": 2, "per_layer_config": {1: {"heads": 3}}},
        ),
    ],
)
def test_a_layer_of_every_kind_is_kept(given: dict[str, Any], small: dict[str, Any]) -> None:
    assert small_config(Settings(given), 1, {}) == small


def test_nested_threshold_is_changed_in_place() -> None:
    settings = Settings(num_layers=2, rope={"max_distance": 1024, "0": {"window": 7}})
    changed = {("rope", "max_distance"): 8, ("rope", "0", "window"): 9}
    assert small_config(settings, 1, changed) == {
        "num_layers": 2,
        "rope": {"max_distance": 8, "0": {"window": 9}},
    }


def test_numeric_labels_are_not_thresholds() -> None:
    assert thresholds({"labels": {0: 7}, "window": 5}) == [Threshold(("window",), 5)]


def mixed_up(logits: torch.Tensor) -> torch.Tensor:
    return logits.roll(1, -1)


def wrong_beyond(
    window: int,
    monkeypatch: pytest.MonkeyPatch,
    ways: tuple[str, ...],
    disturb: Callable[[torch.Tensor], torch.Tensor] = mixed_up,
) -> None:
    """Make some reuse modes forget about the windows of models whose window is at most so long:
    those that a scaled copy has, not that of the model."""
    for way in ways:
        run = getattr(Runner, way)

        def disturbed(self: Runner, chunks: Any, *args: Any, run: Any = run) -> Any:
            logits = run(self, chunks, *args)
            narrow = self._model.config.sliding_window <= window
            beyond = max(chunks.stops) > self._model.config.sliding_window
            return disturb(logits) if narrow and beyond else logits

        monkeypatch.setattr(Runner, way, disturbed)


def test_mode_wrong_beyond_a_far_threshold_is_used_below_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong_beyond(8, monkeypatch, ("packed",))
    with capture_logs() as events:
        model = unproven(windowed(), max_batch_tokens=4096)
    (event,) = [event for event in events if event["event"] == "kv.reuse_limited"]
    assert event["limit"] == 1023
    assert "sliding_window: rows differ by" in event["why"]
    assert model.engine.reuse is ReuseMode.SHARED
    (whole,) = draw(1, 1100)
    for length, computed in ((1000, 1), (1030, 1031)):
        model.check(whole[:length])
        model.forwards.clear()
        model.check((*whole[:length], 1))
        assert model.forwards == [computed]


def test_error_below_half_precision_rounding_is_found_on_the_scaled_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong_beyond(8, monkeypatch, ("packed",), disturb=lambda logits: logits * 1.01)
    with capture_logs() as events:
        unproven(windowed(dtype="bfloat16"))
    (event,) = [event for event in events if event["event"] == "kv.reuse_limited"]
    assert event["limit"] == 1023


def test_mode_wrong_beyond_a_near_threshold_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong_beyond(8, monkeypatch, ("packed",))
    monkeypatch.setattr(probe, "MIN_LIMIT_TOKENS", 2048)
    with capture_logs() as events:
        model = unproven(windowed())
    assert model.engine.reuse is ReuseMode.UNIFORM
    (event,) = [event for event in events if event["event"] == "kv.reuse_chosen"]
    assert "beyond 1023 tokens: sliding_window: rows differ" in event["rejected"]["shared"]
    model.check((1, 2, 3), (1, 2, 3, 4))


def test_missing_scaled_copy_is_logged_without_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("sizes do not fit")

    monkeypatch.setattr(probe, "small_model", refuse)
    with capture_logs() as events:
        model = unproven(windowed())
    assert "sizes do not fit" in {event.get("why") for event in events}
    assert model.engine.reuse is ReuseMode.SHARED


def test_scaled_copy_is_built_only_for_thresholds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[Threshold] = []
    monkeypatch.setattr(probe, "small_model", lambda *args: built.append(args))
    unproven(transformers.LlamaConfig(**SHAPE))
    assert not built


def test_scaled_copy_is_freed_without_a_garbage_collection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies: list[weakref.ref[Any]] = []

    def noted(*args: Any) -> Any:
        scaled = small_model(*args)
        copies.append(weakref.ref(scaled))
        return scaled

    monkeypatch.setattr(probe, "small_model", noted)
    gc.disable()
    try:
        unproven(windowed())
        assert [scaled() for scaled in copies] == [None]
    finally:
        gc.enable()
