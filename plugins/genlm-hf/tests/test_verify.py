"""A model is compared with transformers' own rows of its folder."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from attrs import evolve, frozen
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    FalconConfig,
    GemmaConfig,
    MistralConfig,
)

from genlm.core import EngineError, Query, load_model_by_name
from genlm.core.cli import main
from genlm.kit.verify import loading
from genlm.kit.verify.contexts import choose
from genlm.kit.verify.loading import load_verified
from genlm.kit.verify.report import Report
from genlm.kit.verify.subject import Subject, seconds_for
from genlm.kit.verify.transformers_rows import (
    MAX_BYTES_IN_MEMORY,
    CannotCompute,
    Compute,
    Source,
    answer_to,
    configuration,
    load,
    nearer,
    offloads_whole_models,
)
from tests.conftest import install  # noqa: F401
from tools.tiny import write_adapter, write_tokenizer

SIZES = {
    "vocab_size": 258, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "bos_token_id": 256,
    "eos_token_id": 257, "pad_token_id": 257, "max_position_embeddings": 128,
}  # fmt: skip


def write(folder: Path, config: Any) -> Path:
    """A folder with a random model: norms and biases too, which are 1 and 0 in a new one."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for one in model.parameters():
            one.add_(0.3 * torch.randn_like(one))
    model.save_pretrained(folder)
    write_tokenizer(folder, "<begin>", "<end>")
    return folder


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma with biases."""
    return write(tmp_path_factory.mktemp("biased"), GemmaConfig(**SIZES, attention_bias=True))


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mistral with a window of 30 tokens."""
    return write(tmp_path_factory.mktemp("windowed"), MistralConfig(**SIZES, sliding_window=30))


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which verified models are remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def logged() -> Iterator[list[Any]]:
    """The events of the log."""
    with structlog.testing.capture_logs() as events:
        yield events


@frozen(eq=False)
class Other:
    """An engine that computes a folder with changed settings."""

    model: Any
    max_context: int | None = None
    dtype: str = "float32"
    vocab_size: int = 258

    @classmethod
    def with_(cls, folder: Path, **settings: Any) -> Other:
        config = AutoConfig.from_pretrained(folder)
        config.update(settings)
        return cls(AutoModelForCausalLM.from_pretrained(folder, config=config))

    def genlm_next_token_logprobs(self, queries: Sequence[Query]) -> torch.Tensor:
        with torch.inference_mode():
            (row,) = self.model(torch.tensor([queries[0].token_ids])).logits[:, -1]
        return row.log_softmax(-1)[None]


def subject(folder: Path, **more: Any) -> Subject:
    return Subject(model=str(folder), engine="other", backend="other", **more)


ON_A_COPY = "on a scaled copy with thresholds at 16 tokens, "


def test_a_sound_model_is_compared_within_and_beyond_its_window(windowed):
    reports: list[Report] = []
    load_model_by_name(str(windowed), "hf", verify=reports.append).close()
    assert [(one.about, one.lengths) for one in reports[0].compared] == [
        ("short contexts", (5, 13, 24)),
        ("beyond sliding_window=30", (31, 32, 39)),
        (f"{ON_A_COPY}short contexts", (5, 13, 16)),
        (f"{ON_A_COPY}beyond sliding_window=16", (17, 18, 25)),
    ]
    assert all(one.apart < 1e-4 for one in reports[0].compared)
    assert reports[0].passed


def test_a_sound_model_in_half_precision_passes(windowed):
    reports: list[Report] = []
    load_model_by_name(str(windowed), "hf", dtype="bfloat16", verify=reports.append).close()
    assert reports[0].dtype == "bfloat16"
    assert all(1e-4 < one.apart <= one.allowed for one in reports[0].compared)


