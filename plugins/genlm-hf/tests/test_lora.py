"""LoRA adapters: mixed in one forward, never in state; the base model stays itself."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from genlm.core import Adapter, Query, UnsupportedError
from genlm.core.errors import InvalidAdapterError
from genlm.hf import AsyncTransformer
from genlm.hf.engine import HFEngine
from tests.adapter_kinds import KINDS, make_adapter
from tests.adapter_outcomes import reference_rows
from tests.engines import add_lora, rows_of
from tests.left_behind import random_states

pytest.importorskip("peft", reason="LoRA needs peft")

CONTEXT = [2, 8, 14, 36]


def test_adapters_present_at_load_are_kept(tiny: str, lora_folders: dict[str, str]) -> None:
    from peft import PeftModel

    model: Any = AutoModelForCausalLM.from_pretrained(tiny)
    # This puts PEFT's layers into the model.
    PeftModel.from_pretrained(model, lora_folders["a"]).eval()
    before = model(torch.tensor([[1, 2, 3]])).logits
    engine = HFEngine(model, None)
    with pytest.raises(UnsupportedError, match="merge_and_unload"):
        add_lora(engine, Adapter("b", lora_folders["b"], 1))
    engine.genlm_close()
    assert torch.equal(model(torch.tensor([[1, 2, 3]])).logits, before)


def test_offloaded_model_gives_rows_but_rejects_lora(
    tiny: str, lora_folders: dict[str, str], tmp_path: Path
) -> None:
    places = {"model.layers.1": "disk"}
    for name in ("embed_tokens", "layers.0", "norm", "rotary_emb"):
        places[f"model.{name}"] = "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(
        tiny, device_map={**places, "lm_head": "cpu"}, offload_folder=tmp_path, dtype=torch.float32
    )
    engine = HFEngine(model, None)
    with pytest.raises(UnsupportedError, match=r"layers\.1.* LoRA needs all weights in memory"):
        add_lora(engine, Adapter("a", lora_folders["a"], 1))
    row = rows_of(engine, [Query(tuple(CONTEXT))])[0]
    engine.genlm_close()
    plain = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    expected = plain(torch.tensor([CONTEXT])).logits[0, -1].log_softmax(-1)
    torch.testing.assert_close(row, expected, atol=1e-4, rtol=0)


def test_an_adapter_leaves_the_random_generators_alone(
    tiny: str, lora_folders: dict[str, str]
) -> None:
    engine = HFEngine(AutoModelForCausalLM.from_pretrained(tiny), None)
    before = random_states()
    add_lora(engine, Adapter("a", lora_folders["a"], 1))
    assert random_states() == before


def test_adapters_by_turns_touch_no_weights(
    tiny: str, lora_folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT's own switch sets, for each weight of all adapters, whether it is trained. With many
    adapters that takes longer than a forward."""
    engine = HFEngine(AutoModelForCausalLM.from_pretrained(tiny), None)
    a, b = Adapter("a", lora_folders["a"], 1), Adapter("b", lora_folders["b"], 2)
    for adapter in (a, b):
        add_lora(engine, adapter)
    contexts = [tuple(CONTEXT)]
    expected = {each: reference_rows(tiny, each and each.path, contexts) for each in (None, a, b)}
    touched: list[object] = []
    monkeypatch.setattr(torch.nn.Parameter, "requires_grad_", lambda *how: touched.append(how))
    for turn in (a, b, None, a, None, b):
        rows = rows_of(engine, [Query(contexts[0], turn)])
        torch.testing.assert_close(rows[0], expected[turn][0], atol=1e-4, rtol=0)
    assert not touched


def test_error_in_a_mixed_batch_leaves_no_hooks(tiny: str, lora_folders: dict[str, str]) -> None:
    """The next batches have as many rows as the failed one, so leftover hooks would apply to
    them."""
    engine = HFEngine(AutoModelForCausalLM.from_pretrained(tiny), None)
    a, b = Adapter("a", lora_folders["a"], 1), Adapter("b", lora_folders["b"], 2)
    for adapter in (a, b):
        add_lora(engine, adapter)
    contexts = [(1, 2, 3, at) for at in range(2)]
    expected = {each: reference_rows(tiny, each and each.path, contexts) for each in (None, a, b)}

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = engine.model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        rows_of(engine, [Query((1, 2, 3)), Query((1, 2, 3), a)])
    hook.remove()
    for pair in ([None, None], [b, b], [a, None], [b, a], [a, a]):
        engine.genlm_clear_kv_cache()
        given = rows_of(engine, [Query(*one) for one in zip(contexts, pair, strict=True)])
        for at, (row, each) in enumerate(zip(given, pair, strict=True)):
            torch.testing.assert_close(row, expected[each][at], atol=1e-4, rtol=0)


