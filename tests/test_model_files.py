"""A missing model is reported at once, on every backend."""

from __future__ import annotations

import contextlib
import errno
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import structlog

from genlm.core import InvalidOptionError, ModelNotFoundError, load_model_by_name
from genlm.kit.model_files import eos_token_ids, require_model, require_tokenizer
from genlm.kit.settings import settings_of

hub = pytest.importorskip("huggingface_hub")
constants = pytest.importorskip("huggingface_hub.constants")
errors = pytest.importorskip("huggingface_hub.errors")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *(
            (path, f"there is no folder '{path}', and a hub name")
            for path in ("/no/such/folder", "./model", "~/model", "a/b/c", "tests/none")
        ),
        (7, "a model must be a folder or a hub name; got 7"),
        ("", "a model must be a folder or a hub name; got ''"),
        ("http://localhost:8000/v1", "a hub name looks like"),
        ("https://huggingface.co/a/b.c", r"page of the hub; give its name, 'a/b\.c'"),
        ("http://www.huggingface.co/a/b.c/tree/main", r"page of the hub; give its name, 'a/b\.c'"),
    ],
)
def test_missing_folder_or_invalid_name_is_a_model_not_found_error(name, message, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[1])
    with pytest.raises(ModelNotFoundError, match=message) as refused:
        require_model(name)
    assert isinstance(refused.value, InvalidOptionError)
    assert isinstance(refused.value, OSError)


def test_a_folder_without_a_model_says_what_was_looked_for(tmp_path):
    files = ("config.json", "*.gguf")
    wanted = "holds no config.json or \\*.gguf; .* holds "
    with pytest.raises(ModelNotFoundError, match=wanted + "nothing"):
        require_model(str(tmp_path), files)
    (tmp_path / "readme").touch()
    with pytest.raises(ModelNotFoundError, match=wanted + "readme"):
        require_model(str(tmp_path), files)
    (tmp_path / "model.gguf").touch()
    require_model(str(tmp_path), files)


@pytest.mark.parametrize("held", ["{", "", "[]"])
def test_a_configuration_that_is_no_json_object(tmp_path, held):
    (tmp_path / "config.json").write_text(held)
    with pytest.raises(
        ModelNotFoundError, match=r"config\.json (is not JSON|holds no JSON obj).*copy"
    ):
        require_model(str(tmp_path))


@pytest.mark.parametrize("file", ["tokenizer.json", "spiece.model", "vocab.json", "model.gguf"])
def test_folder_without_a_tokenizer_is_rejected(tmp_path, file):
    (tmp_path / "config.json").touch()
    with pytest.raises(ModelNotFoundError, match=r"holds no tokenizer \(.*copy its files there$"):
        require_tokenizer(tmp_path, "")
    with pytest.raises(ModelNotFoundError, match=r"there, or name another folder in \{'a': ...\}$"):
        require_tokenizer(str(tmp_path), "{'a': ...}")
    (tmp_path / file).write_text("{}")
    require_tokenizer(tmp_path, "")
    require_tokenizer("organisation/model", "")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelNotFoundError, match=r"tokenizer\.json is not JSON"):
        require_tokenizer(tmp_path, "")


def test_single_file_with_a_whole_model_is_accepted(tmp_path):
    for file in ("model.gguf", "config.json", "model.safetensors"):
        (tmp_path / file).touch()
    require_model(str(tmp_path / "model.gguf"))
    for file in ("config.json", "model.safetensors"):
        with pytest.raises(ModelNotFoundError, match=f"{file}' is one file of a model; give its f"):
            require_model(str(tmp_path / file))


def test_large_files_must_be_whole(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    weights, size = tmp_path / "model.safetensors", 40
    header = json.dumps({"a": {"dtype": "F32", "shape": [10], "data_offsets": [0, size]}}).encode()
    whole = len(header).to_bytes(8, "little") + header + bytes(size)
    weights.write_bytes(whole)
    require_model(str(tmp_path))
    for length in (len(whole) - 1, len(header), 8, 3, 0):
        weights.write_bytes(whole[:length])
        with pytest.raises(
            ModelNotFoundError, match=f"cut: it has {length} of .* bytes; copy or d"
        ):
            require_model(str(tmp_path))
    for file in ("model.safetensors", "tokenizer.json"):
        weights.write_bytes(whole)
        (tmp_path / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
        with pytest.raises(ModelNotFoundError, match=f"{file} is a pointer of Git LFS.*git lfs pu"):
            require_model(str(tmp_path))


def test_index_that_names_missing_files_is_rejected(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelNotFoundError, match=r"names 1.safetensors \(2 of 2 such files are n"):
        require_model(str(tmp_path))


def test_the_tokens_that_end_a_text(tmp_path, monkeypatch):
    for config, expected in (
        ({"eos_token_id": 3}, [3]),
        ({"eos_token_id": [3, 4]}, [3, 4]),
        ({"eos_token_id": None}, []),
        ({"eos_token_id": ["</s>", 3, None, True]}, [3]),
        ({"eos_token_id": 2.5}, []),
        ({"text_config": {"eos_token_id": [5, 6]}}, [5, 6]),
        ({"eos_token_id": 4, "text_config": {"eos_token_id": [5, 6]}}, [4]),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert eos_token_ids(str(tmp_path)) == expected
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7]}))
    assert eos_token_ids(str(tmp_path)) == [7]
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda _, file, *where: tmp_path / where[1])
    assert eos_token_ids("no-such/model", revision="r") == []


