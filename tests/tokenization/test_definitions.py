"""Single features of a tokenizer's definition, and which of them are rejected."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genlm.core import InvalidOptionError, VocabularyError
from genlm.core.tokenization import decode_vocab
from genlm.core.tokenization import decoder as decoder_module

from .conftest import contents, joined

tok = pytest.importorskip("tokenizers", reason="defines tokenizers of the library tokenizers")
d = tok.decoders
n = tok.normalizers
p = tok.pre_tokenizers
REGEX = tok.Regex("a+")
PLAIN = p.ByteLevel(add_prefix_space=False, use_regex=False)


def bpe(vocab, **options):
    return tok.models.BPE(vocab=vocab, merges=[], **options)


def tokenizer_of(pieces, decoder, pre_tokenizer=None):
    tokenizer = tok.Tokenizer(bpe({piece: i for i, piece in enumerate(pieces)}))
    if decoder is not None:
        tokenizer.decoder = decoder
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


def with_model(model):
    tokenizer = tok.Tokenizer(model)
    tokenizer.decoder = d.Fuse()
    return tokenizer


def refuses(tokenizer, reason):
    # The older package had the same message.
    said = f"Could not decode byte representation .*{reason}"
    with pytest.raises(VocabularyError, match=said):
        decode_vocab(tokenizer)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([d.ByteLevel()], {"Ġa": b" a", "Ċ": b"\n", "Ã": b"\xc3"}),
        ([d.ByteLevel()], {piece: piece.encode() for piece in ("😀", "▁", "Ġ😀")}),
        ([d.Metaspace()], {"▁a": b" a", "a▁b": b"a b", "<0x41>": b"<0x41>"}),
        ([d.Metaspace(replacement="_")], {"_a": b" a", "▁": "▁".encode()}),
        ([d.ByteFallback()], {"<0x0A>": b"\n", "<0xff>": b"\xff"}),
        ([d.ByteFallback()], {"<0x1>": b"<0x1>", "x<0x0A>": b"x<0x0A>"}),
        ([d.Fuse()], {"▁a": "▁a".encode()}),
        ([d.Strip("_", 1, 2)], {"__a___": b"_a_", "a": b"a"}),
        ([d.Replace(tok.Regex("[xy]+"), "-")], {"axyb": b"a-b", "b": b"b"}),
        ([d.Fuse(), d.Replace("_", " ")], {"_a": b" a", "a_": b"a "}),
        (
            [d.Sequence([d.ByteFallback(), d.Replace("\n", "|")]), d.Fuse()],
            {"<0x0A>": b"|", "<0x80>": b"\x80"},
        ),
        (
            [d.ByteFallback(), d.Replace(tok.Regex("x+"), "-"), d.Fuse()],
            {"axxb": b"a-b", "<0x80>": b"\x80"},
        ),
        ([d.ByteFallback(), d.ByteLevel()], {"<0x80>": b"\x80", "Ġa": b" a", "<0x41>": b"A"}),
        ([d.Replace("▁", " "), d.Fuse(), d.Strip(" ", 1, 0)], {"▁a": b" a", "a": b"a"}),
    ],
)
def test_decoder_steps_give_the_expected_bytes(steps, expected):
    decoder = d.Sequence(steps) if len(steps) > 1 else steps[0]
    tokenizer = tokenizer_of(expected, decoder, PLAIN if "ByteLevel" in repr(decoder) else None)
    assert contents(tokenizer) == [*expected.values()]
    for piece, token in expected.items():
        assert tokenizer.decoder.decode(["a", piece, "b"]) == f"a{token.decode(errors='replace')}b"


@pytest.mark.parametrize(
    ("decoder", "reason"),
    [
        (None, "no decoder"),
        (d.WordPiece(), "WordPiece puts a space between words"),
        (d.BPEDecoder(), "BPEDecoder puts a space after each word"),
        (d.CTC(), "CTC merges repeated tokens"),
        (d.Sequence([d.Fuse(), d.Replace("ab", "c")]), "Replace works on the joined text"),
        (d.Decoder.custom(object()), "Python code"),
    ],
)
def test_a_decoder_that_looks_at_neighbours_is_rejected(decoder, reason):
    refuses(tokenizer_of(["a"], decoder), reason)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (tok.models.WordPiece({"a": 0}, unk_token="a"), "WordPiece does not keep the white space"),
        (bpe({"a": 0}, end_of_word_suffix="</w>"), "end_of_word_suffix '</w>'"),
        (bpe({"a": 0}, continuing_subword_prefix="##"), "continuing_subword_prefix '##'"),
    ],
)
def test_a_model_that_drops_spaces_is_rejected(model, reason):
    refuses(with_model(model), reason)


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        (p.Whitespace(), "pre-tokenizer Whitespace does not keep the white space"),
        (p.WhitespaceSplit(), "pre-tokenizer WhitespaceSplit does not keep the white space"),
        (p.BertPreTokenizer(), "pre-tokenizer BertPreTokenizer does not keep the white space"),
        (p.Split(" ", "removed"), "pre-tokenizer Split does not keep the text that it splits at"),
        (p.Split(REGEX, "removed"), "pre-tokenizer Split does not keep"),
        (p.Punctuation("removed"), "pre-tokenizer Punctuation does not keep"),
        (p.CharDelimiterSplit("|"), "pre-tokenizer CharDelimiterSplit does not keep"),
        (p.Sequence([p.Digits(), p.Split("x", "removed")]), "pre-tokenizer Split does not keep"),
        # The beginning of the text.
        (p.UnicodeScripts(), r"UnicodeScripts, .* keep ' ' of the text ' a'"),
    ],
)
def test_a_pre_tokenizer_that_removes_text_is_rejected(before, reason):
    refuses(tokenizer_of(["a"], d.ByteLevel(), p.Sequence([before, PLAIN])), reason)


@pytest.mark.parametrize(
    ("pre_tokenizer", "decoder", "piece"),
    [
        # Metaspace marks the space.
        (p.Sequence([p.WhitespaceSplit(), p.Metaspace()]), d.Metaspace(), "▁a"),
        # ByteLevel has spelled the space as another character.
        (p.Sequence([p.ByteLevel(), p.WhitespaceSplit()]), d.ByteLevel(), "Ġa"),
        (p.PreTokenizer.custom(object()), d.Metaspace(), "▁a"),  # a component written in Python
    ],
)
def test_lossless_pre_tokenizer_is_accepted(pre_tokenizer, decoder, piece):
    assert contents(tokenizer_of([piece], decoder, pre_tokenizer)) == [b" a"]


#: The patterns of GPT-4o and of GPT-4, whose tokenizers keep what these match.
CASE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{CASE}?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{CASE}?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CL100K = (
    rf"{CASE}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


def keeping(pattern):
    """A byte-level tokenizer that keeps only what a pattern matches."""
    split = p.Split(tok.Regex(pattern), "removed", invert=True)
    pieces = sorted(p.ByteLevel.alphabet())
    return tokenizer_of(pieces, d.ByteLevel(), p.Sequence([split, PLAIN]))


@pytest.mark.parametrize("pattern", [O200K, CL100K], ids=["o200k", "cl100k"])
def test_split_that_keeps_everything_is_accepted(pattern):
    tokenizer = keeping(pattern)
    byte_vocab, _ = decode_vocab(tokenizer)
    words = "It's 1234 o'clock;\r\n  two\u00a0spaces \n"
    for text in (words, "Größe Ǆ 敏捷 ́x\u200d😀 \x00", "\n\n", " "):
        assert joined(byte_vocab, tokenizer.encode(text).ids) == text.encode()


@pytest.mark.parametrize(
    "pattern",
    [
        r"\w+|\s+",  # punctuation
        r"[^\U00013000]+",  # one hieroglyph
        O200K.removesuffix(r"|\s+"),  # a space between words that begin with digits
        r"[^\p{Mn}]+",
        r"(?<!\d)[\s\S]|\D",  # a digit behind a digit
        r"(?:(?!sep)[\s\S])+",  # the beginning of a word that the pattern names
    ],
)
def test_split_that_keeps_only_matches_is_rejected(pattern):
    refuses(keeping(pattern), "Split, ByteLevel does not keep")


def reader_of(step):
    """The decoder for a text that a step has spelled."""
    return d.ByteLevel() if "ByteLevel" in repr(step) else d.Metaspace()


LOSES_SPACES = "WhitespaceSplit does not keep the white space"


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        (
            [p.Digits(), p.ByteLevel(add_prefix_space=True)],
            "ByteLevel puts a space before every part that Digits makes",
        ),
        (
            [p.Split(REGEX, "isolated"), p.Metaspace()],
            "Metaspace puts a space before every part that Split makes",
        ),
        (
            [p.Whitespace(), p.Metaspace()],
            "Metaspace puts a space before every part that Whitespace makes",
        ),
        ([p.WhitespaceSplit(), p.Metaspace(prepend_scheme="first")], LOSES_SPACES),
        ([p.Metaspace(), p.WhitespaceSplit()], LOSES_SPACES),
        ([p.WhitespaceSplit(), p.ByteLevel(add_prefix_space=True)], LOSES_SPACES),
    ],
)
def test_steps_that_change_the_text_between_them_are_rejected(steps, reason):
    refuses(tokenizer_of(["a"], reader_of(steps), p.Sequence(steps)), reason)


@pytest.mark.parametrize(
    ("pre_tokenizer", "decoder"),
    [
        (p.ByteLevel(add_prefix_space=False), d.Fuse()),
        (None, d.ByteLevel()),
        (p.Metaspace(), d.ByteLevel()),
    ],
)
def test_a_decoder_of_another_spelling_is_rejected(pre_tokenizer, decoder):
    refuses(tokenizer_of(["a"], decoder, pre_tokenizer), "components belong together")


BOTH = (False, True)
BEHAVIORS = ["removed", "isolated", "merged_with_previous", "merged_with_next", "contiguous"]
NORMALIZERS = [n.Replace(" ", "▁"), n.Prepend("▁"), n.NFC(), n.NFKC(), n.Lowercase(), n.ByteLevel()]
NORMALIZERS += [n.Replace("a", "")]
PRE_TOKENIZERS = [
    *(p.ByteLevel(add_prefix_space=add, use_regex=use) for add in BOTH for use in BOTH),
    *(p.Metaspace(prepend_scheme=s, split=on) for s in ("always", "first", "never") for on in BOTH),
    *(p.Split(at, how) for at in (" ", "a", tok.Regex(r"[ab]+|\s+")) for how in BEHAVIORS),
    *(p.Split(tok.Regex(at), "removed", invert=True) for at in (r"\w+|\W", r"[ab]+")),
    *(p.Punctuation(how) for how in BEHAVIORS),
    *(p.Whitespace(), p.WhitespaceSplit(), p.BertPreTokenizer(), p.Digits(), p.Digits(True)),
    *(p.UnicodeScripts(), p.FixedLength(2)),
]
DECODERS = [d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0), d.Strip(" ", 0, 1), d.Replace(" ", "")]
# Steps that spell the text, each with the decoder that reads the result.
SPELLINGS = [(step, reader_of(step)) for step in PRE_TOKENIZERS[:10]]
TEXTS = st.lists(st.text("ab1.,|ß \n", max_size=9), min_size=10, max_size=10)


def chosen(components, most):
    return st.lists(st.sampled_from(components), max_size=most)


@given(
    spelling=st.sampled_from(SPELLINGS),
    before=chosen(PRE_TOKENIZERS, 2),
    after=chosen(PRE_TOKENIZERS, 1),
    normalizers=chosen(NORMALIZERS, 1),
    decoders=chosen(DECODERS, 1),
    texts=TEXTS,
)
@settings(max_examples=150)
def test_accepted_tokenizer_keeps_the_text(spelling, before, after, normalizers, decoders, texts):
    pieces = [*sorted(p.ByteLevel.alphabet()), "▁", " ", "\n", "ab", "Ġa", "▁a", "Ã\u0178"]
    merges = [("a", "b"), ("Ġ", "a"), ("▁", "a")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = tok.Tokenizer(tok.models.BPE(vocab=vocab, merges=merges))
    tokenizer.normalizer = n.Sequence(normalizers)
    tokenizer.pre_tokenizer = p.Sequence([*before, spelling[0], *after])
    tokenizer.decoder = d.Sequence([spelling[1], *decoders])
    try:
        byte_vocab, _ = decode_vocab(tokenizer)
    except VocabularyError:
        return
    for text in texts:
        found, expected = joined(byte_vocab, tokenizer.encode(text).ids), text.encode()
        if "WhitespaceSplit" in repr(tokenizer.pre_tokenizer):  # it normalises white space
            found, expected = b" ".join(found.split()), b" ".join(expected.split())
        assert found in (expected, b" " + expected)


# --- hostile files --------------------------------------------------------------------------------


def test_huge_token_id_is_rejected_before_memory_is_taken():
    with pytest.raises(VocabularyError, match="token id 2147483648, but ids must be below 4194304"):
        decode_vocab(with_model(bpe({"a": 0, "b": 2**31})))


@pytest.mark.parametrize("where", ["decoder", "pre_tokenizer"])
def test_a_regular_expression_that_takes_too_many_steps_is_rejected(where):
    pattern = tok.Regex(r"(.+)+\d$")
    decoder = d.Replace(pattern, "x") if where == "decoder" else d.Fuse()
    tokenizer = tokenizer_of(["a" * 40 + "b"], decoder)
    if where == "pre_tokenizer":
        tokenizer.pre_tokenizer = p.Split(tok.Regex("^(a)" + "(?:.|.)*?" * 12 + r"\1c"), "isolated")
    refuses(tokenizer, "retry-limit")


@pytest.mark.parametrize(
    ("tokenizer", "what"),
    [
        (keeping(CL100K), "all characters"),
        (tokenizer_of(["a"], d.Replace(REGEX, "x")), "the vocabulary"),
    ],
)
def test_a_regular_expression_may_not_take_too_long_for_all(monkeypatch, tokenizer, what):
    monkeypatch.setattr(decoder_module, "REGEX_SECONDS", -1.0)
    refuses(tokenizer, f"takes longer than -1 s for {what}")


def test_added_tokens_are_read_out_of_order_and_if_empty():
    tokenizer = tokenizer_of(["a", "b"], d.Fuse())
    definition = json.loads(tokenizer.to_str())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    definition["added_tokens"] = [
        {"id": 9, "content": "nine", **flags},
        {"id": 2, "content": "", **flags},
        {"id": 3, "content": "three", **flags},
    ]
    tokenizer = tok.Tokenizer.from_str(json.dumps(definition))
    byte_vocab, _ = decode_vocab(tokenizer)
    for content in ("a", "b", "nine", "three"):
        assert byte_vocab[tokenizer.token_to_id(content)] == content.encode()
    assert joined(byte_vocab, tokenizer.encode("anineb").ids) == b"anineb"


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        # An id without a token, and pieces that are listed twice.
        (bpe({"a": 0, "b": 3}), [b"a", b"", b"", b"b"]),
        (
            tok.models.Unigram([("a", -1.0), ("b", -1.0), ("a", -2.0), ("b", -2.0)], 0, False),
            [b"a", b"b", b"a", b"b"],
        ),
    ],
)
def test_ids_and_pieces_need_not_correspond(model, expected):
    assert contents(with_model(model)) == expected


def test_byte_names_are_bytes_with_any_decoder():
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    assert contents(tokenizer_of([*names, "▁a"], d.Metaspace())) == [
        *(bytes([byte]) for byte in range(256)),
        b" a",
    ]
    assert contents(tokenizer_of(names[:-1], d.Metaspace()))[10] == b"<0x0A>"


def test_an_ordinary_added_token_that_is_a_piece_is_decoded_and_a_special_one_is_not():
    tokenizer = tokenizer_of(["▁▁", "▁<s>"], d.Metaspace())
    tokenizer.add_tokens(["▁▁"])
    tokenizer.add_special_tokens(["▁<s>"])
    assert contents(tokenizer) == [b"  ", "▁<s>".encode()]


@pytest.mark.parametrize(
    ("piece", "expected"),
    [
        ("Ġa", b" a"),
        ("Ã", b"\xc3"),  # the first byte of a character
        ("©", b"\xa9"),  # the last byte of a character
        ("©©©a", b"\xa9\xa9\xa9a"),
        ("aðŁĺ", b"a\xf0\x9f\x98"),
        ("ÿ", "ÿ".encode()),  # no text has these bytes
        ("ÀĢ", "ÀĢ".encode()),
        ("Ãa", "Ãa".encode()),
        ("©©©©", "©©©©".encode()),
        ("íłĢ", "íłĢ".encode()),  # these bytes are a surrogate
    ],
)
def test_an_added_token_that_is_a_piece_is_verbatim_if_no_text_has_its_bytes(piece, expected):
    tokenizer = tokenizer_of([piece], d.ByteLevel(), PLAIN)
    tokenizer.add_tokens([piece])
    assert contents(tokenizer) == [expected]


class Own:
    """A tokenizer that gives its tokens' bytes itself."""

    def __init__(self, contents=(b"a", b"", b"\xe9")):
        self.contents = contents

    def token_bytes(self):
        return self.contents


