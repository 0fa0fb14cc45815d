"""Tokenizers as published models have them: texts are split as ``tokenizer.json`` says, whatever
class ``tokenizer_config.json`` names, and tokens have the bytes of the text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import LlamaConfig, LlamaForCausalLM

from genlm.core import VocabularyError, load_model_by_name
from tests.tokenization.conftest import CORPUS, joined

BEGIN, END, UNKNOWN = "<s>", "</s>", "<unk>"

#: The patterns of Llama 3, Qwen 2, tekken and o200k, and those of DeepSeek V3, BLOOM and StarCoder.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = TEKKEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
DEEPSEEK = (r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", LLAMA3.replace(r"\p{N}{1,3}|", ""))
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"

TEXTS = (
    "It's 12345 o'clock; we'll see:  two spaces,\n\nnew lines\tand tabs.",
    "def f(x):\n    return x ** 2\n\n\n        # comment",
    "Der Fuß über dem Café, naïve Größe; HelloWorld 敏捷的棕色狐狸 😀😀",
    " leading and trailing ",
)


def split(*patterns: str, digits: bool = False, behavior: str = "isolated") -> Any:
    """A pre-tokenizer of bytes with patterns of its own."""
    parts = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    parts += [pre_tokenizers.Split(Regex(pattern), behavior) for pattern in patterns]
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns)
    return pre_tokenizers.Sequence([*parts, spell])


@cache
def learnt(size: int = 420) -> tuple[Mapping[str, int], Sequence[tuple[str, str]]]:
    """The pieces and merges of a byte-level tokenizer."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    held = json.loads(made.to_str())["model"]
    return held["vocab"], [(first, second) for first, second in held["merges"]]


def byte_level(
    pre_tokenizer: Any = None,
    normalizer: Any = None,
    begin: str | None = None,
    ignore_merges: bool = False,
) -> Any:
    """A byte-level tokenizer; with a token that begins each text."""
    vocab, merges = learnt()
    model = models.BPE(dict(vocab), list(merges), ignore_merges=ignore_merges)
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        made.normalizer = normalizer
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([BEGIN, END, UNKNOWN, "<|im_start|>", "<|im_end|>"])
    if begin is not None:
        single = f"{begin} $A"
        places = [(begin, made.token_to_id(begin))]
        template = processors.TemplateProcessing(single=single, special_tokens=places)
        made.post_processor = processors.Sequence(
            [processors.ByteLevel(trim_offsets=False), template]
        )
    return made


@cache
def learnt_with_spaces() -> tuple[Mapping[str, int], Sequence[tuple[str, str]]]:
    """The pieces and merges of a SentencePiece model with bytes for unknown characters."""
    made = Tokenizer(models.BPE(unk_token=UNKNOWN, fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=480, special_tokens=[UNKNOWN, BEGIN, END, *names], limit_alphabet=60,
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator(CORPUS, trainer)
    held = json.loads(made.to_str())["model"]
    return held["vocab"], [(first, second) for first, second in held["merges"]]


def sentencepiece(normalizer: Any, pre_tokenizer: Any = None, *, strip: bool = True) -> Any:
    """A tokenizer of SentencePiece, as a ``tokenizer.json`` has it."""
    vocab, merges = learnt_with_spaces()
    model = models.BPE(
        dict(vocab), list(merges), unk_token=UNKNOWN, fuse_unk=True, byte_fallback=True
    )
    made = Tokenizer(model)
    if normalizer is not None:
        made.normalizer = normalizer
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizer
    spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*spaces, *[decoders.Strip(" ", 1, 0)] * strip])
    made.add_special_tokens([UNKNOWN, BEGIN, END])
    return made


def llama2() -> Any:
    return sentencepiece(
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    )


def phi3() -> Any:
    made = llama2()
    made.add_special_tokens([AddedToken(name, rstrip=True) for name in ("<|user|>", "<|end|>")])
    return made


def llama2_of_metaspace() -> Any:
    return sentencepiece(
        None, pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    )


def gemma() -> Any:
    return sentencepiece(
        normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous"),
        strip=False,
    )  # fmt: skip


def unigram() -> Any:
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=[BEGIN, "<pad>", END, UNKNOWN], unk_token=UNKNOWN,
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator(CORPUS, trainer)
    return made


def word_pieces() -> Any:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    return made


NFC = normalizers.NFC()
SLOW = {"add_bos_token": True, "add_eos_token": False, "legacy": True, "sp_model_kwargs": {}}

