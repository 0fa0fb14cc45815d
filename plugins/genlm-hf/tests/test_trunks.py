"""Prefixes that contexts share are computed once, kept once and read once; rows stay right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from genlm.core import Adapter, EngineError, Query
from genlm.kit.kv.sharing import Worth
from tests.engines import add_lora, rows_of

Contexts = Callable[..., list[tuple[int, ...]]]
Make = Callable[..., Any]


def test_a_prompt_is_kept_once(pair: Make, llama_config: Make, contexts: Contexts) -> None:
    """32 contexts behind a prompt that fits twice, but not 32 times."""
    config = llama_config(max_position_embeddings=1100)
    model = pair(config, kv_cache_bytes=(2000 + 40 * 64) * 256)
    (prompt,) = contexts(1, 1000)
    live = [(*prompt, token) for token in range(32)]
    model.check(*live)
    model.forwards.clear()
    for token in range(3):
        live = [(*context, token) for context in live]
        model.check(*live)
    assert model.forwards == [32] * 3


def test_a_prompt_waits_for_the_next_forward(
    pair: Make, llama_config: Make, contexts: Contexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another context fills the first forward; nothing of the shared prompt is in it."""
    monkeypatch.setattr("genlm.hf.strategies.WORTH", Worth(waiting=2, sharing=1, trunk=2))
    model = pair(llama_config(), max_batch_tokens=50)
    other, prompt = contexts(2, 100)
    whole = [(*other, 1), *((*prompt, token, 5) for token in range(4))]
    given = model.engine.genlm_sequence_logprobs(
        [Query(context[:-1]) for context in whole], [context[-1:] for context in whole]
    )
    expected = model.expected(*(context[:-1] for context in whole))
    for context, row, scores in zip(whole, expected, given, strict=True):
        torch.testing.assert_close(scores[0], row[context[-1]], atol=1e-4, rtol=0)


def test_a_pinned_prompt_is_read_by_all(llama: Any, contexts: Contexts) -> None:
    prompt, *others = contexts(5, 100)
    llama.engine.genlm_cache_prefix(Query(prompt))
    llama.forwards.clear()
    llama.check(*[(*prompt, token) for token in range(5)], *others)
    assert llama.forwards == [5 + 400]


def test_a_trunk_belongs_to_an_adapter(
    beside: Make, tiny: str, lora_folders: dict[str, str], contexts: Contexts
) -> None:
    peft = pytest.importorskip("peft", reason="LoRA needs peft")
    from transformers import AutoModelForCausalLM

    base = [AutoModelForCausalLM.from_pretrained(tiny) for _ in range(2)]
    adapted = peft.PeftModel.from_pretrained(base[1], lora_folders["a"]).eval()
    model = beside(base[0], adapted)
    adapter = Adapter("a", lora_folders["a"], 1)
    add_lora(model.engine, adapter)
    (prompt,) = contexts(1, 100)
    for _ in range(2):
        live = [(*prompt, token) for token in range(3)]
        given = rows_of(
            model.engine, [Query(context, which) for context in live for which in (adapter, None)]
        )
        torch.testing.assert_close(given[::2], model.expected(*live), atol=1e-4, rtol=0)
        with adapted.disable_adapter():
            torch.testing.assert_close(given[1::2], model.expected(*live), atol=1e-4, rtol=0)
        prompt = (*prompt, 7)


def test_a_failed_forward_leaves_the_tree_sound(llama: Any, contexts: Contexts) -> None:
    (prompt,) = contexts(1, 100)
    live = [(*prompt, token) for token in range(4)]
    llama.check(*live)

    def fail(module: torch.nn.Module, args: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    hook = llama.engine.model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(EngineError):
        llama.ask(*[(*live[0], token) for token in range(4)], contexts(1, 150, seed=1)[0])
    hook.remove()
    for token in range(3):
        live = [(*context, token) for context in live]
        llama.check(*live, (*live[0][:101], token))
