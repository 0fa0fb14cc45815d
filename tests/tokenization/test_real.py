"""decode_vocab on real vocabularies that PyPI's packages carry."""

from __future__ import annotations

from importlib.resources import files

import pytest
from hypothesis import assume, given

from genlm.core.tokenization import decode_vocab

from .conftest import TEXTS, joined

pytestmark = pytest.mark.any_version

TEXTS = TEXTS.filter(lambda text: "\0" not in text)  # the library ends a text at this character


@pytest.fixture(scope="module")
def smollm2(real_model):
    """A byte-level tokenizer as transformers loads it."""
    transformers = pytest.importorskip("transformers", reason="loads the real tokenizer")
    return transformers.AutoTokenizer.from_pretrained(real_model)


@pytest.fixture(scope="module")
def smollm2_bytes(smollm2):
    return decode_vocab(smollm2)[0]


@given(text=TEXTS)
def test_smollm2_tokens_join_to_the_text(smollm2, smollm2_bytes, text):
    # This tokenizer lacks some bytes.
    assume(set(text.encode()) <= {token[0] for token in smollm2_bytes if len(token) == 1})
    ids = smollm2.encode(text, add_special_tokens=False)
    assert joined(smollm2_bytes, ids) == text.encode()


def test_smollm2_special_tokens_are_marked(smollm2, smollm2_bytes):
    special = {t.byte_string for t in smollm2_bytes if t.is_special}
    assert {b"<|im_start|>", b"<|im_end|>", b"<|endoftext|>"} <= special
    assert {t.token_id for t in smollm2_bytes if t.is_special} >= {*smollm2.all_special_ids}
    assert len(special) < 30


def test_smollm2_tokens_equal_those_of_its_decoder(smollm2, smollm2_bytes):
    assert len(smollm2_bytes) == 49_152
    pieces = smollm2.convert_ids_to_tokens(range(len(smollm2_bytes)))
    decode = smollm2.backend_tokenizer.decoder.decode
    wrong = [
        t
        for t, piece in zip(smollm2_bytes, pieces, strict=True)
        if decode([piece]) != t.decode(errors="replace")
    ]
    assert wrong == []


#: Files that mistral-common ships, each with the class that may wrap its tokenizer.
MISTRAL = {
    "tokenizer.model.v1": lambda whole: whole.instruct_tokenizer.tokenizer,
    "mistral_instruct_tokenizer_240323.model.v3": lambda whole: whole,
    "tekken_240911.json": lambda whole: whole,
}


@pytest.fixture(scope="module", params=MISTRAL)
def both(request):
    """mistral-common's tokenizer of one file, and the bytes of its tokens."""
    module = pytest.importorskip(
        "mistral_common.tokens.tokenizers.mistral", reason="mistral-common ships real vocabularies"
    )
    path = files("mistral_common") / "data" / request.param
    whole = module.MistralTokenizer.from_file(str(path))
    return whole.instruct_tokenizer.tokenizer, decode_vocab(MISTRAL[request.param](whole))[0]


@given(text=TEXTS)
def test_mistral_tokens_join_to_the_text(both, text):
    mistral, mistral_bytes = both
    found = joined(mistral_bytes, mistral.encode(text, bos=False, eos=False))
    assert found in (text.encode(), b" " + text.encode())


def test_mistral_tokens(both):
    mistral, mistral_bytes = both
    assert len(mistral_bytes) == mistral.n_words
    assert mistral_bytes[1] == b"<s>"
    assert mistral_bytes[1].is_special
    assert not mistral_bytes[2000].is_special
    assert {*map(bytes, mistral_bytes)} >= {bytes([byte]) for byte in range(256)}


@pytest.mark.parametrize("file", [*MISTRAL][1:])
def test_mistral_tokenizer_of_transformers_joins_to_the_text(file):
    """The tokenizer that ``AutoTokenizer`` gives for a folder with such a file, if mistral-common
    is installed."""
    data = pytest.importorskip("mistral_common", reason="mistral-common ships real vocabularies")
    module = pytest.importorskip(
        "transformers.tokenization_mistral_common", reason="wraps mistral-common's tokenizers"
    )
    tokenizer = module.MistralCommonBackend(tokenizer_path=files(data) / "data" / file)
    byte_vocab, _ = decode_vocab(tokenizer)
    text = "a café 日本 🤗"
    found = joined(byte_vocab, tokenizer.encode(text, add_special_tokens=False))
    assert found.removeprefix(b" ") == text.encode()
    assert len(byte_vocab) == tokenizer.vocab_size
    special = [token.token_id for token in byte_vocab if token.is_special]
    assert special == tokenizer.all_special_ids
    assert {tokenizer.bos_token_id, tokenizer.eos_token_id} <= {*special}


@pytest.mark.parametrize("file", [*MISTRAL][:2])
def test_sentencepiece_itself_agrees(file):
    spm = pytest.importorskip("sentencepiece", reason="reads mistral-common's SentencePiece files")
    data = pytest.importorskip("mistral_common", reason="ships real SentencePiece files")
    model = spm.SentencePieceProcessor(model_file=str(files(data) / "data" / file))
    byte_vocab, _ = decode_vocab(model)
    anchor = model.piece_to_id("a")
    for token in byte_vocab:
        if not model.is_control(token.token_id) and not model.is_unknown(token.token_id):
            emitted = model.decode([anchor, token.token_id, anchor])
            assert emitted == "a" + token.decode(errors="replace") + "a"