def test_a_falcon_with_alibi_passes(tmp_path):
    """transformers' eager attention, with which others are compared, adds ALiBi twice."""
    sizes = {name: SIZES[name] for name in SIZES if "key_value" not in name and "head_" not in name}
    folder = write(tmp_path / "falcon", FalconConfig(**sizes, alibi=True, multi_query=False))
    reports: list[Report] = []
    load_model_by_name(str(folder), "hf", verify=reports.append).close()
    assert all(one.apart < 1e-4 for one in reports[0].compared)


def test_ignored_biases_are_rejected_by_the_name_of_their_setting(biased):
    with pytest.raises(EngineError, match=r"5, 13, 24 tokens .* those of attention_bias=False"):
        load_verified(subject(biased), True, lambda name: Other.with_(biased, attention_bias=False))


def test_ignored_window_is_found_by_longer_contexts(windowed):
    reports: list[Report] = []
    load_verified(
        subject(windowed), reports.append, lambda name: Other.with_(windowed, sliding_window=None)
    )
    assert [one.passed for one in reports[0].compared] == [True, False]
    (why,) = reports[0].left_out
    assert why.startswith("a scaled copy: other does not serve it")  # the backend has no plugin


def test_changes_by_options_are_compared_too(windowed):
    changed = subject(windowed, changes={"sliding_window": 20})
    load_verified(changed, True, lambda name: Other.with_(windowed, sliding_window=20))
    with pytest.raises(EngineError, match="sliding_window"):
        load_verified(changed, True, lambda name: Other.with_(windowed))


def test_settings_among_the_options_of_hf_are_part_of_the_model(windowed: Path) -> None:
    options = {"hf_opts": {"num_hidden_layers": 1}, "verify": True}
    load_model_by_name(str(windowed), "hf", options).close()


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"rope_theta": 5e3}, {"rope_type": "default", "rope_theta": 5e3}),
        ({"rope_scaling": YARN}, {**YARN, "rope_theta": 1e6}),
        ({"rope_parameters": YARN}, {**YARN, "rope_theta": 1e6}),
        ({"sliding_window": 5}, {"rope_type": "default", "rope_theta": 1e6}),
    ],
)
def test_changed_rotary_setting_keeps_the_base_frequency(tmp_path, changes, rope):
    plain = {"rope_type": "default", "rope_theta": 1e6}
    MistralConfig(**SIZES, rope_parameters=plain).save_pretrained(tmp_path)
    source = Source(str(tmp_path), changes, 0, "")
    found = configuration(source).rope_parameters
    assert {name: found[name] for name in rope} == rope


def test_older_copy_of_the_weights_is_rejected_by_name(windowed, tmp_path):
    both = tmp_path / "both"
    shutil.copytree(windowed, both)
    other = write(tmp_path / "older", GemmaConfig(**SIZES))
    shutil.copy(other / "model.safetensors", both / "model.old.safetensors")
    with pytest.raises(EngineError, match=r"may have read model\.old\.safetensors"):
        load_verified(subject(both), True, lambda name: Other.with_(other))


def test_by_default_a_difference_in_half_precision_is_a_warning(biased, logged, monkeypatch):
    monkeypatch.setattr(loading, "MAX_WAIT_SECONDS", None)

    def load(verify: bool | None) -> Other:
        other = Other.with_(biased, attention_bias=False)
        return load_verified(subject(biased), verify, lambda _: evolve(other, dtype="bfloat16"))

    assert load(None).dtype == "bfloat16"
    (event,) = logged
    assert (event["event"], event["log_level"]) == ("model.differs", "warning")
    assert "serves another model" in event["why"]
    with pytest.raises(EngineError, match="serves another model"):
        load(True)


def test_rejected_engine_is_closed(biased):
    closed: list[bool] = []

    class Closing(Other):
        def genlm_close(self) -> None:
            closed.append(True)

    with pytest.raises(EngineError, match="another model"):
        load_verified(subject(biased), True, lambda _: Closing.with_(biased, attention_bias=False))
    assert closed == [True]


