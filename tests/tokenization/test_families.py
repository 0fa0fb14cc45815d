"""decode_vocab on a tokenizer of every family: the tokens of a text give its bytes, and each token
has the bytes that its decoder produces."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genlm.core import VocabularyError
from genlm.core.tokenization import decode_vocab

from .conftest import TEXTS, contents, joined

# The characters that the Unigram model has seen. It has no bytes for others.
KNOWN = st.text(st.sampled_from(" \n\tabcdefghi.,:;éüß狐😀1234"))


@given(st.data())
def test_tokens_of_a_text_join_to_its_bytes(family, data):
    name, tokenizer = family
    byte_vocab, _ = decode_vocab(tokenizer)
    text = data.draw(KNOWN if name == "unigram" else TEXTS)
    assert joined(byte_vocab, tokenizer.encode(text).ids) in (
        [b" " + text.encode(), text.encode()] if name in ("llama", "unigram") else [text.encode()]
    )


def test_token_bytes_match_the_decoder(family):
    name, tokenizer = family
    byte_vocab, _ = decode_vocab(tokenizer)
    verbatim = tokenizer.get_added_tokens_decoder() if name == "deepseek_coder" else {}
    for token in byte_vocab:
        if token.token_id in verbatim:
            assert token == verbatim[token.token_id].content.encode()
            continue
        piece = tokenizer.id_to_token(token.token_id)
        emitted = tokenizer.decoder.decode(["a", piece, "b"])
        assert emitted == "a" + token.decode(errors="replace") + "b"


def special(tokenizer):
    return [token.byte_string for token in decode_vocab(tokenizer)[0] if token.is_special]


def test_special_tokens_are_marked(family):
    tok = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers", reason="names special tokens")
    name, original = family
    expected = {b"<|end|>"} if "byte" in name or "deepseek" in name else {b"<s>", b"</s>", b"<unk>"}
    tokenizer = tok.Tokenizer.from_str(original.to_str())
    assert {*special(tokenizer)} == expected
    tokenizer.add_tokens(["ordinary"])
    tokenizer.add_special_tokens(["<|im_end|>"])
    expected.add(b"<|im_end|>")
    assert {*special(tokenizer)} == expected
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<turn>")
    assert contents(wrapped) == [*contents(tokenizer), b"<turn>"]
    assert {*special(wrapped)} == {*expected, b"<turn>"}


def test_added_tokens_are_verbatim(family):
    tok = pytest.importorskip("tokenizers")
    _, original = family
    tokenizer = tok.Tokenizer.from_str(original.to_str())
    before = tokenizer.get_vocab_size()
    special_ones, others = ["<｜begin▁of▁text｜>", "<0x41>x"], ["foo▁bar", "Ġé"]
    tokenizer.add_special_tokens(special_ones)
    tokenizer.add_tokens(others)
    assert contents(tokenizer)[before:] == [*map(str.encode, special_ones + others)]


def test_byt5_tokens_have_their_bytes():
    transformers = pytest.importorskip("transformers", reason="has the ByT5 tokenizer")
    tokenizer = transformers.ByT5Tokenizer()
    byte_vocab, _ = decode_vocab(tokenizer)
    text = "naïve 狐 😀 ▁\n"
    assert joined(byte_vocab, tokenizer.encode(text, add_special_tokens=False)) == text.encode()
    assert byte_vocab[0] == b"<pad>"
    assert byte_vocab[259] == b"<extra_id_0>"
    assert byte_vocab[3 + 0xFF] == b"\xff"


@given(text=TEXTS)
def test_sentencepiece_tokens_join_to_the_text(sentencepiece_model, text):
    byte_vocab, _ = decode_vocab(sentencepiece_model)
    assert len(byte_vocab) == sentencepiece_model.get_piece_size()
    text = text.replace("\0", "")  # the library ends a text at this character
    expected = b" " + text.encode() if text else b""
    assert joined(byte_vocab, sentencepiece_model.encode(text)) == expected


def test_special_tokens_of_sentencepiece_are_marked(sentencepiece_model):
    assert special(sentencepiece_model) == [b"<unk>", b"<s>", b"</s>"]


def test_a_slow_sentencepiece_tokenizer(sentencepiece_model, tmp_path):
    transformers = pytest.importorskip(
        "transformers", reason="has tokenizers that wrap SentencePiece"
    )
    file = tmp_path / "spiece.model"
    file.write_bytes(sentencepiece_model.serialized_model_proto())
    slow = transformers.BertGenerationTokenizer(str(file))
    assert contents(slow)[: len(contents(sentencepiece_model))] == contents(sentencepiece_model)


def test_tiktoken_tokens_join_to_the_text():
    tiktoken = pytest.importorskip("tiktoken", reason="makes an encoding of the library tiktoken")
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"th": 256, b"the": 257}
    encoding = tiktoken.Encoding(
        "small", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={"<|end|>": 300}
    )
    byte_vocab, _ = decode_vocab(encoding)
    assert len(byte_vocab) == 301
    assert (byte_vocab[257], byte_vocab[258], byte_vocab[300]) == (b"the", b"", b"<|end|>")
    assert special(encoding) == [b"<|end|>"]
    assert joined(byte_vocab, encoding.encode("the füße")) == "the füße".encode()


class Slow:
    """A tokenizer in Python, like older ones of Hugging Face."""

    def __init__(self, vocab, **attributes):
        self.vocab = vocab
        self.added_tokens_decoder = {4: "<|end|>"}
        self.all_special_ids = [4]
        vars(self).update(attributes)

    def get_vocab(self):
        return self.vocab

    def convert_ids_to_tokens(self, token_id):
        return f"token {token_id}"


@pytest.mark.parametrize(
    ("vocab", "attributes", "expected"),
    [
        ({"Ġa": 0, "Ã": 2}, {"byte_decoder": {"a": 97, "Ġ": 0x20, "Ã": 0xC3}}, [b" a", b"\xc3"]),
        ({"▁a": 0, "<0x0A>": 2}, {"sp_model": None}, [b" a", b"\n"]),
        ({"▁a": 0, "<0x0A>": 2}, {"tokenizer": SimpleNamespace(sp_model=None)}, [b" a", b"\n"]),
        ({b"\xff": 2, b"ab": 0}, {}, [b"ab", b"\xff"]),
    ],
)
def test_slow_tokenizers_have_the_bytes_of_their_vocabulary(vocab, attributes, expected):
    slow = Slow(vocab, **attributes)
    assert contents(slow) == [expected[0], b"", expected[1], b"", b"<|end|>"]
    assert special(slow) == [b"<|end|>"]
    slow.all_special_ids = []
    assert special(slow) == []


@pytest.mark.parametrize(
    ("tokenizer", "reason"),
    [
        (Slow({"word": 0}), "Slow is neither byte-level nor SentencePiece"),
        (object(), "object is not a tokenizer of a known family"),
    ],
)
def test_tokenizer_of_an_unknown_family_is_rejected(tokenizer, reason):
    with pytest.raises(VocabularyError, match=f"Could not decode byte representation .*{reason}"):
        decode_vocab(tokenizer)
