"""Adapters of strangers: nothing in a configuration takes time or memory that the model does not
need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

from genlm.core import InvalidAdapterError
from genlm.hf import AsyncTransformer
from tests.adapter_kinds import KINDS, PLAIN, Kind, make_adapter

from .shapes import QWEN3_NEXT, TOKENS


def change(folder: str, **settings: Any) -> None:
    """Change fields of an adapter's configuration."""
    file = Path(folder, "adapter_config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


def row_with(lm: AsyncTransformer, folder: str) -> torch.Tensor:
    lm.add_new_lora(folder, "a")
    row = lm.next_token_logprobs_sync([1, 2, 3], lora_name="a")
    lm.remove_lora("a")
    return row


def test_names_without_tensors_are_not_given_to_peft(tiny: str, tmp_path: Path) -> None:
    """It compares each with every module, by regular expressions that it compiles each time."""
    folder = make_adapter(KINDS[0], tiny, tmp_path / "adapter")
    with AsyncTransformer.from_name(tiny, cache_size=0) as lm:
        expected = row_with(lm, folder)
        names = [f"m{i}" for i in range(7000)]
        change(folder, modules_to_save=names[:256], alpha_pattern=dict.fromkeys(names, 2))
        change(folder, rank_pattern=dict.fromkeys(names, 2), target_parameters=["experts.m"])
        change(folder, target_modules="(.*)*(.*)*Z")
        for name in ("first", "second"):  # PEFT loads them in different ways
            lm.add_new_lora(folder, name)
            row = lm.next_token_logprobs_sync([1, 2, 3], lora_name=name)
            torch.testing.assert_close(row, expected, atol=0, rtol=0)
        model: Any = lm.underlying_model
        for given in model.peft_config.values():
            assert not given.modules_to_save
            assert not given.target_parameters
            assert isinstance(given.target_modules, set)
            assert {**given.rank_pattern, **given.alpha_pattern} == {}


def test_parameter_ranks_come_from_the_file(tiny: str, tmp_path: Path) -> None:
    """PEFT would allocate by the ranks of the configuration, and would compare shapes only then."""
    config = Qwen3MoeConfig(**QWEN3_NEXT)
    model = str(tmp_path / "model")
    AutoTokenizer.from_pretrained(tiny).save_pretrained(model)
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    targets = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    kind = Kind("", {"target_modules": [], "target_parameters": targets})
    folder = make_adapter(kind, model, tmp_path / "adapter")
    with AsyncTransformer.from_name(model, cache_size=0) as lm:
        expected = row_with(lm, folder)
        for settings in ({"r": 8192}, {"target_parameters": targets[:1]}):
            change(folder, **settings)
            with pytest.raises(InvalidAdapterError, match="adapts parameters of"):
                lm.add_new_lora(folder, "a")
            change(folder, r=PLAIN["r"], target_parameters=targets)
        torch.testing.assert_close(row_with(lm, folder), expected, atol=0, rtol=0)


def test_retrained_embeddings_of_more_tokens_are_rejected_with_the_remedy(
    tiny: str, tmp_path: Path
) -> None:
    larger = AutoModelForCausalLM.from_pretrained(tiny)
    larger.resize_token_embeddings(260, mean_resizing=False)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(tmp_path / "larger")
    larger.save_pretrained(tmp_path / "larger")
    kind = Kind("", {"modules_to_save": ["embed_tokens", "lm_head"]})
    folder = make_adapter(kind, str(tmp_path / "larger"), tmp_path / "adapter")
    with AsyncTransformer.from_name(tiny) as lm:
        before = lm.next_token_logprobs_sync([1, 2, 3])
        with pytest.raises(InvalidAdapterError, match=r"\[260, 64\].*resize_token_embeddings\(260"):
            lm.add_new_lora(folder, "a")
        torch.testing.assert_close(lm.next_token_logprobs_uncached([1, 2, 3]), before)


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (Mock(side_effect=KeyError("a\n  b")), r"\(KeyError: .*\); give an"),
        (Mock(return_value=Mock(unexpected_keys=["elsewhere"])), "has elsewhere, which this model"),
    ],
)
def test_error_of_peft_becomes_one_line(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: Mock, said: str
) -> None:
    folder = make_adapter(KINDS[0], tiny, tmp_path / "adapter")
    with AsyncTransformer.from_name(tiny) as lm:
        before = lm.next_token_logprobs_sync([1, 2, 3])
        with monkeypatch.context() as patch:
            patch.setattr("peft.PeftModel.load_adapter", load)
            with pytest.raises(InvalidAdapterError, match=said) as raised:
                lm.add_new_lora(folder, "a")
        assert "\n" not in str(raised.value)
        torch.testing.assert_close(lm.next_token_logprobs_uncached([1, 2, 3]), before)
        assert float((row_with(lm, folder) - before).abs().max()) > 1e-3