def test_by_default_a_proof_is_remembered_until_the_folder_changes(
    windowed, tmp_path, logged, monkeypatch
):
    monkeypatch.setattr(loading, "MAX_WAIT_SECONDS", None)  # a busy machine may be slow
    folder = tmp_path / "model"
    shutil.copytree(windowed, folder)

    def events() -> list[str]:
        logged.clear()
        load_verified(subject(folder), None, lambda name: Other.with_(folder))
        return [one["event"] for one in logged]

    assert events() == ["model.verified"]
    assert events() == []
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text + "\n")
    assert events() == ["model.verified"]


@pytest.mark.parametrize(
    ("verify", "asked"), [(None, False), (True, True)], ids=["by default", "asked"]
)
def test_model_unknown_to_transformers_is_reported(tmp_path, logged, monkeypatch, verify, asked):
    monkeypatch.setattr(loading, "MAX_WAIT_SECONDS", None)
    (tmp_path / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoModel": "x"}}')
    engine = object()

    def load() -> object:
        return load_verified(subject(tmp_path), verify, lambda name: engine)

    why = "transformers has no family 'mine', and code of the folder's own is not run"
    if asked:
        with pytest.raises(EngineError, match=f"cannot be verified: {why}"):
            load()
    else:
        assert load() is engine
        (event,) = logged
        assert (event["event"], event["why"]) == ("model.unverified", why)
        assert event["command"] == f"genlm verify {tmp_path} --backend other"


def test_by_default_large_models_are_not_verified(tmp_path, logged):
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(10 << 30)
    assert seconds_for(tmp_path) > 10
    load_verified(subject(tmp_path), None, lambda name: object())
    assert logged[0]["event"] == "model.unverified"
    assert "seconds" in logged[0]["why"]


def test_engine_that_loads_at_once_is_verified_only_on_request(tmp_path, logged):
    quick = subject(tmp_path, on_request="it loads at once")
    load_verified(quick, None, lambda name: object())
    assert [(one["event"], one["why"]) for one in logged] == [
        ("model.unverified", "it loads at once")
    ]


def test_adapters_are_compared_with_those_of_peft(tiny, lora_folders, capsys):
    assert main(["verify", tiny, "--backend", "hf", "--lora", lora_folders["a"]]) == 0
    plain, adapted = capsys.readouterr().out.split("with the adapter")
    assert "right  short contexts" in plain
    assert "right  short contexts" in adapted


def test_adapter_beside_the_weights_is_no_part_of_the_model(biased: Path, tmp_path: Path) -> None:
    """As in the engines; the reference would apply it, with PEFT."""
    folder = shutil.copytree(biased, tmp_path / "model")
    write_adapter(str(biased), folder, seed=1)
    load_verified(subject(folder), True, lambda name: Other.with_(biased))


PLUGIN = """
from genlm.core import BackendInfo, hookimpl

@hookimpl
def genlm_backend_info():
    return BackendInfo("for tests", engine="numpy")

@hookimpl
def genlm_load(model, options):
    from genlm.hf.engine import HFEngine
    from transformers import AutoModelForCausalLM, AutoTokenizer
    model_of = AutoModelForCausalLM.from_pretrained(model, **options)
    return HFEngine(model_of, AutoTokenizer.from_pretrained(model))
"""


def test_the_command_compares_models_of_any_backend(
    biased: Path,
    install: Callable[..., None],  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    install("stranger", PLUGIN)
    command = ["verify", str(biased), "--backend", "stranger"]
    assert main(command) == 0
    assert main([*command, "--option", "attention_bias=false"]) == 1
    out = capsys.readouterr().out
    assert "WRONG  short contexts: 5, 13, 24 tokens" in out
    assert "rows are those of attention_bias=False" in out


WIDER = """
from genlm.core import BackendInfo, hookimpl

@hookimpl
def genlm_backend_info():
    return BackendInfo("for tests", engine="numpy")

@hookimpl
def genlm_load(model, options):
    from genlm.hf.engine import HFEngine
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    config = AutoConfig.from_pretrained(model)
    config.sliding_window += options.get("wider", 0)
    if options.get("fails_on_small") and config.vocab_size < 100:
        raise ValueError("no kernel for so small a model")
    if rope := options.get("rope"):
        config.rope_parameters = {**config.rope_parameters, **rope}
    model_of = AutoModelForCausalLM.from_pretrained(model, config=config)
    return HFEngine(model_of, AutoTokenizer.from_pretrained(model))
"""


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mistral with a window too long to compute."""
    config = MistralConfig(
        **{**SIZES, "head_dim": 32, "max_position_embeddings": 8192}, sliding_window=4096
    )
    return write(tmp_path_factory.mktemp("far"), config)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ((), 0, f"right  {ON_A_COPY}beyond sliding_window=16: 17, 18, 25 tokens"),
        (("wider=1",), 1, f"WRONG  {ON_A_COPY}beyond sliding_window=16: 17, 18, 25 tokens"),
        (
            ("wider=1", "fails_on_small=true"),
            0,
            "not compared: a scaled copy: numpy does not serve it (ValueError: no kernel for so "
            "small a model)\nnot compared: contexts beyond sliding_window=4096",
        ),
    ],
)
def test_long_thresholds_are_verified_on_a_scaled_copy(
    far: Path,
    install: Callable[..., None],  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    options: Sequence[str],
    code: int,
    said: str,
) -> None:
    install("wider", WIDER)
    given = [word for option in options for word in ("--option", option)]
    assert main(["verify", str(far), "--backend", "wider", *given]) == code
    out = capsys.readouterr().out
    assert "right  short contexts: 5, 13, 24 tokens" in out
    assert said in out


def test_thresholds_of_options_are_near_on_a_scaled_copy():
    values = {"sliding_window": 4096, "rope_parameters.original_max_position_embeddings": 32768}
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32768}
    options = {
        "block_size": 32,
        "hf_overrides": {"rope_scaling": yarn, "sliding_window": 4096, "max_window_layers": 4096},
        "json_model_override_args": json.dumps({"rope_scaling": yarn}),
    }
    near = {"factor": 4.0, "original_max_position_embeddings": 16}
    assert nearer(options, values) == {
        "block_size": 32,
        "hf_overrides": {"rope_scaling": near, "sliding_window": 16, "max_window_layers": 4096},
        "json_model_override_args": json.dumps({"rope_scaling": near}),
    }


def test_weights_that_are_read_layer_by_layer_give_the_same_rows(windowed, tmp_path):
    if not offloads_whole_models():
        with pytest.raises(CannotCompute, match=r"2\.1 GB .* 'accelerate>=1\.15'"):
            load(Source(str(windowed), {}, MAX_BYTES_IN_MEMORY + 1, str(tmp_path)))
        return
    groups = choose(AutoConfig.from_pretrained(windowed), 40).groups
    whole, by_layer = (
        answer_to(Compute(Source(str(windowed), {}, size, str(tmp_path)), groups))
        for size in (0, MAX_BYTES_IN_MEMORY + 1)
    )
    assert [rows.shape for rows in whole] == [(3, 258)] * 2
    for rows, others in zip(whole, by_layer, strict=True):
        np.testing.assert_array_equal(rows, others)
    model = load(Source(str(windowed), {}, MAX_BYTES_IN_MEMORY + 1, str(tmp_path)))
    # The other weights are on disk.
    assert {each.device.type for each in model.parameters()} == {"meta"}


def test_tolerance_is_lower_for_nearly_uniform_rows(tmp_path):
    config = MistralConfig(**{**SIZES, "bos_token_id": None, "tie_word_embeddings": False})
    folder = write(tmp_path / "flat", config)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] *= 0.003
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    reports: list[Report] = []
    other = Other.with_(folder)
    load_verified(subject(folder), True, lambda _: other)
    other.model.lm_head.weight.data.mul_(0.5)  # like a logit scale that is ignored
    load_verified(subject(folder), reports.append, lambda _: other)
    assert [one.passed for one in reports[0].compared] == [False]
    assert reports[0].compared[0].apart < 0.02


@frozen(eq=False)
class Faulty(Other):
    """A sound engine, except that it changes the logits of contexts of some lengths."""

    lengths: Sequence[int] = ()
    more_tokens: int = 0

    def genlm_next_token_logprobs(self, queries: Sequence[Query]) -> torch.Tensor:
        row = super().genlm_next_token_logprobs(queries)
        if len(queries[0].token_ids) in self.lengths:
            row[:, ::2] += 1.0
        more = row.max() + torch.zeros(1, self.more_tokens)
        return torch.cat([row, more], -1).log_softmax(-1)


@pytest.mark.parametrize("lengths", [[5], [24], []])
def test_one_wrong_row_of_a_group_is_found(windowed: Path, lengths: list[int]) -> None:
    reports: list[Report] = []
    other = Faulty(Other.with_(windowed).model, lengths=lengths)
    load_verified(subject(windowed), reports.append, lambda _: other)
    assert reports[0].compared[0].lengths == (5, 13, 24)
    assert reports[0].compared[0].passed == (not lengths)


def test_mass_of_tokens_that_the_model_lacks_is_found(biased: Path) -> None:
    reports: list[Report] = []
    other = Faulty(Other.with_(biased).model, vocab_size=300, more_tokens=42)
    load_verified(subject(biased), reports.append, lambda _: other)
    assert not reports[0].passed


def test_contexts_avoid_tokens_with_special_treatment(windowed):
    config = AutoConfig.from_pretrained(windowed)
    config.image_token_id = 7
    (short, beyond) = choose(config, 100).groups
    ids = beyond.contexts[-1]
    assert ids[0] == config.bos_token_id
    assert not {7, 256, 257} & set(ids[1:])
    assert all(each == ids[: len(each)] for each in short.contexts)


def test_contexts_contain_tokens_from_the_end_of_the_tokenizer(windowed: Path) -> None:
    """After these, embeddings are padding."""
    config = AutoConfig.from_pretrained(windowed)
    config.vocab_size = 512
    short, *beyond = choose(config, 100, windowed).groups
    assert [255 in each for each in short.contexts] == [False, False, True]
    contexts = [*short.contexts, *(each for group in beyond for each in group.contexts)]
    assert max(max(each[1:]) for each in contexts) == 255, "256 and 257 are special"
    without = [each for group in choose(config, 100).groups for each in group.contexts]
    assert max(max(each[1:]) for each in without) >= 256, "without a tokenizer nothing says so"


def test_engine_that_lacks_the_last_embeddings_is_found(windowed: Path) -> None:
    other = Other.with_(windowed)
    other.model.model.embed_tokens.weight.data[250:256] = 0.0
    with pytest.raises(EngineError, match="other serves another model"):
        load_verified(subject(windowed), True, lambda _: other)


@pytest.mark.parametrize("asked", [False, True])
def test_engine_whose_contexts_are_all_too_short_is_reported(
    windowed: Path, logged: list[Any], monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    monkeypatch.setattr(loading, "MAX_WAIT_SECONDS", None)
    short = Other(Other.with_(windowed).model, max_context=4)
    why = r"nothing was compared \(short contexts: the longest context is of 4 tokens"
    if asked:
        with pytest.raises(EngineError, match=f"cannot be verified: {why}"):
            load_verified(subject(windowed), True, lambda _: short)
        return
    assert load_verified(subject(windowed), None, lambda _: short) is short
    (event,) = logged
    assert event["event"] == "model.unverified"
    assert re.match(why, event["why"])
