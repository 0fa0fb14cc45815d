"""Texts are split as ``tokenizer.json`` says, whatever class transformers loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from genlm.core import load_model_by_name
from genlm.kit.tokenizer_files import follow_file

END = "<|endoftext|>"

#: Digits in groups of three, and line breaks separate.
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEXT = "2023\n\nx"


def byte_level() -> Any:
    """A byte-level tokenizer with a pattern of its own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("2", "0"), ("20", "2"), ("202", "3"), ("Ċ", "Ċ")]
    pieces = [*alphabet, *(first + second for first, second in merges), END]
    made = Tokenizer(models.BPE({piece: at for at, piece in enumerate(pieces)}, merges))
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, spell])
    made.decoder = decoders.ByteLevel()
    return made


def sentencepiece_of_transformers_4() -> Any:
    """A Llama tokenizer whose normalizer writes the spaces, for which transformers 5 has a
    pre-tokenizer."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "x", "▁x"]
    model = models.BPE(
        {token: at for at, token in enumerate(tokens)}, [("▁", "x")], unk_token="<unk>",
        fuse_unk=True, byte_fallback=True,
    )  # fmt: skip
    made = Tokenizer(model)
    spaces = normalizers.Replace(" ", "▁")
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    return made


def write(folder: Path, made: Any, kind: str, **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": kind, "eos_token": END, "bos_token": END, "unk_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | settings))
    return folder


def followed(folder: Path) -> tuple[Any, list[Any]]:
    """The tokenizer of a folder, and the log events about it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with structlog.testing.capture_logs() as events:
        follow_file(tokenizer, str(folder))
    return tokenizer, events


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with GPT-2's class of tokenizer, and a file with another pattern."""
    folder = tmp_path_factory.mktemp("llama")
    made = byte_level()
    config = LlamaConfig(
        vocab_size=made.get_vocab_size(), hidden_size=16, intermediate_size=16,
        num_hidden_layers=1, num_attention_heads=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return write(folder, made, "GPT2Tokenizer")


@pytest.mark.parametrize("alone", [False, True])
def test_texts_are_split_as_the_file_says(llama, tmp_path, alone):
    options = {}
    if alone:  # a folder without a config.json
        other = write(tmp_path / "alone", byte_level(), "GPT2Tokenizer")
        options = {"hf_opts": {"tokenizer": str(other)}}
    with structlog.testing.capture_logs() as events:
        lm = load_model_by_name(str(llama), "hf", **options)
    with lm:
        found = lm.tokenizer.convert_ids_to_tokens(lm.encode(TEXT, add_special_tokens=False))
    assert found == byte_level().encode(TEXT).tokens == ["202", "3", "ĊĊ", "x"]
    (said,) = [event for event in events if event["event"] == "tokenizer.corrected"]
    assert (said["log_level"], said["transformers"]) == ("warning", "GPT2Tokenizer")


def test_ignore_merges_is_taken_from_the_file(tmp_path):
    made = byte_level()
    vocab = made.get_vocab() | {"ĠHelloWorld": made.get_vocab_size()}
    made.model = models.BPE(vocab, [("Ċ", "Ċ")], ignore_merges=True)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer, events = followed(write(tmp_path, made, "GPT2Tokenizer"))
    assert [event["event"] for event in events] == ["tokenizer.corrected"]
    assert tokenizer.tokenize("a HelloWorld") == ["a", "ĠHelloWorld"]


def test_file_with_truncation_still_corrects_the_tokenizer(tmp_path):
    made = byte_level()
    made.enable_truncation(3)
    tokenizer, events = followed(write(tmp_path, made, "GPT2Tokenizer"))
    assert [event["event"] for event in events] == ["tokenizer.corrected"]
    assert tokenizer.tokenize(TEXT) == ["202", "3", "ĊĊ", "x"]


def _no_difference(folder: Path) -> Path:
    made = byte_level()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return write(folder, made, "GPT2Tokenizer")


def _space_before_the_text(folder: Path) -> Path:
    return write(_no_difference(folder), _with_space(), "GPT2Tokenizer", add_prefix_space=False)


def _with_space() -> Any:
    made = byte_level()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return made


def _llama_of_transformers_4(folder: Path) -> Path:
    made = sentencepiece_of_transformers_4()
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return write(folder, made, "LlamaTokenizer", **named)


def _the_plain_class(folder: Path) -> Path:
    return write(folder, byte_level(), "PreTrainedTokenizerFast")


SOUND: list[Callable[[Path], Path]] = [
    _no_difference, _space_before_the_text, _llama_of_transformers_4, _the_plain_class
]  # fmt: skip


@pytest.mark.parametrize("write_sound", SOUND)
def test_tokenizer_that_agrees_with_its_file_is_unchanged(tmp_path, write_sound):
    folder = write_sound(tmp_path)
    before = AutoTokenizer.from_pretrained(folder).backend_tokenizer.to_str()
    tokenizer, events = followed(folder)
    assert events == []
    assert tokenizer.backend_tokenizer.to_str() == before


CLASSES = (
    "CohereTokenizer", "GPT2Tokenizer", "GPTNeoXTokenizer", "GemmaTokenizer", "LlamaTokenizer",
    "Qwen2Tokenizer", "RobertaTokenizer", "WhisperTokenizer",
)  # fmt: skip


@pytest.mark.parametrize("kind", CLASSES)
def test_tokenizer_saved_by_its_own_class_is_unchanged(tmp_path, kind, real_model):
    held = json.loads((Path(real_model) / "tokenizer.json").read_text())["model"]
    merges = [tuple(one.split(" ") if isinstance(one, str) else one) for one in held["merges"]]
    getattr(transformers, kind)(vocab=held["vocab"], merges=merges).save_pretrained(tmp_path)
    assert followed(tmp_path)[1] == []


def test_mistral_tokenizer_with_a_requested_pattern_is_unchanged(tmp_path):
    folder = write(tmp_path, byte_level(), "GPT2Tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.fix_mistral_regex = True
    before = tokenizer.tokenize(TEXT)
    follow_file(tokenizer, str(folder))
    assert tokenizer.tokenize(TEXT) == before
