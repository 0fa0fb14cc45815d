"""LoRA adapters: mixed in one forward, never in state."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from genlm.core import Adapter, Query, UnsupportedError
from genlm.core.errors import InvalidAdapterError
from genlm.hf.engine import HFEngine
from tests.adapter_outcomes import reference_rows
from tests.engines import add_lora, rows_of

Contexts = Callable[..., list[tuple[int, ...]]]


@pytest.fixture
def engine(tiny: str) -> HFEngine:
    return HFEngine(AutoModelForCausalLM.from_pretrained(tiny), None)


def check(engine: HFEngine, tiny: str, queries: Sequence[Query]) -> None:
    """Rows that are asked together are those of transformers and PEFT."""
    for query, row in zip(queries, rows_of(engine, queries), strict=True):
        adapter = query.adapter and query.adapter.path
        (expected,) = reference_rows(tiny, adapter, [query.token_ids])
        torch.testing.assert_close(row, expected, atol=1e-4, rtol=0)


def test_adapters_that_the_model_had_before_are_left_alone(
    tiny: str, lora_folders: dict[str, str]
) -> None:
    from peft import PeftModel

    model: Any = AutoModelForCausalLM.from_pretrained(tiny)
    PeftModel.from_pretrained(model, lora_folders["a"]).eval()  # puts its layers into the model
    before = model(torch.tensor([[1, 2, 3]])).logits
    engine = HFEngine(model, None)
    adapter = Adapter("b", lora_folders["b"], 1)
    with pytest.raises(UnsupportedError, match="merge_and_unload"):
        add_lora(engine, adapter)
    engine.genlm_close()
    assert torch.equal(model(torch.tensor([[1, 2, 3]])).logits, before)


def test_a_mixed_batch_is_one_forward(
    engine: HFEngine, tiny: str, lora_folders: dict[str, str], contexts: Contexts
) -> None:
    adapters = [None, Adapter("a", lora_folders["a"], 1), Adapter("b", lora_folders["b"], 2)]
    for adapter in adapters[1:]:
        assert add_lora(engine, adapter)
    forwards: list[int] = []
    engine.model.register_forward_pre_hook(
        lambda module, args, kwargs: forwards.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    prompts = contexts(2, 12)
    for grown in range(3):
        queries = [
            Query(prompt + (7,) * grown, adapter) for prompt in prompts for adapter in adapters
        ]
        check(engine, tiny, queries)
    assert forwards == [6 * 12, 6, 6]
    for adapter in adapters:  # and each alone
        check(engine, tiny, [Query((1, 2, 3), adapter)])


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError, KeyboardInterrupt])
def test_an_error_inside_a_mixed_batch_leaves_nothing(
    engine: HFEngine, tiny: str, lora_folders: dict[str, str], error: type[BaseException]
) -> None:
    """The next batches have as many rows as the failed one: what it left would go unnoticed."""
    a, b = Adapter("a", lora_folders["a"], 1), Adapter("b", lora_folders["b"], 2)
    for adapter in (a, b):
        add_lora(engine, adapter)
    context = (1, 2, 3)

    def fail(*_: Any) -> None:
        raise error("in the middle of the forward")

    hook = engine.model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(BaseException, match=r"middle|memory"):
        rows_of(engine, [Query(context), Query(context, a)])
    hook.remove()
    for pair in ([None, None], [b, b], [a, None], [b, a], [a, a]):
        contexts = [(*context, at) for at in range(2)]
        queries = [Query(ids, each) for ids, each in zip(contexts, pair, strict=True)]
        engine.genlm_clear_kv_cache()
        check(engine, tiny, queries)


@pytest.mark.parametrize("others", [0, 1])
def test_an_adapter_that_fails_while_it_is_loaded_leaves_nothing(
    engine: HFEngine,
    tiny: str,
    lora_folders: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    others: int,
) -> None:
    from peft import PeftModel

    adapters = [Adapter("a", lora_folders["a"], 1)][:others]
    for adapter in adapters:
        add_lora(engine, adapter)

    def parameters() -> set[str]:  # PEFT moves some, and leaves them there
        names = {name for name, _ in engine.model.named_parameters()}
        return {name.replace(".base_layer", "") for name in names}

    load = PeftModel.load_adapter

    def load_a_part(*given: Any, **options: Any) -> Any:
        result = load(*given, **options)
        result.unexpected_keys.append("elsewhere")
        return result

    before, failing = parameters(), Adapter("b", lora_folders["b"], 2)
    with monkeypatch.context() as patch:
        patch.setattr(PeftModel, "load_adapter", load_a_part)
        with pytest.raises(InvalidAdapterError, match="has elsewhere, which this model"):
            add_lora(engine, failing)
    assert parameters() == before
    add_lora(engine, failing)
    check(engine, tiny, [Query((1, 2, 3), each) for each in (None, failing, *adapters)])


def test_a_folder_that_is_not_there_is_said_before_peft_is_imported(tiny: str) -> None:
    """To import PEFT takes seconds."""
    program = """
import sys
from genlm.core import load_model_by_name
from genlm.core.errors import InvalidAdapterError

lm = load_model_by_name(sys.argv[1], "hf")
try:
    lm.add_new_lora("no/such/folder", "a")
except InvalidAdapterError as error:
    assert "no/such/folder/adapter_config.json does not exist" in str(error)
    assert "peft" not in sys.modules
    print("refused")
"""
    ran = subprocess.run(
        [sys.executable, "-c", program, tiny], capture_output=True, text=True, timeout=300
    )
    assert ran.stdout == "refused\n", ran.stderr
