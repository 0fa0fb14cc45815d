"""Every setting of a configuration is computed as in transformers; otherwise contexts are limited,
or the model is rejected by name."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from vllm.model_executor.models.registry import ModelRegistry
from vllm.model_executor.models.transformers import base

from genlm.core import EngineError, InvalidOptionError, ModelNotFoundError, Query
from genlm.core.errors import UnsupportedError
from genlm.vllm import cache_size
from genlm.vllm.settings import corrections
from tests.adapter_outcomes import reference_rows

from .driven import SMALL, text

#: The lengths at which windows and scaling begin to matter, and the lengths that are tried.
THRESHOLD = 20
LENGTHS = (
    5,
    THRESHOLD - 1,
    THRESHOLD,
    THRESHOLD + 1,
    THRESHOLD + 4,
    2 * THRESHOLD + 1,
    4 * THRESHOLD + 1,
)

SHAPE = {"head_dim": 32, "max_position_embeddings": 256, "sliding_window": THRESHOLD}
MIXED = {**SHAPE, "layer_types": ["sliding_attention", "full_attention"]}
QWEN = {**MIXED, "use_sliding_window": True, "max_window_layers": 1}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0} | {
    "original_max_position_embeddings": THRESHOLD
}
SCALED = {**YARN, "factor": 4.0, "llama_4_scaling_beta": 0.5}
MINISTRAL = {"head_dim": 32, "max_position_embeddings": 4 * THRESHOLD, "rope_parameters": SCALED}
DYNAMIC = {
    "max_position_embeddings": THRESHOLD,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
}
LONGROPE = {
    "original_max_position_embeddings": THRESHOLD,
    "max_position_embeddings": 256,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + 0.1 * i for i in range(16)],
        "long_factor": [2.0 + 0.5 * i for i in range(16)],
        "original_max_position_embeddings": THRESHOLD,
    },
}


@pytest.mark.parametrize(
    ("family", "config", "engine_opts", "longest", "said"),
    [
        ("Mistral", {"sliding_window": THRESHOLD}, {}, 255, ["forks_off"]),
        ("Gemma3Text", MIXED, {}, 255, ["forks_off"]),
        ("Cohere2", MIXED, {}, 255, ["forks_off"]),
        ("Falcon", {"max_position_embeddings": 256}, {}, 255, []),
        ("Phi3", MIXED, {"max_model_len": THRESHOLD}, THRESHOLD - 1, []),
        ("Qwen2", QWEN, {"max_model_len": THRESHOLD}, THRESHOLD - 1, []),
        ("Llama", SHAPE, {}, 255, []),  # the family has no windows, whatever its configuration says
        (
            "Llama",
            {"head_dim": 32, "rope_parameters": YARN},
            {"max_model_len": 96},
            2 * THRESHOLD - 1,
            ["context_ends"],
        ),
        ("Ministral3", MINISTRAL, {"max_model_len": None}, THRESHOLD - 1, ["context_ends"]),
        ("Phi3", LONGROPE, {}, THRESHOLD - 1, ["context_ends"]),
        # vLLM would allow four times as many tokens, and read beyond the table of embeddings.
        ("Llama", DYNAMIC, {"max_model_len": 4 * THRESHOLD}, THRESHOLD, ["context_limited"]),
    ],
)
def test_rows_match_transformers(
    family, config, engine_opts, longest, said, make_tiny, load_briefly
):
    """The rows are cold ones, and those of sessions that grow across a threshold. Scores agree with
    them."""
    folder = make_tiny(family, **config)
    with capture_logs() as logs:
        engine = load_briefly(folder, **engine_opts)
    assert engine.max_context == longest
    events = [log["event"] for log in logs]
    own = [event.removeprefix("vllm.") for event in events if event.startswith("vllm.")]
    assert [event for event in own if event != "loaded"] == said
    lengths = [length for length in LENGTHS if length <= longest]
    ids = text(1, lengths[-1])
    contexts = [ids[:length] for length in lengths]
    expected = reference_rows(folder, None, contexts)
    (scores,) = engine.score([Query(contexts[0])], [ids[lengths[0] :]])
    for context, right in zip(contexts, expected, strict=True):
        cold, warm = (engine.ask(Query(context, cold=cold))[0] for cold in (True, False))
        torch.testing.assert_close(cold, right, atol=2e-3, rtol=0)
        torch.testing.assert_close(warm, cold, atol=5e-4, rtol=0)
        if context != ids:
            score = scores[len(context) - lengths[0]]
            torch.testing.assert_close(score, cold[ids[len(context)]], atol=5e-4, rtol=0)


FLIPPED = ["full_attention", "sliding_attention"]
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
PARTLY = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


GRANITE = {"logits_scaling": 4.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5}


def test_the_class_of_the_family_is_served(make_tiny, load_briefly):
    """transformers goes by ``model_type``, vLLM by ``architectures``."""
    folder = Path(make_tiny("Granite", **GRANITE))
    said = (folder / "config.json").read_text()
    (folder / "config.json").write_text(said.replace("GraniteForCausalLM", "LlamaForCausalLM"))
    with capture_logs() as logs:
        engine = load_briefly(str(folder))
    assert [one["taken"] for one in logs if one["event"] == "class.corrected"]
    (expected,) = reference_rows(folder, None, [text(1, 12)])
    torch.testing.assert_close(engine.ask(Query(text(1, 12)))[0], expected, atol=2e-3, rtol=0)
    chosen = {"architectures": ["LlamaForCausalLM"]}
    assert corrections(str(folder), {"hf_overrides": chosen}) == {}


def test_overrides_are_part_of_the_configuration(make_tiny):
    """And a length that vLLM is to choose is none that was given."""
    folder = make_tiny("Qwen2", weights=False, **QWEN)
    whole = {"use_sliding_window": False}
    assert corrections(folder, {"hf_overrides": whole}) == {}
    with pytest.raises(EngineError, match=f"have a window of {THRESHOLD} tokens"):
        corrections(folder, {"max_model_len": -1})


def unchanged(config):
    return config


def with_theta(config):
    config.rope_theta = 500.0
    return config


def windowed(config):
    config.update({"sliding_window": THRESHOLD, "layer_types": MIXED["layer_types"]})
    return config


PLAIN = {"rope_type": "default", "rope_theta": 1e6}
LONGER = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
#: A family, its configuration, options, and the configuration that they result in.
MEANT = {
    "theta alone": ("Qwen2", {}, {"hf_overrides": {"rope_theta": 500.0}}, {"rope_theta": 500.0}),
    "theta by a function": ("Qwen2", {}, {"hf_overrides": with_theta}, {"rope_theta": 500.0}),
    "scaling": ("Qwen2", {}, {"hf_overrides": {"rope_scaling": LONGER}}, LONGER),
    "parameters": ("Qwen2", {}, {"hf_overrides": {"rope_parameters": LONGER}}, LONGER),
    "a function": ("Cohere2", MIXED, {"hf_overrides": unchanged}, {}),
    "a window by a function": ("Cohere2", SHAPE, {"hf_overrides": windowed}, {}),
    "by transformers": ("Cohere2", MIXED, {"model_impl": "transformers"}, {}),
}


@pytest.mark.parametrize("how", MEANT)
def test_options_that_change_the_configuration_are_computed(
    how, make_tiny, load_briefly, monkeypatch
):
    """They give the same rows as a changed config.json."""
    # This family would change classes of transformers, from which further models are made.
    monkeypatch.setattr(base, "support_torch_compile", lambda **_: lambda kind: kind)
    family, config, options, meant = MEANT[how]
    rope = {} if family == "Cohere2" else {"rope_parameters": PLAIN, "max_position_embeddings": 256}
    folder = make_tiny(family, **{"head_dim": 32, **config, **rope})
    settings = AutoConfig.from_pretrained(folder)
    if meant:
        settings.rope_parameters = {**PLAIN, **meant}
    if "hf_overrides" in options and how.endswith("window by a function"):
        settings = windowed(settings)
    reference = AutoModelForCausalLM.from_pretrained(
        folder, config=settings, attn_implementation="eager"
    )
    ids = text(1, 41)
    with torch.no_grad():
        expected = reference(torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1)
    engine = load_briefly(folder, **options)
    (row,) = engine.ask(Query(ids, cold=True))
    torch.testing.assert_close(row, expected, atol=2e-3, rtol=0)


def test_configuration_of_another_folder_is_corrected(make_tiny, tmp_path):
    """Its settings are corrected, and not those of the weights' own folder."""
    folder = make_tiny("Cohere2", weights=False, **{**MIXED, "sliding_window": 200})
    AutoConfig.from_pretrained(folder, sliding_window=THRESHOLD).save_pretrained(tmp_path)
    corrected = corrections(folder, {"hf_config_path": str(tmp_path)})
    assert corrected == {"hf_overrides": {"sliding_window": THRESHOLD - 1}}


