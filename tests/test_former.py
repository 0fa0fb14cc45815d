"""What genlm-backend 0.3 had and the classes here lack says what to use instead."""

from __future__ import annotations

import asyncio
import re

import pytest

from genlm.core import (
    InvalidOptionError,
    MockAsyncLM,
    TokenCharacterTrie,
    UnsupportedError,
    VocabularyItemError,
)
from genlm.core.hints import METHODS
from genlm.core.options import CORE


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("model", "lm.underlying_model"),
        ("queries", "await lm.next_token_logprobs"),
        ("walk_cache", r"lm.cache_kv\(prompt\)"),
        ("prefill_step_size", r"load_model_by_name\(name, prefill_step_size="),
        ("release_all", "lm.clear_kv_cache"),
    ],
)
def test_a_former_attribute_of_a_model(name: str, instead: str) -> None:
    with MockAsyncLM() as lm, pytest.raises(AttributeError, match=instead):
        getattr(lm, name)


def test_a_former_attribute_of_a_trie() -> None:
    trie = TokenCharacterTrie([b"a", b"b"])
    with pytest.raises(AttributeError, match=r"trie\.children"):
        _ = trie.jump
    with pytest.raises(AttributeError, match=r"has no attribute 'leaves'$"):
        _ = trie.leaves


@pytest.mark.parametrize("name", CORE)
def test_what_is_chosen_when_loading_cannot_be_set_afterwards(name: str) -> None:
    with MockAsyncLM() as lm:
        with pytest.raises(AttributeError, match=rf"load_model_by_name\(name, {name}=\.\.\.\)"):
            setattr(lm, name, 40)
        with pytest.raises(AttributeError, match=rf"load_model_by_name\(name, {name}=\.\.\.\)"):
            getattr(lm, name)


def test_other_attributes_are_ordinary() -> None:
    class Own(MockAsyncLM):
        check = None  # the name of an option

    with Own() as lm:
        lm.check = "mine"
        lm.mine = 1
        assert (lm.check, lm.mine) == ("mine", 1)
        with pytest.raises(AttributeError, match=r"'Own' object has no attribute 'yours'$"):
            _ = lm.yours


def test_a_subclass_that_does_not_load() -> None:
    class Own(MockAsyncLM):
        def __init__(self) -> None:
            self.mine = 1

    lm = Own()
    for use in (lambda: lm.next_token_logprobs_sync([1]), lambda: lm.byte_vocab, lm.close):
        with pytest.raises(AttributeError, match=r"Own must call super\(\)\.__init__\(\)"):
            use()


def test_methods_of_other_tools(mock) -> None:
    lm = mock()
    for name, way in METHODS.items():
        with pytest.raises(AttributeError, match=re.escape(f"has no attribute {name!r}: {way}")):
            getattr(lm, name)
        assert any(hasattr(lm, method) for method in re.findall(r"lm\.(\w+)", way))
    with pytest.raises(InvalidOptionError, match="stride: context_len is the least context"):
        lm.rolling_logprobs_sync([1, 2], stride=1)


def test_what_other_tools_do_with_a_model(mock) -> None:
    lm = mock()
    ids = [72, 105]
    with pytest.raises(UnsupportedError, match=r"await lm\.next_token_logprobs\(ids\)"):
        lm(ids)
    for cls in (lm, type(lm)):
        with pytest.raises(UnsupportedError, match=r"load_model_by_name\(name, backend\)"):
            cls.from_pretrained("org/model")

    async def awaited() -> None:
        await lm.stream(ids, 3)

    for wrong in (lambda: asyncio.run(awaited()), lambda: list(lm.stream(ids, 3))):
        with pytest.raises(UnsupportedError, match=r"`async for token_id in lm\.stream"):
            wrong()


@pytest.mark.parametrize("given", ["abc", b"abc", object()])
def test_a_trie_over_what_is_no_vocabulary(given) -> None:
    with pytest.raises(VocabularyItemError, match=r"lm\.byte_vocab; got"):
        TokenCharacterTrie(given)
