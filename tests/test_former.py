"""What genlm-backend 0.3 had and the classes here lack says what to use instead."""

from __future__ import annotations

import pytest

from genlm.core import MockAsyncLM
from genlm.core.trie import TokenCharacterTrie


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("model", "lm.underlying_model"),
        ("queries", "await lm.next_token_logprobs"),
        ("walk_cache", r"lm.cache_kv\(prompt\)"),
        ("batch_size", r"load_model_by_name\(name, batch_size="),
        ("prefill_step_size", r"load_model_by_name\(name, prefill_step_size="),
        ("release_all", "lm.clear_kv_cache"),
    ],
)
def test_a_former_attribute_of_a_model(name: str, instead: str) -> None:
    with MockAsyncLM() as lm:
        assert not hasattr(lm, name)
        with pytest.raises(AttributeError, match=instead):
            getattr(lm, name)


def test_a_former_attribute_of_a_trie() -> None:
    trie = TokenCharacterTrie([b"a", b"b"])
    with pytest.raises(AttributeError, match=r"trie\.children"):
        _ = trie.jump
    with pytest.raises(AttributeError, match=r"has no attribute 'leaves'$"):
        _ = trie.leaves


def test_what_is_chosen_when_loading_cannot_be_set_afterwards() -> None:
    with MockAsyncLM() as lm, pytest.raises(AttributeError, match="batch_size=40"):
        lm.batch_size = 40


def test_other_attributes_are_ordinary() -> None:
    with MockAsyncLM() as lm:
        lm.mine = 1
        assert lm.mine == 1
        with pytest.raises(AttributeError, match=r"'MockAsyncLM' object has no attribute 'yours'$"):
            _ = lm.yours