#: The class that ``tokenizer_config.json`` names, further settings of it, and the tokenizer.
Kind = tuple[str, Mapping[str, Any], Callable[[], Any]]
KINDS: Mapping[str, Kind] = {
    "GPT-2": ("GPT2Tokenizer", {"add_prefix_space": False}, byte_level),
    "OPT": ("GPT2Tokenizer", {"add_bos_token": True}, lambda: byte_level(begin=END)),
    "GPT-NeoX": ("GPTNeoXTokenizer", {"add_prefix_space": False}, lambda: byte_level(None, NFC)),
    "MPT": ("GPTNeoXTokenizer", {}, byte_level),
    "Phi 2": ("CodeGenTokenizer", {"add_prefix_space": False}, byte_level),
    "Phi 4": ("GPT2Tokenizer", {}, lambda: byte_level(split(LLAMA3))),
    "OLMo 2": ("GPT2Tokenizer", {}, lambda: byte_level(split(LLAMA3))),
    "SmolLM2": ("GPT2Tokenizer", {}, lambda: byte_level(split(digits=True))),
    "StarCoder": ("GPT2Tokenizer", {}, lambda: byte_level(split(digits=True))),
    "Granite": ("GPT2Tokenizer", {}, lambda: byte_level(split(digits=True))),
    "EXAONE": ("GPT2Tokenizer", {}, lambda: byte_level(split(QWEN2), NFC)),
    "Llama 3": (
        "PreTrainedTokenizerFast", {"clean_up_tokenization_spaces": True},
        lambda: byte_level(split(LLAMA3), begin=BEGIN, ignore_merges=True)),
    "Llama 4": ("PreTrainedTokenizerFast", {}, lambda: byte_level(split(O200K), begin=BEGIN)),
    "SmolLM3": ("PreTrainedTokenizerFast", {}, lambda: byte_level(split(LLAMA3))),
    "GLM 4": ("PreTrainedTokenizerFast", {}, lambda: byte_level(split(LLAMA3))),
    "gpt-oss": ("PreTrainedTokenizerFast", {}, lambda: byte_level(split(O200K))),
    "Falcon": (
        "PreTrainedTokenizerFast", {},
        lambda: byte_level(pre_tokenizers.Sequence([
            pre_tokenizers.Punctuation("contiguous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated")]))),
    "Qwen 2": ("Qwen2Tokenizer", {"add_bos_token": False}, lambda: byte_level(split(QWEN2), NFC)),
    "Qwen 3 of transformers 5": ("TokenizersBackend", {}, lambda: byte_level(split(QWEN2), NFC)),
    "BLOOM": ("BloomTokenizerFast", {}, lambda: byte_level(split(BLOOM))),
    "Command R": (
        "CohereTokenizerFast", {"add_bos_token": True},
        lambda: byte_level(split(digits=True), NFC, BEGIN)),
    "DeepSeek V3": ("LlamaTokenizerFast", SLOW, lambda: byte_level(split(*DEEPSEEK), begin=BEGIN)),
    "DeepSeek R1 distilled": ("LlamaTokenizerFast", {}, lambda: byte_level(split(QWEN2), NFC)),
    "Mistral Nemo": (
        "PreTrainedTokenizerFast", {},
        lambda: byte_level(split(TEKKEN), begin=BEGIN, ignore_merges=True)),
    "Mistral Small 3": ("LlamaTokenizerFast", SLOW, lambda: byte_level(split(TEKKEN), begin=BEGIN)),
    "Llama 2": ("LlamaTokenizer", {**SLOW, "legacy": False}, llama2),
    "Mistral 7B": ("LlamaTokenizer", SLOW, llama2),
    "Yi": ("LlamaTokenizer", {**SLOW, "add_bos_token": False}, llama2),
    "Llama 2 of Metaspace": ("LlamaTokenizer", {**SLOW, "legacy": False}, llama2_of_metaspace),
    "CodeLlama": ("CodeLlamaTokenizer", SLOW, llama2),
    "Phi 3": ("LlamaTokenizer", {**SLOW, "legacy": False}, phi3),
    "Gemma": ("GemmaTokenizer", {"add_bos_token": True}, gemma),
    "XGLM": ("XGLMTokenizer", {}, unigram),
    "T5": ("T5Tokenizer", {"extra_ids": 0}, unigram),
}  # fmt: skip

#: Tokenizers that cannot write every text.
LOSSY = ("XGLM", "T5")

#: Classes for which a space that begins a text stands for the space that they put before texts.
ONE_SPACE_LESS = ("CodeLlamaTokenizer", "LlamaTokenizer")


def write(folder: Path, made: Any, kind: str, settings: Mapping[str, Any]) -> str:
    config = LlamaConfig(
        vocab_size=made.get_vocab_size(), hidden_size=16, intermediate_size=16,
        num_hidden_layers=1, num_attention_heads=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    made.save(str(folder / "tokenizer.json"))
    named = {"bos_token": BEGIN, "eos_token": END, "unk_token": UNKNOWN}
    tokenizer_config = {"tokenizer_class": kind, **named, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return str(folder)


@pytest.mark.parametrize("name", KINDS)
def test_published_tokenizer_splits_as_its_file_says(name: str, tmp_path: Path) -> None:
    kind, settings, make = KINDS[name]
    made = make()
    with load_model_by_name(write(tmp_path, made, kind, settings), "hf", verify=False) as lm:
        for text in TEXTS:
            if text.startswith(" ") and kind in ONE_SPACE_LESS:
                continue
            ids = lm.tokenizer.encode(text, add_special_tokens=False)
            assert ids == made.encode(text, add_special_tokens=False).ids, text
            if name not in LOSSY:
                written = joined(lm.byte_vocab, ids)
                assert written.removeprefix(b" ") == text.encode().removeprefix(b" ")


def test_word_pieces_are_rejected(tmp_path: Path) -> None:
    settings = {"do_lower_case": True, "unk_token": "[UNK]"}
    folder = write(tmp_path, word_pieces(), "BertTokenizer", settings)
    with pytest.raises(VocabularyError, match="WordPiece does not keep the white space"):
        load_model_by_name(folder, "hf", verify=False)