@pytest.mark.parametrize("damaged", ["{", "", "[7]", "\ufeff{}"])
def test_the_tokens_that_end_a_text_where_a_file_is_damaged(tmp_path, damaged):
    """As transformers, which takes the model's own configuration then."""
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 3}))
    (tmp_path / "generation_config.json").write_text(damaged)
    assert eos_token_ids(str(tmp_path)) == [3]


@pytest.mark.parametrize("model", ["folder/model.gguf", "/folder/model.gguf", "s3://bucket/model"])
def test_a_model_that_is_neither_folder_nor_hub_name_names_no_tokens(model):
    assert eos_token_ids(model) == []


@pytest.fixture
def the_hub(monkeypatch):
    """Makes the hub raise an error. Without an error, any access to the hub is a failure."""

    def answers(error=None):
        def model_info(*_, **__):
            raise error or AssertionError("the hub was asked")

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", error is None)
        monkeypatch.setattr(hub.HfApi, "model_info", model_info)

    return answers


def test_only_the_cache_is_used_offline(the_hub, monkeypatch):
    the_hub()
    with pytest.raises(ModelNotFoundError, match="the hub's cache has no such model, and offline"):
        require_model("no-such/model")
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_: "/cache/config.json")
    require_model("no-such/model")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConnectionError("no route"), r"cannot be reached \(ConnectionError: no route"),
        (
            PermissionError(errno.EACCES, "Permission denied", "/hub"),
            r"and /hub cannot be written \(Permission denied\); set HF_HOME",
        ),
    ],
)
def test_unreachable_hub_and_unwritable_cache_are_named(the_hub, error, message):
    the_hub(error)
    with pytest.raises(ModelNotFoundError, match=message) as raised:
        require_model("no-such/model")
    assert raised.value.__suppress_context__


def test_cache_folder_that_is_a_file_is_reported(the_hub, monkeypatch, tmp_path):
    the_hub(ConnectionError("no route"))
    (tmp_path / "file").touch()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    with pytest.raises(ModelNotFoundError, match=r"file cannot be written .*; set HF_HOME"):
        require_model("no-such/model")


@pytest.mark.parametrize(
    ("kind", "status", "refused"),
    [
        (
            errors.RepositoryNotFoundError,
            404,
            pytest.raises(ModelNotFoundError, match="check the spelling"),
        ),
        # The engine itself explains how to get access.
        (errors.GatedRepoError, 403, contextlib.nullcontext()),
        (errors.HfHubHTTPError, 500, contextlib.nullcontext()),
    ],
)
def test_answer_of_the_hub_decides_about_a_name(the_hub, kind, status, refused):
    the_hub(kind("", response=SimpleNamespace(status_code=status, headers={}, request=None)))
    with refused:
        require_model("no-such/model")


def test_mock_error_names_accepted_models():
    with pytest.raises(ModelNotFoundError, match="takes the name 'mock', or the folder of a token"):
        load_model_by_name("/no/such/folder", backend="mock")


def test_model_unknown_to_transformers_has_no_settings(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "of nobody"}')
    with structlog.testing.capture_logs() as logs:
        assert settings_of(tmp_path) is None
    assert "of nobody" in logs[0]["error"], "and the log says why"


@pytest.mark.parametrize("others", [[], ["config.json", "training_args.bin"]])
def test_folder_of_an_adapter_names_its_base_and_how_to_load_it(
    tmp_path: Path, others: list[str]
) -> None:
    """Trainers also write the configuration of the base model there."""
    for name in (*others, "adapter_model.safetensors"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    with pytest.raises(ModelNotFoundError, match=r"LoRA adapter .*'org/base'.* add_new_lora\('"):
        require_model(str(tmp_path))
