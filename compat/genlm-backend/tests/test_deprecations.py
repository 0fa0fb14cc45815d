"""The warnings and checks of 0.3.1 are kept."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

import genlm.core.trie
from genlm.backend import trie
from genlm.backend.tokenization import Token, decode_vocab
from genlm.backend.tokenization.bytes import ByteDecoderError, check_byte_decoder

MAKERS: list[Callable[[Any], Any]] = [
    trie.TokenCharacterTrie,
    trie.ParallelTokenCharacterTrie,
    trie.AsyncTokenCharacterTrie.from_vocab,
    lambda words: trie.AsyncTokenCharacterTrie.from_vocab(words, backend="sequential"),
    lambda words: trie.ParallelTokenCharacterTrie(device="cpu", decode=words),
]


@pytest.mark.parametrize("make", MAKERS)
def test_plain_bytes_in_a_trie_are_deprecated(make: Callable[[Any], Any]) -> None:
    with pytest.warns(DeprecationWarning, match="decode_vocab") as warned:
        make([b"a", b"ab"])
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make([Token(0, b"a"), Token(1, b"ab")])
        make(["a", "ab"])
        genlm.core.trie.TokenCharacterTrie([b"a", b"ab"])  # no warning of the core's own trie


@pytest.mark.parametrize("make", MAKERS[:2])
def test_the_warning_names_the_line_of_the_caller(make: Callable[[Any], Any]) -> None:
    with pytest.warns(DeprecationWarning, match="plain bytes") as warned:
        made = make([b"a", b"ab"])
    assert warned[0].filename == __file__
    assert isinstance(made, trie.TokenCharacterTrie)
    assert isinstance(made, genlm.core.trie.TokenCharacterTrie)
    with pytest.warns(DeprecationWarning, match="plain bytes"):
        again = pickle.loads(pickle.dumps(made))
    assert type(again) is type(made)


@pytest.mark.parametrize("base", [trie.TokenCharacterTrie, trie.ParallelTokenCharacterTrie])
def test_a_subclass_may_have_arguments_of_its_own(base: Any) -> None:
    class OfAModel(base):  # type: ignore[misc]
        def __init__(self, lm: Any = None, *, vocab: Any = None) -> None:
            super().__init__(decode=lm.byte_vocab if lm else vocab or [b"a"])

    model = SimpleNamespace(byte_vocab=[Token(0, b"a"), Token(1, b"ab")])
    for made in (OfAModel(model), OfAModel(vocab=model.byte_vocab), OfAModel()):
        assert made.weight_sum([0.5] * len(made.decode))[made.root] == len(made.decode) / 2


def byte_level() -> PreTrainedTokenizerFast:
    pieces = [*bytes_to_unicode().values(), "Ġa"]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [("Ġ", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def test_a_byte_decoder_is_checked() -> None:
    tokenizer = byte_level()
    right = {character: byte for byte, character in bytes_to_unicode().items()}
    check_byte_decoder(tokenizer, right)
    assert decode_vocab(tokenizer)[0][256].byte_string == b" a"
    with pytest.raises(ByteDecoderError, match=r"'Ġ', as None; in a text"):
        check_byte_decoder(tokenizer, {c: byte for c, byte in right.items() if c != "Ġ"})
    with pytest.raises(ByteDecoderError, match=r"as b'_a?'; in a text it is b' a?'"):
        check_byte_decoder(tokenizer, {**right, "Ġ": ord("_")})
