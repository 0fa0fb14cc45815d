"""Every family of models gives the rows of cold single forwards, whatever was asked before."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as configs
from structlog.testing import capture_logs
from transformers.models.mamba2 import modeling_mamba2

from genlm.core import EngineError, Query
from genlm.hf import strategies
from genlm.hf.engine import HFEngine
from genlm.hf.reuse import ReuseMode
from genlm.kit.kv.sharing import SharingCosts

from .models import beside, build, check_random_program, draw, proven, unproven
from .shapes import LATENT, LFM2, LLAMA4, MAMBA, QWEN3_NEXT, SHAPE, TOKENS

MIXED = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8}
OLD = {"vocab_size": TOKENS, "n_layer": 2, "n_head": 4, "eos_token_id": 256}
GPT_NEO = {
    "vocab_size": TOKENS,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 8,
    "max_position_embeddings": 256,
    "eos_token_id": 256,
}
BAMBA = {
    **SHAPE,
    "num_hidden_layers": 3,
    "attn_layer_indices": [2],
    "mamba_n_heads": 4,
    "mamba_d_state": 8,
}
SHARED = {
    "llama": configs.LlamaConfig(**SHAPE),
    "gpt2, learned positions": configs.GPT2Config(**OLD, n_embd=32, n_positions=256),
    "mistral, a window in every layer": configs.MistralConfig(**SHAPE, sliding_window=7),
    "gemma2, a window in some layers, capped": configs.Gemma2Config(**SHAPE, **MIXED),
    "gemma3": configs.Gemma3TextConfig(**SHAPE, **MIXED),
    "gpt-oss, sinks": configs.GptOssConfig(**SHAPE, **MIXED, num_local_experts=4),
    "llama4, chunks": configs.Llama4TextConfig(**LLAMA4, attention_chunk_size=6),
}
UNIFORM = {
    "bloom, alibi": configs.BloomConfig(**OLD, hidden_size=32),
    "gpt-neo, a window of its own": configs.GPTNeoConfig(**GPT_NEO),
}
SNAPSHOTS = {
    "lfm2": LFM2,
    "qwen3-next": configs.Qwen3NextConfig(**QWEN3_NEXT),
    "bamba, which counts from 0 after a state": configs.BambaConfig(**BAMBA),
}
#: A model that returns its state under a name of its own.
RWKV = configs.RwkvConfig(
    vocab_size=TOKENS, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32
)
FAMILIES = {
    **{family: (config, ReuseMode.SHARED) for family, config in SHARED.items()},
    "deepseek3, latent attention": (configs.DeepseekV3Config(**LATENT), ReuseMode.PACKED),
    **{family: (config, ReuseMode.UNIFORM) for family, config in UNIFORM.items()},
    **{family: (config, ReuseMode.SNAPSHOTS) for family, config in SNAPSHOTS.items()},
    "mamba": (MAMBA, ReuseMode.STEPWISE),
    "rwkv": (RWKV, ReuseMode.NONE),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_program(family: str) -> None:
    config, reuse = FAMILIES[family]
    with capture_logs() as events:
        model = unproven(config, max_batch_tokens=48)
    assert model.engine.reuse is reuse
    (chosen,) = [event for event in events if event["event"] == "kv.reuse_chosen"]
    assert chosen["reuse"] == reuse.value
    better = list(ReuseMode)[: list(ReuseMode).index(reuse)]
    # Each rejected mode has its reason.
    assert [*chosen["rejected"]] == [way.value for way in better]
    assert all(chosen["rejected"].values())
    with capture_logs() as events:
        check_random_program(model, seed=family)
    # and not because state is no longer reused
    assert "kv.reuse_wrong" not in {event["event"] for event in events}


def test_state_that_is_not_returned_is_not_kept() -> None:
    model = proven(RWKV)
    context = tuple(range(20))
    assert model.engine.genlm_cache_prefix(Query(context))  # this is accepted without any effect
    model.forwards.clear()
    for grown in range(3):
        model.check((*context, *range(grown)))
    assert model.forwards == [20, 21, 22]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_requested_attention_is_replaced_and_restored(attention: str) -> None:
    model = proven(configs.LlamaConfig(**SHAPE, attn_implementation=attention))
    model.check((1, 2, 3), (1, 2, 3, 4, 5))
    model.engine.genlm_close()
    assert model.engine.model.config._attn_implementation == attention


@pytest.mark.parametrize("kind", ["Gemma2", "VaultGemma"])
def test_capped_attention_matches_the_explicit_formula(kind: str) -> None:
    """The lowest transformers takes PyTorch's fused attention for it, which leaves the cap out."""
    config = getattr(configs, f"{kind}Config")(**SHAPE, **MIXED, attn_logit_softcapping=0.02)
    model = build(config)
    before = model.config._attn_implementation
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("eager")
    pair = beside(model, reference)
    context = draw(1, 24)[0]
    for length in (3, 12, 24):
        pair.check(context[:length])
    pair.engine.genlm_close()
    assert model.config._attn_implementation == before


