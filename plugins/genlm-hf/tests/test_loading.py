"""From a name to a model."""

from __future__ import annotations

import importlib.util
import inspect
import json
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertModel,
    BitsAndBytesConfig,
    LlamaConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.utils import find_adapter_config_file

from genlm.core import (
    AsyncLM,
    EngineError,
    InvalidInputError,
    InvalidOptionError,
    ModelNotFoundError,
    UnsupportedError,
    hookimpl,
    load_model_by_name,
)
from genlm.core.mock import ByteTokenizer
from genlm.hf import AsyncTransformer
from genlm.hf.loading import load_pretrained
from genlm.hf.options import ELSEWHERE, HFOptions
from genlm.kit.checkpoints import without_adapter
from tests.left_behind import left_behind
from tools.tiny import write_adapter, write_tokenizer, write_variant

from .families import small_family
from .models import build, row_of
from .shapes import SHAPE, TOKENS

CONTEXT = [104, 101, 108, 108, 111]
UP = "model.layers.1.mlp.up_proj.weight"


def loaded(folder: str) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def expected(folder: str) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder)
    return model(torch.tensor([CONTEXT])).logits[0, -1].float().log_softmax(-1)


def test_by_name_by_class_and_already_loaded(tiny: str) -> None:
    ways = (
        lambda: load_model_by_name(tiny, "hf", {"max_batch_tokens": 7, "cache_size": 10}),
        lambda: AsyncTransformer.from_name(tiny, hf_opts={"attn_implementation": "eager"}),
        lambda: AsyncTransformer(*loaded(tiny), kv_cache_bytes=1 << 20),
    )
    right = expected(tiny)
    for way in ways:
        with way() as lm:
            row = lm.next_token_logprobs_sync(CONTEXT)
        torch.testing.assert_close(row, right, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
def test_multimodal_model_serves_text(family: str, tmp_path: Path) -> None:
    model = small_family(family, 200)
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    with load_model_by_name(str(tmp_path), "hf") as lm:
        assert type(lm.underlying_model) is type(model)
        context = [token % 60 for token in CONTEXT]
        for length in range(1, len(context) + 1):
            row = lm.next_token_logprobs_sync(context[:length])
            right = row_of(model, context[:length]).float()
            torch.testing.assert_close(row[: len(right)], right, atol=1e-4, rtol=0)


@pytest.mark.parametrize("rope", [None, {"type": "dynamic", "factor": 2.0}])
def test_unknown_family_is_named(tiny: str, tmp_path: Path, rope: Any) -> None:
    """transformers itself fails on some settings of a family that it does not have."""
    folder = shutil.copytree(tiny, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "strange", "rope_scaling": rope, "auto_map": {"AutoConfig": "own.Own"}}
    del config["max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match=r"family 'strange', .*'trust_remote_code': True}"):
        load_model_by_name(str(folder), "hf")


#: Two kinds of templates: those of multimodal models, which need a list of parts and silently drop
#: strings; and others, which write whatever they are given.
IN_PARTS = (
    "{% for m in messages %}{{ m['role'] + ': ' }}{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %};{% endfor %}"
)
AS_IT_IS = "{% for m in messages if m.type is not defined %}{{ m['content'] | upper }};{% endfor %}"


@pytest.mark.parametrize(
    ("template", "said"), [(IN_PARTS, "system: brief;user: Hi!;"), (AS_IT_IS, "BRIEF;HI!;")]
)
def test_chat_template_renders_the_messages(tiny: str, template: str, said: str) -> None:
    messages = [{"role": "system", "content": "brief"}, {"role": "user", "content": "Hi!"}]
    with load_model_by_name(tiny, "hf") as lm:
        assert lm.decode(lm.apply_chat_template(messages, chat_template=template)) == said
        parts = [
            {**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages
        ]
        if template == IN_PARTS:
            assert lm.decode(lm.apply_chat_template(parts, chat_template=template)) == said


def test_model_that_is_not_causal_is_rejected(tmp_path: Path) -> None:
    shape = {"vocab_size": 256, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    T5ForConditionalGeneration(T5Config(**shape)).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    with pytest.raises(
        EngineError, match=r"not a causal language model: .* no causal class for T5Config"
    ):
        load_model_by_name(str(tmp_path), "hf")


def test_the_type_is_the_users(tiny: str) -> None:
    with AsyncTransformer.from_name(tiny, dtype="bfloat16") as lm:
        assert lm.underlying_model.dtype == torch.bfloat16
        assert lm.next_token_logprobs_sync(CONTEXT).dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_byte": 3}, r"no option kv_cache_byte \(did you mean kv_cache_bytes\?\)"),
        ({"device_map": "auto"}, "no option device_map of its own; give it in hf_opts"),
        ({"load_in_4bit": True}, "no option load_in_4bit of its own; give it in bitsandbytes_opts"),
        ({"max_model_len": 7}, "it is an argument of vLLM: backend='vllm', in engine_opts"),
        ({"adapter_path": ""}, "load the adapter with lm.add_new_lora"),
        ({"model_config": {}}, "for backend='mlx'"),
        ({"an_argument_that_is_new": 1}, "an argument of from_pretrained goes in hf_opts"),
        ({"batchsize": 3}, r"no option batchsize \(did you mean batch_size\?\)"),
        ({"max_batch_tokens": 0}, "max_batch_tokens must be an integer of at least 1; got 0"),
        ({"kv_cache_bytes": -1}, "kv_cache_bytes must be an integer of at least 0, or None; got"),
        ({"kv_cache_bytes": -(10**5000)}, "got an integer of 16610 bits"),
        ({"dtype": "fp16"}, r"one of auto, float32, .*; got 'fp16'; did you mean 'float16'\?"),
        ({"hf_opts": {"dtype": "float23"}}, r"dtype must be one of .*; got 'float23'"),
        ({"device": "gpu"}, r"device must be one that PyTorch sees here: cpu.*; got 'gpu'"),
        ({"device": "cuda:99"}, r"device must be one .*; got 'cuda:99'"),
        ({"device": "cpu", "hf_opts": {"device_map": "cpu"}}, "device_map"),
        ({"dtype": "float32", "hf_opts": {"dtype": "float32"}}, "dtype"),
        (
            {"bitsandbytes_opts": {"load_in_4bit": True}, "hf_opts": {"quantization_config": None}},
            "contradict",
        ),
        # transformers would ignore the argument, and quantise nothing
        ({"bitsandbytes_opts": {"load_in_4bits": True}}, "did you mean 'load_in_4bit'?"),
        ({"bitsandbytes_opts": True}, "bitsandbytes_opts must be a dict of arguments; got True"),
        ({"compile_opts": True}, "compile_opts must be a dict of arguments; got True"),
        ({"compile_opts": {"mod": "default"}}, "compile_opts has no argument 'mod'; did you mean"),
        ({"hf_opts": ["revision"]}, "hf_opts must be a dict of arguments; got"),
        ({"hf_opts": {"attn_implementatio": 1}}, "did you mean 'attn_implementation'?"),
        ({"hf_opts": {"use_auth_token": "x"}}, "takes no use_auth_token; its name is token now"),
        ({"use_auth_token": "x"}, "no option use_auth_token of its own; its name is token now"),
        ({"hf_opts": {"resume_download": True}}, "takes no resume_download; .*; leave it out"),
        ({"hf_opts": {"tokenizer": object()}}, "must be a folder or a hub name; .* got <object"),
        ({"hf_opts": {"load_in_4bit": True}}, "hf_opts takes no load_in_4bit; give it in bits"),
        ({"hf_opts": {"max_model_len": 7}}, "hf_opts takes no max_model_len; it is an argument of"),
    ],
)
def test_invalid_options_are_rejected(tiny: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        load_model_by_name(tiny, backend="hf", llm_opts=options)


def test_every_argument_of_from_pretrained_has_its_place() -> None:
    for function in (PreTrainedModel.from_pretrained, BitsAndBytesConfig.__init__):
        for name, argument in inspect.signature(function).parameters.items():
            named = argument.kind not in (argument.VAR_KEYWORD, argument.VAR_POSITIONAL)
            if named and name not in ("self", "pretrained_model_name_or_path"):
                assert name in ELSEWHERE
    assert not ELSEWHERE.keys() & {each.name for each in attrs.fields(HFOptions)}


def test_model_is_found_in_the_users_cache_folder(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without this, transformers asks the hub for an adapter again and again, whatever its arguments
    # say.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    snapshots = tmp_path / "models--org--tiny"
    (snapshots / "refs").mkdir(parents=True)
    (snapshots / "refs" / "main").write_text("a" * 40)
    shutil.copytree(tiny, snapshots / "snapshots" / ("a" * 40))
    places = {"cache_dir": str(tmp_path), "local_files_only": True}
    with load_model_by_name("org/tiny", backend="hf", hf_opts=places) as lm:
        assert lm.next_token_logprobs_sync([1]).shape == (len(lm.byte_vocab),)


def test_loading_options_are_rejected_for_a_loaded_model(tiny: str) -> None:
    model, tokenizer = loaded(tiny)
    for given, said in (("device", ""), ("kv_cache_byte", "did you mean kv_cache_bytes")):
        with pytest.raises(InvalidOptionError, match=f"no option {given}.*{said}"):
            AsyncTransformer(model, tokenizer, **{given: 1})


def test_folder_with_two_gguf_files_needs_a_choice(tmp_path: Path) -> None:
    """Many on the hub have a configuration beside them."""
    for name in ("one.gguf", "two.gguf", "imatrix.bin"):
        (tmp_path / name).touch()
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(InvalidOptionError, match=r"one\.gguf"):
        load_model_by_name(str(tmp_path), backend="hf")


def test_batch_size_and_timeout_may_be_given_by_position(tiny: str) -> None:
    """As programs for genlm-backend 0.3 do."""
    contexts = [[*CONTEXT, token] for token in range(5)]
    with AsyncTransformer(*loaded(tiny), 2, 0.01) as lm:
        lm.batch_next_token_logprobs_sync(contexts)
        assert lm.stats.largest_batch == 2


def test_wrapped_model_works_alone_after_closing(tiny: str) -> None:
    model, tokenizer = loaded(tiny)
    lm = AsyncTransformer(model, tokenizer)
    lm.next_token_logprobs_sync(CONTEXT)
    with torch.no_grad():
        during = model(torch.tensor([CONTEXT])).logits[0, -1].log_softmax(-1)
        lm.close()
        after = model(torch.tensor([CONTEXT])).logits[0, -1].log_softmax(-1)
    torch.testing.assert_close(during, expected(tiny), atol=1e-4, rtol=0)
    torch.testing.assert_close(after, expected(tiny), atol=1e-4, rtol=0)


def test_a_closed_model_leaves_nothing_behind(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def use() -> None:
        with AsyncTransformer.from_name(tiny) as lm:
            lm.next_token_logprobs_sync(CONTEXT)

    use()  # the first use allocates memory that imports keep
    before = left_behind()
    use()
    assert left_behind() == before


def test_the_hub_token_is_not_shown() -> None:
    shown = repr(HFOptions(hf_opts={"token": "hf_secret", "revision": "main"}))
    assert "secret" not in shown
    assert "'revision': 'main'" in shown


def test_compiling_with_cuda_graphs_is_rejected(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for mode in ("reduce-overhead", "max-autotune"):
        with pytest.raises(InvalidOptionError, match=f"{mode}.*give 'default' or 'max-autotune-n"):
            AsyncTransformer.from_name(tiny, compile_opts={"mode": mode})


def test_a_load_computes_no_more_than_five_forwards(tiny: str) -> None:
    model, tokenizer = loaded(tiny)
    forwards: list[object] = []
    model.register_forward_pre_hook(lambda module, args: forwards.append(module))
    AsyncTransformer(model, tokenizer).close()
    assert 0 < len(forwards) <= 5


@pytest.mark.parametrize("file", ["model.safetensors", "an encoder's"])
def test_missing_weights_are_rejected(tiny: str, tmp_path: Path, file: str) -> None:
    """They would be random: another model each time."""
    AutoTokenizer.from_pretrained(tiny).save_pretrained(tmp_path)
    if file == "an encoder's":
        small = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
        config = BertConfig(vocab_size=257, num_hidden_layers=1, **small)
        BertModel(config).save_pretrained(tmp_path)
        lacking = r"BertLMHeadModel.*cls\.predictions.* and 3 more"
    else:
        model = AutoModelForCausalLM.from_pretrained(tiny)
        kept = {name: each for name, each in model.state_dict().items() if ".layers.1." not in name}
        model.save_pretrained(tmp_path, state_dict=kept)
        lacking = r"LlamaForCausalLM.*model\.layers\.1\..* and \d+ more"
    with pytest.raises(ModelNotFoundError, match=f"lacks weights of {lacking}; give the whole"):
        load_model_by_name(str(tmp_path), backend="hf")


@pytest.mark.parametrize(("value", "outcome"), [(0.5, "rejected"), (0.0, "served")])
def test_biases_for_layers_that_have_none_are_rejected(
    tiny: str, tmp_path: Path, value: float, outcome: str
) -> None:
    """transformers would leave them out; biases of zeros, as some quantisers write, change
    nothing."""
    width = load_file(Path(tiny, "model.safetensors"))[UP].shape[0]
    bias = {"model.layers.1.mlp.up_proj.bias": torch.full((width,), value)}
    folder = write_variant(tiny, tmp_path / "biased", bias)
    if outcome == "served":
        with load_model_by_name(folder, backend="hf") as lm:
            torch.testing.assert_close(lm.next_token_logprobs_sync(CONTEXT), expected(tiny))
        return
    said = r"has model\.layers\.1\.mlp\.up_proj\.bias \(1 such .* has no place .*correct config"
    with pytest.raises(EngineError, match=said):
        load_model_by_name(folder, backend="hf")


SCALING = {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize("theta", [None, 777.0])
def test_rotary_settings_under_both_names_are_rejected_if_one_is_dropped(
    tiny: str, tmp_path: Path, theta: float | None
) -> None:
    """transformers takes ``rope_scaling`` in place of what it has written itself."""
    scaling = SCALING if theta is None else {**SCALING, "rope_theta": theta}
    written = {"rope_type": "default", "rope_theta": 777.0}
    both = {"rope_parameters": written, "rope_scaling": scaling}
    folder = write_variant(tiny, tmp_path / "scaled", **both)
    if theta is None:
        said = r"rope_parameters and rope_scaling: .* drops rope_theta=777\.0 .*write what"
        with pytest.raises(EngineError, match=said):
            load_model_by_name(folder, backend="hf")
        return
    scaled = {**SCALING, "rope_theta": 777.0}
    once = write_variant(tiny, tmp_path / "once", rope_parameters=scaled)
    with load_model_by_name(folder, backend="hf") as lm:
        torch.testing.assert_close(lm.next_token_logprobs_sync(CONTEXT), expected(once))


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"rope_scaling": SCALING}, {**SCALING, "rope_theta": 777.0}),
        ({"rope_parameters": {"type": "linear", "factor": 4.0}}, {**SCALING, "rope_theta": 777.0}),
        ({"rope_theta": 500.0}, {"rope_type": "default", "rope_theta": 500.0}),
    ],
)
def test_rotary_settings_among_the_options_keep_the_models_others(
    tiny: str, tmp_path: Path, given: dict[str, Any], meant: dict[str, Any]
) -> None:
    """transformers would lose theta."""
    plain = {"rope_type": "default", "rope_theta": 777.0}
    folder = write_variant(tiny, tmp_path / "plain", rope_parameters=plain)
    changed = write_variant(tiny, tmp_path / "changed", rope_parameters=meant)
    assert (expected(changed) - expected(folder)).abs().max() > 1e-3
    with load_model_by_name(folder, backend="hf", hf_opts=given) as lm:
        torch.testing.assert_close(lm.next_token_logprobs_sync(CONTEXT), expected(changed))


def test_rotary_scaling_that_is_no_mapping_is_rejected(tiny: str) -> None:
    with pytest.raises(InvalidOptionError, match=r"hf_opts\['rope_scaling'\] must be a mapping"):
        load_model_by_name(tiny, backend="hf", hf_opts={"rope_scaling": "linear"})


@pytest.mark.parametrize("place", ["config.json", "hf_opts"])
@pytest.mark.parametrize("kind", ["su", "unheard"])
def test_unknown_rotary_type_is_named(tmp_path: Path, place: str, kind: str) -> None:
    """Early models of Phi 3 have the first."""
    pairs = SHAPE["hidden_size"] // SHAPE["num_attention_heads"] // 2
    factors = {name: [1.0] * pairs for name in ("short_factor", "long_factor")}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("phi3", **SHAPE)).save_pretrained(
        tmp_path
    )
    write_tokenizer(tmp_path, "<end>")
    rope = {"type": kind, **factors}
    options = {"rope_scaling": rope} if place == "hf_opts" else {}
    if not options:
        said = json.loads((tmp_path / "config.json").read_text())
        del said["rope_parameters"]
        (tmp_path / "config.json").write_text(json.dumps({**said, "rope_scaling": rope}))
    remedy = "write 'longrope', its name today" if kind == "su" else "it has default, linear"
    with pytest.raises(EngineError, match=rf"{place}.* has the rope_type '{kind}'.*; {remedy}"):
        load_model_by_name(str(tmp_path), backend="hf", hf_opts=options)


def test_adapter_beside_the_weights_of_a_model_is_not_applied(tiny: str, tmp_path: Path) -> None:
    """transformers would apply it, once PEFT is installed; it may be merged into the weights."""
    folder = shutil.copytree(tiny, tmp_path / "model")
    write_adapter(tiny, folder, seed=1)
    with capture_logs() as logs, load_model_by_name(str(folder), backend="hf") as lm:
        plain = lm.next_token_logprobs_sync(CONTEXT)
        lm.add_new_lora(str(folder), "beside")
        adapted = lm.next_token_logprobs_sync(CONTEXT, lora_name="beside")
    torch.testing.assert_close(plain, expected(tiny))
    assert (adapted - plain).abs().max() > 0.1
    (said,) = [log for log in logs if log["event"] == "adapter.passed_over"]
    assert (said["log_level"], said["folder"]) == ("warning", str(folder))


def test_adapters_of_other_loads_are_applied_meanwhile(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a program loads by transformers in another thread."""
    folder = shutil.copytree(tiny, tmp_path / "model")
    write_adapter(tiny, folder, seed=1)
    if find_adapter_config_file(str(folder), subfolder="none"):
        pytest.skip("this transformers looks for an adapter in no subfolder of a folder")
    load, others = AutoModelForCausalLM.from_pretrained, []

    def load_another(*args: Any, **options: Any) -> Any:
        with ThreadPoolExecutor() as pool:
            others.append(pool.submit(load, str(folder)).result())
        return load(*args, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load_another)
    with load_model_by_name(str(folder), backend="hf") as lm:
        assert not hasattr(lm.underlying_model, "peft_config")
    assert [*others[0].peft_config] == ["default"]


class Hub:
    """A repository that has these files, and is not in the cache."""

    def __init__(self, name: str, folder: Path, *files: str) -> None:
        self.name, self.folder, self.files = name, folder, files

    def cached_file(self, name: str, file: str, **options: Any) -> str | None:
        assert name == self.name
        assert options["token"] == "mine"
        return str(self.folder / file) if file in self.files else None


@pytest.mark.parametrize(
    ("files", "passed_over"),
    [
        (["config.json", "model.safetensors", "adapter_config.json"], True),
        (["config.json", "model.safetensors.index.json", "adapter_config.json"], True),
        (["config.json", "adapter_config.json"], False),  # transformers loads its base
        (["config.json", "model.safetensors"], False),
    ],
)
def test_adapter_beside_the_weights_of_a_hub_model_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], passed_over: bool
) -> None:
    """Before anything is downloaded; transformers would load the adapter's base instead."""
    monkeypatch.setattr(
        "transformers.utils.cached_file", Hub("org/it", tmp_path, *files).cached_file
    )
    source = {"token": "mine", "trust_remote_code": True}
    with capture_logs() as logs, without_adapter("org/it", source) as arguments:
        pass
    assert bool(arguments) == passed_over
    assert [log["event"] for log in logs] == ["adapter.passed_over"] * passed_over


def test_missing_weights_beside_an_adapter_are_rejected(tiny: str, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny, tmp_path / "model")
    write_adapter(tiny, folder, seed=1)
    held = load_file(folder / "model.safetensors")
    del held[UP]
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelNotFoundError, match=r"lacks weights of .*layers\.1\.mlp\.up_proj"):
        load_model_by_name(str(folder), backend="hf")


def test_weights_of_another_shape_are_named_with_both_shapes(tiny: str, tmp_path: Path) -> None:
    folder = write_variant(tiny, tmp_path / "model", intermediate_size=24)
    said = r"mlp.down_proj.weight has the shape \(\d+, \d+\), and \w+ needs \(\d+, 24\) by"
    with pytest.raises(ModelNotFoundError, match=said):
        load_model_by_name(folder, backend="hf")


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("lacking", ["all", "a shard"])
def test_a_folder_without_files_of_weights_is_named(
    tiny: str, tmp_path: Path, is_cached: bool, lacking: str
) -> None:
    """Also one in the hub's cache."""
    cache = tmp_path / "models--org--tiny"
    folder = cache / "snapshots" / ("a" * 40)
    shutil.copytree(tiny, folder)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("a" * 40)
    (folder / "model.safetensors").unlink()
    said = r"holds no weights \(\*\.safetensors, .*; copy or download the whole model"
    if lacking == "a shard":
        weights = {"model.embed_tokens.weight": "model-1.safetensors"}
        index = {"metadata": {"total_size": 1}, "weight_map": weights}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        said = "lacks model-1.safetensors; copy" if is_cached else "names model-1.safetensors"
    if is_cached:
        said += r".* \(OSError: "  # of transformers: why they were not downloaded
    places = {"cache_dir": str(tmp_path), "local_files_only": True} if is_cached else {}
    with pytest.raises(ModelNotFoundError, match=said):
        AsyncTransformer.from_name("org/tiny" if is_cached else str(folder), hf_opts=places)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_folder_without_a_tokenizer_is_rejected(tmp_path: Path, kind: str) -> None:
    """For a GPT-2 folder, transformers makes up a tokenizer with a single special token."""
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2} if kind == "gpt2" else SHAPE
    config = AutoConfig.for_model(kind, **{**sizes, "vocab_size": TOKENS})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    said = r"special tokens only \(<\|endo" if kind == "gpt2" else "holds no tokenizer"
    with pytest.raises(InvalidInputError, match=said):
        load_model_by_name(str(tmp_path), backend="hf")


