"""Small tokenizers of every family, trained on the spot."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import strategies as st

from genlm.core.tokenization import Token, decode_vocab


def contents(tokenizer: Any) -> list[bytes]:
    """The bytes of every token."""
    return [token.byte_string for token in decode_vocab(tokenizer)[0]]


def joined(byte_vocab: Sequence[Token], ids: Iterable[int]) -> bytes:
    """The bytes of some tokens of a vocabulary."""
    return b"".join(byte_vocab[i] for i in ids)


# SentencePiece writes spaces as U+2581, so that a text's own cannot come back.
TEXTS = st.text(
    st.one_of(
        st.sampled_from(" \n\tabcqué1234'.狐😀õ÷ÁýÀÿøúþüùöûÃ"),
        st.characters(exclude_characters="▁", codec="utf-8"),
    )
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "It's 1234 o'clock; we'll see:  two spaces,\n\nnew lines\tand tabs.",
    "Der Fuß über dem Café, naïve Größe; señor, ¿qué?",
    "敏捷的棕色狐狸 跳过了懒狗。 Быстрая лиса. 😀😀 🏳️‍🌈",
    "def f(x):\n    return x ** 2\n\n\n        # comment",
] * 4
SPECIAL = ["<s>", "</s>", "<unk>"]


def byte_level(tok: Any) -> Any:
    """GPT-2."""
    tokenizer = tok.Tokenizer(tok.models.BPE())
    tokenizer.pre_tokenizer = tok.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tok.decoders.ByteLevel()
    alphabet = tok.pre_tokenizers.ByteLevel.alphabet()
    trainer = tok.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def deepseek_coder(tok: Any) -> Any:
    """DeepSeek-Coder: the pieces of the 13 bytes that UTF-8 does not use are added tokens too."""
    tokenizer = byte_level(tok)
    unused = [0xC0, 0xC1, *range(0xF5, 0x100)]
    before = tokenizer.get_vocab_size()
    tokenizer.add_tokens([tok.AddedToken(chr(byte), normalized=True) for byte in unused])
    assert tokenizer.get_vocab_size() == before
    return tokenizer


def byte_fallback(tok: Any, normalizer: Any, decoders: list[Any]) -> Any:
    tokenizer = tok.Tokenizer(tok.models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizer
    tokenizer.decoder = tok.decoders.Sequence(decoders)
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = tok.trainers.BpeTrainer(
        vocab_size=480, special_tokens=[*SPECIAL, *names], limit_alphabet=60, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    # The byte names were special only to get into the vocabulary; they are ordinary pieces.
    definition = json.loads(tokenizer.to_str())
    definition["added_tokens"] = [
        token for token in definition["added_tokens"] if token["content"] not in names
    ]
    return tok.Tokenizer.from_str(json.dumps(definition))


def llama(tok: Any) -> Any:
    """Llama 2, Mistral, Yi, Phi-3."""
    normalizer = tok.normalizers.Sequence(
        [tok.normalizers.Prepend("▁"), tok.normalizers.Replace(" ", "▁")]
    )
    d = tok.decoders
    return byte_fallback(
        tok, normalizer, [d.Replace("▁", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0)]
    )


def gemma(tok: Any) -> Any:
    """Gemma: no leading space, and runs of spaces that are pieces and added tokens at once."""
    d = tok.decoders
    tokenizer = byte_fallback(
        tok, tok.normalizers.Replace(" ", "▁"), [d.Replace("▁", " "), d.ByteFallback(), d.Fuse()]
    )
    assert tokenizer.token_to_id("▁▁") is not None
    tokenizer.add_tokens([tok.AddedToken("▁▁", normalized=False)])
    return tokenizer


def unigram(tok: Any) -> Any:
    """T5, XLM-R: no bytes, a space before the text."""
    tokenizer = tok.Tokenizer(tok.models.Unigram())
    tokenizer.pre_tokenizer = tok.pre_tokenizers.Metaspace()
    tokenizer.decoder = tok.decoders.Metaspace()
    trainer = tok.trainers.UnigramTrainer(
        vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


FAMILIES = {f.__name__: f for f in (byte_level, deepseek_coder, llama, gemma, unigram)}


@pytest.fixture(scope="session", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> tuple[str, Any]:
    """A family's name, and a ``tokenizers.Tokenizer`` of it."""
    tok = pytest.importorskip("tokenizers", reason="trains a tokenizer of the library tokenizers")
    return request.param, FAMILIES[request.param](tok)


@pytest.fixture(scope="session")
def sentencepiece_model() -> Any:
    """A trained ``SentencePieceProcessor`` with byte fallback."""
    spm = pytest.importorskip("sentencepiece", reason="trains a model of the library sentencepiece")
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        vocab_size=420,
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["▁▁"],
        minloglevel=2,
    )
    return spm.SentencePieceProcessor(model_proto=model.getvalue())