def test_missing_folder_is_reported_before_peft_is_imported(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To import PEFT takes seconds."""
    with AsyncTransformer.from_name(tiny) as lm:
        monkeypatch.setitem(sys.modules, "peft", None)  # importing it now raises an error
        with pytest.raises(
            InvalidAdapterError, match=r"no/such/folder/adapter_config\.json does not exist"
        ):
            lm.add_new_lora("no/such/folder", "a")


# PEFT would warn of every module if the active adapter is removed.
@pytest.mark.filterwarnings("error:Adapter .* was active")
def test_base_model_is_unchanged_for_any_order_of_adapters(
    tiny: str, lora_folders: dict[str, str]
) -> None:
    # The adapters change different modules, so PEFT wraps some only later.
    orders = itertools.permutations("ab")
    with AsyncTransformer.from_name(tiny, cache_size=0) as lm:
        base = lm.next_token_logprobs_uncached(CONTEXT)

        def check() -> None:
            row = lm.next_token_logprobs_uncached(CONTEXT)
            torch.testing.assert_close(row, base, atol=1e-4, rtol=0)

        for order, asked in itertools.product(orders, (None, "a", "b")):
            for name in order:
                lm.add_new_lora(lora_folders[name], name)
                check()
            if asked is not None:
                row = lm.next_token_logprobs_uncached(CONTEXT, lora_name=asked)
                assert not torch.allclose(row, base, atol=1e-2)
                check()
            for name in order:
                lm.remove_lora(name)
                check()


#: Kinds that change one layer in different ways.
PAIRS = [
    ("LoRA on the embedding", "`trainable_token_indices`"),
    ("LoRA on the embedding", "`modules_to_save`: the embedding"),
    ("`modules_to_save`: the embedding", "`trainable_token_indices`"),
    ("LoRA on the output layer", "`modules_to_save`: the output layer"),
    ("every linear layer", "`target_parameters`"),
]


@pytest.mark.parametrize("kinds", PAIRS)
def test_a_layer_is_changed_in_one_way_at_a_time(
    tiny: str, tmp_path: Path, kinds: tuple[str, str]
) -> None:
    by_name = {kind.name: kind for kind in KINDS}
    folders = {
        name: make_adapter(by_name[kind], tiny, tmp_path / name)
        for name, kind in (("first", kinds[0]), ("plain", "plain"), ("second", kinds[1]))
    }
    expected = {
        name: reference_rows(tiny, folders.get(name), [CONTEXT])[0] for name in (None, *folders)
    }
    with AsyncTransformer.from_name(tiny, cache_size=0) as lm:

        def check(names: Sequence[str | None]) -> None:
            for name in names:
                row = lm.next_token_logprobs_sync(CONTEXT, lora_name=name)
                torch.testing.assert_close(row, expected[name], atol=1e-4, rtol=0)

        lm.add_new_lora(folders["plain"], "plain")
        for one, other in (("first", "second"), ("second", "first")):
            lm.add_new_lora(folders[one], one)
            names = [name for name, _ in lm.underlying_model.named_parameters()]
            with pytest.raises(InvalidAdapterError, match=f"adapter '{one}' does so by .*, and PE"):
                lm.add_new_lora(folders[other], other)
            assert [name for name, _ in lm.underlying_model.named_parameters()] == names
            check([None, one, "plain"])
            lm.remove_lora(one)


def test_two_adapters_change_the_same_parameters(tiny: str, tmp_path: Path) -> None:
    (kind,) = (each for each in KINDS if each.name == "`target_parameters`")
    folders = [make_adapter(kind, tiny, tmp_path / str(seed), seed) for seed in (1, 2)]
    with AsyncTransformer.from_name(tiny, cache_size=0) as lm:
        for folder in folders:
            lm.add_new_lora(folder, folder)
        for folder in folders:
            (expected,) = reference_rows(tiny, folder, [CONTEXT])
            row = lm.next_token_logprobs_sync(CONTEXT, lora_name=folder)
            torch.testing.assert_close(row, expected, atol=1e-4, rtol=0)