def test_tokenizer_file_that_is_not_json_is_named(tiny: str, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").write_text("<!doctype html>")
    said = r"tokenizer\.json is not JSON .*; copy or download"
    with pytest.raises(ModelNotFoundError, match=said):
        load_model_by_name(str(tmp_path), backend="hf")


def test_quantisation_without_bitsandbytes_names_the_package(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidOptionError, match=r"pip install 'genlm-hf\[bitsandbytes\]'"):
        load_pretrained(tiny, HFOptions(bitsandbytes_opts={"load_in_4bit": True}))


@pytest.mark.parametrize("absent", [True, False])
def test_missing_lora_support_is_explained(
    tiny: str, monkeypatch: pytest.MonkeyPatch, absent: bool
) -> None:
    options: dict[str, object] = {} if absent else {"compile_opts": {"fullgraph": True}}
    if absent:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *_, **__: None)
    with AsyncTransformer.from_name(tiny, **options) as lm:
        assert not lm.supports("genlm_add_lora")
        with pytest.raises(UnsupportedError, match=r"genlm-hf\[lora\]|fullgraph.*leave it out"):
            lm.add_new_lora("folder", "a")
        lm.next_token_logprobs_sync(CONTEXT)


def test_subclass_that_passes_only_a_tokenizer_is_rejected(tiny: str) -> None:
    """Subclasses of genlm-backend's AsyncLM do this."""

    class Mine(AsyncLM):
        def __init__(self, tokenizer: Any) -> None:
            super().__init__(tokenizer)

    with pytest.raises(InvalidOptionError, match=r"genlm new-plugin NAME.*_get_logprobs"):
        Mine(AutoTokenizer.from_pretrained(tiny))


def test_a_hook_gives_mass_to_tokens_that_the_model_lacks() -> None:
    """As with the tokenizers of some GGUF files: no id of such a token reaches the embedding."""

    class Smooth:
        @hookimpl
        def genlm_process_logprobs(self, rows: torch.Tensor) -> torch.Tensor:
            uniform = torch.full_like(rows, 1 / rows.shape[1]).log()
            return torch.logaddexp(rows, uniform) - torch.tensor(2.0).log()

    model = build(LlamaConfig(**{**SHAPE, "vocab_size": 200, "pad_token_id": 0}))
    with AsyncTransformer(model, ByteTokenizer(), wrappers=[Smooth()]) as lm:
        row = lm.next_token_logprobs_sync(CONTEXT)
        assert row[200:].isneginf().all()
        torch.testing.assert_close(row[:200].logsumexp(0), torch.tensor(0.0), atol=1e-5, rtol=0)
        for seed in range(20):
            assert max(lm.sample_sync(CONTEXT, 12, [], seed=seed)) < 200