def test_configuration_function_cannot_bypass_rejected_settings(make_tiny):
    folder = make_tiny("Olmoe", weights=False, num_experts=4, clip_qkv=2.0)
    with pytest.raises(EngineError, match=r'clip_qkv=2.0 of olmoe.*backend="hf"'):
        corrections(folder, {"hf_overrides": unchanged})


def test_factor_of_logits_is_rejected_where_transformers_code_runs(make_tiny):
    """vLLM's output layer leaves it out, which its own class of the family applies."""
    folder = make_tiny("Granite", weights=False, logits_scaling=8.0)
    assert corrections(folder, {}) == {}
    said = r"logits_scaling=8.0 of granite: .* leave out model_impl='transformers', or load"
    with pytest.raises(EngineError, match=said):
        corrections(folder, {"model_impl": "transformers"})


def test_factor_of_logits_is_rejected_by_the_class_that_vllm_loads(
    make_tiny, load_briefly, monkeypatch
):
    """Without an option: vLLM has no class of the family, as of many."""
    folder = make_tiny("Granite", logits_scaling=8.0)
    # This family would change classes of transformers, from which further models are made.
    monkeypatch.setattr(base, "support_torch_compile", lambda **_: lambda kind: kind)
    monkeypatch.delitem(ModelRegistry.models, "GraniteForCausalLM")
    said = r"logits_scaling=8.0 of granite: vLLM leaves it out .* code; load the model with"
    with pytest.raises(EngineError, match=said):
        load_briefly(folder)