def test_eager_attention_of_falcon_is_rejected_with_alibi() -> None:
    """transformers adds the biases twice there."""
    model = build(configs.FalconConfig(**SHAPE, alibi=True, attn_implementation="eager"))
    with pytest.raises(EngineError, match=r"alibi=True\) twice; .*attn_implementation='sdpa'"):
        HFEngine(model, None)


def test_falcon_of_a_folders_own_code_is_not_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such code mostly has eager attention alone, and it may be right."""
    model = build(configs.FalconConfig(**SHAPE, alibi=True, attn_implementation="eager"))
    kinds = {type(module) for module in model.modules()}
    for kind in kinds:
        if kind.__module__.startswith("transformers.models.falcon."):
            monkeypatch.setattr(kind, "__module__", "transformers_modules.own.modeling_falcon")
    engine = HFEngine(model, None)
    (answer,) = engine.genlm_step([Query((1, 2, 3))], (), engine.vocab_size)
    assert answer.result.isfinite().all()
    engine.genlm_close()


def test_groups_of_mamba_2_are_rejected_where_transformers_has_none(monkeypatch) -> None:
    """Transformers 5.19 normalises the features of all groups together."""

    class Ungrouped(torch.nn.Module):
        def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
            super().__init__()

    sizes = {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2}
    model = build(configs.Mamba2Config(vocab_size=TOKENS, num_hidden_layers=1, **sizes))
    monkeypatch.setattr(modeling_mamba2, "MambaRMSNormGated", Ungrouped)
    with pytest.raises(EngineError, match=r"n_groups=2 of Mamba2.* differently .*; upgrade"):
        HFEngine(model, None)


def test_the_attention_of_each_part_is_restored() -> None:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = configs.LlavaConfig(
        text_config=configs.LlamaConfig(**SHAPE),
        vision_config=configs.SiglipVisionConfig(**vision, num_attention_heads=2),
    )
    model = configs.AutoModelForImageTextToText.from_config(config).eval()
    model.set_attn_implementation({"": "sdpa", "text_config": "eager", "vision_config": "sdpa"})
    engine = HFEngine(model, None)
    assert model.config.text_config._attn_implementation == "genlm_slots"
    engine.genlm_close()
    assert model.config._attn_implementation == "sdpa"
    assert model.config.text_config._attn_implementation == "eager"


def test_attention_set_by_the_user_meanwhile_is_replaced() -> None:
    """Or that a model with the same configuration gets, as when it is closed."""
    model = proven(configs.LlamaConfig(**SHAPE))
    contexts = draw(3, 20)
    model.check(*contexts)
    model.engine.model.set_attn_implementation("eager")
    model.check(*[(*context, 1) for context in contexts], (1, 2, 3))


def test_copy_of_an_open_model_shares_prompts() -> None:
    model = proven(configs.LlamaConfig(**SHAPE))
    copied = beside(copy.deepcopy(model.engine.model), model.reference)
    assert copied.engine.reuse is ReuseMode.SHARED
    copied.check((1, 2, 3), (1, 2, 4, 5))
    copied.engine.genlm_close()
    model.check((1, 2, 3), (1, 2, 4, 5))


#: The lengths from which prefixes are shared: one within the window, and one beyond it, where the
#: long prefixes of single contexts are in trunks of their own.
SHARING_COSTS = [SharingCosts(sharing=1), SharingCosts(sharing=64, trunk=66)]


@pytest.mark.parametrize("costs", SHARING_COSTS, ids=["within a window", "beyond a window"])
@pytest.mark.parametrize("family", SHARED)
def test_rows_after_shared_prefixes_are_right(
    family: str, costs: SharingCosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategies, "SHARING_COSTS", costs)
    model = proven(SHARED[family], max_batch_tokens=48)
    (prompt,) = draw(1, costs.sharing + 2)
    model.check(*[(*prompt, token) for token in range(4)])  # the prompt is not computed yet
    check_random_program(model, f"{family} {costs}", prompt=prompt)