TRAINED_TOKENS = Kind("", {"trainable_token_indices": [1, 3]})


@pytest.mark.parametrize("kind", [KINDS[0], Kind("", {"modules_to_save": ["lm_head"]})])
def test_adapter_loads_after_one_with_trained_tokens(tiny: str, tmp_path: Path, kind: Kind) -> None:
    first = make_adapter(TRAINED_TOKENS, tiny, tmp_path / "first")
    second = make_adapter(kind, tiny, tmp_path / "second")
    with AsyncTransformer.from_name(tiny, cache_size=0) as lm:
        alone = [row_with(lm, folder) for folder in (first, second)]
        lm.add_new_lora(first, "first")
        lm.add_new_lora(second, "second")
        for name, row in zip(("first", "second"), alone, strict=True):
            together = lm.next_token_logprobs_sync([1, 2, 3], lora_name=name)
            torch.testing.assert_close(together, row, atol=1e-5, rtol=0)


@pytest.mark.parametrize("after_another", [False, True])
def test_modules_are_unwrapped_after_peft_fails(
    tiny: str, tmp_path: Path, after_another: bool
) -> None:
    good = make_adapter(KINDS[0], tiny, tmp_path / "good")
    kind = Kind("", TRAINED_TOKENS.settings, change=with_one_more)
    bad = make_adapter(kind, tiny, tmp_path / "bad")
    with AsyncTransformer.from_name(tiny, cache_size=0) as lm:
        before = lm.next_token_logprobs_sync([1, 2, 3])
        expected = row_with(lm, good)
        if after_another:
            lm.add_new_lora(good, "another")
        model: Any = lm.underlying_model
        names = [name for name, _ in model.named_parameters()]
        with pytest.raises(InvalidAdapterError, match=r"model\.nothing\.weight"):
            lm.add_new_lora(bad, "a")
        assert [name for name, _ in model.named_parameters()] == names
        torch.testing.assert_close(lm.next_token_logprobs_sync([1, 2, 3]), before)
        torch.testing.assert_close(row_with(lm, good), expected)


@pytest.mark.parametrize("tokens", [[1, TOKENS], {"embed_tokens": [99999, 1]}])
def test_trained_tokens_beyond_the_vocabulary_are_rejected(
    tiny: str, tmp_path: Path, tokens: Any
) -> None:
    folder = make_adapter(TRAINED_TOKENS, tiny, tmp_path / "adapter")
    change(folder, trainable_token_indices=tokens)
    said = rf"trains token (257|99999) of model\.embed_tokens, which has {TOKENS}"
    with (
        AsyncTransformer.from_name(tiny, cache_size=0) as lm,
        pytest.raises(InvalidAdapterError, match=said),
    ):
        lm.add_new_lora(folder, "a")


Tensors = dict[str, torch.Tensor]


def without(part: str) -> Any:
    return lambda tensors: {name: one for name, one in tensors.items() if part not in name}


def huge(tensors: Tensors) -> Tensors:
    return {name: tensor.float() * 1e30 for name, tensor in tensors.items()}


def with_one_more(tensors: Tensors) -> Tensors:
    return {**tensors, "base_model.model.model.nothing.weight": torch.zeros(4, 4)}


@pytest.mark.parametrize(
    ("settings", "change", "said"),
    [
        (
            {"modules_to_save": ["lm_head"]},
            without("lm_head"),
            "lacks the weights of lm_head, which modules_to_save",
        ),
        (
            {"use_dora": True},
            without("layers.1.self_attn.q_proj.lora_magn"),
            r"lacks .*layers\.1\.self_attn\.q_proj\.lora_magnitude_vector\.weight, which",
        ),
        ({"lora_bias": True}, without("lora_B.bias"), r"lacks .*lora_B\.bias,"),
        ({}, huge, "its rows are NaN, perhaps because weights exceed"),
        ({}, with_one_more, r"model\.nothing\.weight .* has nothing"),
    ],
)
def test_mismatched_weights_are_rejected(
    tiny: str, tmp_path: Path, settings: dict[str, Any], change: Any, said: str
) -> None:
    folder = make_adapter(Kind("", settings, change=change), tiny, tmp_path / "adapter")
    with AsyncTransformer.from_name(tiny) as lm:
        before = lm.next_token_logprobs_sync([1, 2, 3])
        with pytest.raises(InvalidAdapterError, match=said):
            lm.add_new_lora(folder, "a")
        assert not lm.adapters
        torch.testing.assert_close(lm.next_token_logprobs_uncached([1, 2, 3]), before)