@pytest.mark.parametrize("setting", [{"logit_scale": 0.5}, {"final_logit_softcapping": 2.0}])
def test_settings_of_vllms_own_output_layer_are_rejected(make_tiny, setting):
    """It takes them for any family that it runs by transformers' code."""
    folder = make_tiny("Llama", weights=False, **setting)
    ((name, value),) = setting.items()
    said = rf"{name}={value} of llama: vLLM applies it, where transformers does not"
    with pytest.raises(EngineError, match=said):
        corrections(folder, {"model_impl": "transformers"})


def test_other_files_beside_the_weights_are_passed_over(make_tiny, load_briefly, tmp_path):
    """vLLM would read every file of safetensors."""
    folder = shutil.copytree(make_tiny("Llama"), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    others = {name: torch.randn_like(each) for name, each in weights.items()}
    for name in ("consolidated", "model.fp16"):
        save_file(others, folder / f"{name}.safetensors", {"format": "pt"})
    (expected,) = reference_rows(str(folder), None, [text(1, 9)])
    (row,) = load_briefly(str(folder)).ask(Query(text(1, 9)))
    torch.testing.assert_close(row, expected, atol=2e-3, rtol=0)


LONG = {"max_position_embeddings": 1 << 17, "num_key_value_heads": 4, "head_dim": 32}


def test_contexts_fit_the_cache_that_the_memory_allows(make_tiny, load_briefly, monkeypatch):
    """The longest context takes 256 MiB, but the cache may take only half of that."""
    folder, sizes = make_tiny("Llama", **LONG), {}
    monkeypatch.setattr(cache_size, "MIN_CACHE_BYTES", 1 << 20)
    monkeypatch.setattr(cache_size, "available_memory", lambda: 256 << 20)
    for name in ("max_model_len", "kv_cache_memory_bytes"):
        sizes[name] = None
    with capture_logs() as logs:
        engine = load_briefly(folder, **sizes)
    (warning,) = [log for log in logs if log["event"] == "vllm.context_shortened"]
    assert warning["log_level"] == "warning"
    assert warning["to"] == engine.max_context
    assert (1 << 14) < engine.max_context < (1 << 16)
    (expected,) = reference_rows(folder, None, [text(1, 70)])
    torch.testing.assert_close(engine.ask(Query(text(1, 70)))[0], expected, atol=2e-3, rtol=0)


def test_a_cache_without_room_names_the_options_that_help(make_tiny, load_briefly):
    folder = make_tiny("Llama", **LONG)
    said = r"kv_cache_memory_bytes'\] is 1048576, .*max_model_len=4096 .*give a larger kv_cache_mem"
    with pytest.raises(InvalidOptionError, match=said):
        load_briefly(folder, max_model_len=4096, kv_cache_memory_bytes=1 << 20)


def test_other_weights_for_a_loaded_model_are_explained(make_tiny, load_briefly):
    """On a CPU, vLLM repacks the loaded weights."""
    folder = make_tiny("Llama")
    engine = load_briefly(folder)
    weights = load_file(Path(folder, "model.safetensors"))
    with pytest.raises(UnsupportedError, match=r"packed the weights .*to a folder and"):
        engine.model.load_weights(weights.items())


def test_a_model_is_loaded_beside_numba(make_tiny, load_briefly):
    import_module("llvmlite.binding")  # numba does

    assert len(load_briefly(make_tiny("Llama")).ask(Query((1, 2, 3)))) == 1


def test_states_of_mamba_are_not_kept_between_blocks_on_a_cpu(make_tiny):
    folder = make_tiny("Mamba2", weights=False, num_heads=4, head_dim=16, hidden_size=32)
    for given in ({}, {"enable_prefix_caching": False}, {"enable_prefix_caching": None}):
        assert corrections(folder, given) == {"enable_prefix_caching": False}
    with pytest.raises(
        InvalidOptionError, match=r"'enable_prefix_caching'.*mamba2 on a CPU.*leave"
    ):
        corrections(folder, {"enable_prefix_caching": True})


def test_a_family_that_names_no_usual_activation_is_not_rejected(monkeypatch):
    """In transformers 4, a configuration class has no such attribute."""
    settings = PreTrainedConfig(num_experts=4, hidden_act="silu", model_type="mixtral")
    monkeypatch.setattr("genlm.vllm.settings.whole_settings_of", lambda *given: settings)
    assert corrections("any", {}) == {}


@pytest.mark.parametrize(
    ("family", "config", "said"),
    [
        ("Qwen2", QWEN, f"have a window of {THRESHOLD} tokens"),
        ("Phi3", MIXED, f"have a window of {THRESHOLD} tokens"),
        ("Mixtral", MIXED | EXPERTS, f"have a window of {THRESHOLD} tokens"),
        (
            "GptOss",
            SHAPE | EXPERTS | {"layer_types": FLIPPED},
            f"have a window of {THRESHOLD} tokens",
        ),
        ("GptOss", SHAPE | EXPERTS | {"rope_parameters": LINEAR}, "rope_parameters=.* of gpt_oss"),
        ("Cohere2", SHAPE | {"hidden_act": "relu"}, "hidden_act='relu' of cohere2"),
        ("Olmoe", {"num_experts": 4, "clip_qkv": 2.0}, "clip_qkv=2.0 of olmoe"),
        ("Falcon", {"activation": "relu"}, "activation='relu' of falcon"),
        ("Phimoe", {"lm_head_bias": True}, "lm_head_bias=True of phimoe"),
        ("Gemma", SHAPE | {"hidden_act": "silu"}, "hidden_act='silu' of gemma"),
        ("Mixtral", EXPERTS | {"hidden_act": "relu"}, "hidden_act='relu' of mixtral"),
        ("Falcon", {"ffn_hidden_size": 256}, "ffn_hidden_size=256 of falcon"),
        ("Qwen2", SHAPE | {"rope_parameters": PARTLY}, "partial_rotary_factor=0.5 of qwen2"),
        ("Exaone4", SHAPE | {"rope_parameters": PARTLY}, "partial_rotary_factor=0.5 of exaone4"),
        ("HrmText", {"head_dim": 32}, "lets its tokens attend to later ones"),
        ("Ernie4_5_Moe", {"moe_num_experts": 4, "moe_k": 2}, "e_score_correction_bias"),
        ("DeepseekV3", {}, "kv_lora_rank"),
        ("Lfm2", {}, "num_attention_heads of lfm2: .* on a CPU"),
    ],
)
def test_settings_that_vllm_misreads_are_rejected(family, config, said, make_tiny):
    with pytest.raises(EngineError, match=f'{said}.*backend="hf"'):
        corrections(make_tiny(family, weights=False, **config), SMALL)


@pytest.mark.parametrize(
    ("family", "config", "said"),
    [
        ("MiniMaxM2", EXPERTS, "rotary_dim"),
        ("Llama", {"head_dim": 4}, "head_dim=4"),
        ("Bamba", {}, r"Layer 0 \(linear_attention\)"),
        ("Llama", {"quantization_config": {"quant_method": "eetq"}}, "Unknown quantization method"),
    ],
)
def test_error_of_vllm_is_quoted_for_a_rejected_model(
    family, config, said, make_tiny, load_briefly
):
    with pytest.raises(EngineError, match=f'vLLM cannot serve .*{said}.*; load it with backend="h'):
        load_briefly(make_tiny(family, **config))


def test_a_checkpoint_that_lacks_weights_is_rejected(make_tiny, load_briefly):
    """vLLM would serve uninitialised memory in joined matrices."""
    folder = make_tiny("Llama")
    file = Path(folder) / "model.safetensors"
    weights = {name: one for name, one in load_file(file).items() if "1.mlp.up_proj" not in name}
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelNotFoundError, match="lacks weights of LlamaForCausalLM"):
        load_briefly(folder)


def test_vllms_error_about_an_option_is_unchanged(load_briefly):
    """Another backend would be no remedy."""
    with pytest.raises(ValueError, match=r"max_model_len \(4096\) is greater") as refusal:
        load_briefly(max_model_len=4096)
    assert not isinstance(refusal.value, EngineError)