class Named(Own):
    def convert_ids_to_tokens(self, token_id):
        return f"<token {token_id}>"


@pytest.mark.parametrize(
    ("tokenizer", "fallback", "expected"),
    [
        (Named(), "tokenizer", "<token 2>"),
        (Own(), "tokenizer", "\ufffd"),
        (Named(), "latin1", "é"),
        (Named(), "replace", "\ufffd"),
    ],
)
def test_strings_of_bytes_that_are_not_utf_8(tokenizer, fallback, expected):
    byte_vocab, str_vocab = decode_vocab(tokenizer, byte2str_fallback=fallback)
    assert [token.byte_string for token in byte_vocab] == [b"a", b"", b"\xe9"]
    assert str_vocab == ["a", "", expected]


def test_an_unknown_fallback_is_rejected():
    with pytest.raises(InvalidOptionError, match="'tokenizer', 'latin1' or 'replace'"):
        decode_vocab(Own(), byte2str_fallback="ascii")


@pytest.mark.parametrize(
    ("token_bytes", "reason"),
    [
        *(([b"a", one], f"gave {one!r} for token 1; give its bytes") for one in (3, "a", None)),
        ([], "the vocabulary of Own is empty"),
        (itertools.repeat(b"a"), "ids must be below 4194304"),
    ],
)
def test_token_bytes_that_are_no_vocabulary_are_rejected(token_bytes, reason):
    with pytest.raises(VocabularyError, match=reason):
        decode_vocab(Own(token_bytes))
