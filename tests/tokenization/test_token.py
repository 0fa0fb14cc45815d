"""The behaviour of Token for its users."""

from __future__ import annotations

import copy
import gc
import itertools
import operator
import pickle
import sys

import pytest

from genlm.core.tokenization import Token

from ..conftest import run_python

A = Token(1, b"a")
OTHER_A = Token(2, b"a")


def test_a_token_is_its_bytes() -> None:
    token = Token(7, b"ab\xff")
    assert isinstance(token, bytes)
    assert (token.token_id, token.byte_string, len(token), token[0]) == (7, b"ab\xff", 3, ord("a"))
    assert type(token.byte_string) is bytes
    assert b"".join([token, A]) == b"ab\xffa"
    assert repr(token) == "Token(token_id=7, byte_string=b'ab\\xff')"


COMPARISONS = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]


@pytest.mark.parametrize("compare", COMPARISONS)
def test_tokens_are_compared_by_id_and_with_plain_bytes_by_content(compare) -> None:
    contents = [b"c", b"b", b"a"]
    for one, other in itertools.product(range(3), repeat=2):
        token = Token(one, contents[one])
        assert compare(token, Token(other, contents[other])) == compare(one, other)
        assert compare(token, contents[other]) == compare(contents[one], contents[other])
        assert compare(contents[one], Token(other, contents[other])) == compare(
            contents[one], contents[other]
        )


def test_tokens_are_equal_if_their_ids_are() -> None:
    assert A != OTHER_A
    assert Token(1, b"b") == A
    assert len({A, OTHER_A, Token(1, b"b")}) == 2
    assert A != "a"


def test_tokens_and_bytes_are_distinguished() -> None:
    assert [Token.is_plain_bytes(each) for each in (b"a", A, "a")] == [True, False, False]
    assert type(Token.as_bytes(A)) is bytes
    assert Token.as_bytes("a") == "a"


@pytest.mark.parametrize(
    "again", [lambda t: t, lambda t: pickle.loads(pickle.dumps(t)), copy.copy, copy.deepcopy]
)
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("token_id", [0, 256, 65_537, -1, 1 << 40])
def test_a_copy_keeps_its_id_and_whether_it_is_special(again, special, token_id) -> None:
    token = again(Token(token_id, b"x\x00", is_special=special))
    assert type(token) is Token
    assert (token.token_id, token.byte_string, token.is_special) == (token_id, b"x\x00", special)
    assert hash(token) == hash(token_id)


def test_wrong_types_are_rejected() -> None:
    with pytest.raises(TypeError, match="token_id must be an int"):
        Token("1", b"a")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="byte_string must be bytes"):
        Token(1, "a")  # type: ignore[arg-type]


def test_tokens_take_little_memory() -> None:
    # In a separate process, because what tokens share must not depend on earlier tokens.
    result = run_python("""
        import tracemalloc
        from genlm.core.tokenization import Token
        contents = [i.to_bytes(7, "big") for i in range(260_000)]
        tracemalloc.start()
        tokens = Token.vocabulary(contents)
        print(tracemalloc.get_traced_memory()[0])
    """)
    # From Python 3.12 on, every object with a __dict__ of its own takes 8 bytes more.
    bound = 192 if sys.version_info < (3, 12) else 200
    assert int(result.stdout) < 1.01 * bound * 260_000


def test_a_vocabulary_numbers_its_tokens_and_marks_the_special_ones() -> None:
    contents = [b"", b"", *(b"%d" % i for i in range(600))]
    tokens = Token.vocabulary(contents, special=[1])
    assert [(t.token_id, t.byte_string) for t in tokens] == [*enumerate(contents)]
    assert [t.token_id for t in tokens if t.is_special] == [1]


def test_token_accepts_attributes_but_its_own_are_read_only() -> None:
    token = Token(1, b"a")
    token.note = "seen"  # type: ignore[attr-defined]
    assert token.note == "seen"  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        token.token_id = 2  # type: ignore[misc]
    with pytest.raises(AttributeError):
        token.is_special = True  # type: ignore[misc]


@pytest.mark.parametrize("collecting", [True, False])
def test_tokens_do_not_change_garbage_collection(collecting: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if collecting else gc.disable)()
        with pytest.raises(TypeError):
            Token.vocabulary([object()])  # type: ignore[list-item]
        assert gc.isenabled() is collecting
    finally:
        (gc.enable if before else gc.disable)()
