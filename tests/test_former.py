"""Names of genlm-backend 0.3 that the classes here lack raise an error with the name to use
instead."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import sys

import pytest

import genlm.core
from genlm.core import (
    InvalidOptionError,
    MockAsyncLM,
    TokenCharacterTrie,
    UnsupportedError,
    VocabularyItemError,
)
from genlm.core.hints import METHODS
from genlm.core.next_bytes import next_bytes_logprob
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
def test_former_attribute_of_a_model_names_its_replacement(name: str, instead: str) -> None:
    with MockAsyncLM() as lm, pytest.raises(AttributeError, match=instead):
        getattr(lm, name)


def test_former_attribute_of_a_trie_names_its_replacement() -> None:
    trie = TokenCharacterTrie([b"a", b"b"])
    with pytest.raises(AttributeError, match=r"trie\.children"):
        _ = trie.jump
    with pytest.raises(AttributeError, match=r"has no attribute 'leaves'$"):
        _ = trie.leaves


@pytest.mark.parametrize("name", CORE)
def test_setting_an_option_after_loading_names_the_option_of_the_load(name: str) -> None:
    with MockAsyncLM() as lm:
        with pytest.raises(AttributeError, match=rf"load_model_by_name\(name, {name}=\.\.\.\)"):
            setattr(lm, name, 40)
        with pytest.raises(AttributeError, match=rf"load_model_by_name\(name, {name}=\.\.\.\)"):
            getattr(lm, name)


def test_unrelated_attributes_behave_normally() -> None:
    class Own(MockAsyncLM):
        check = None  # the name of an option

    with Own() as lm:
        lm.check = "mine"
        lm.mine = 1
        assert (lm.check, lm.mine) == ("mine", 1)
        with pytest.raises(AttributeError, match=r"'Own' object has no attribute 'yours'$"):
            _ = lm.yours


def test_subclass_without_super_init_is_rejected() -> None:
    class Own(MockAsyncLM):
        def __init__(self) -> None:
            self.mine = 1

    lm = Own()
    for use in (lambda: lm.next_token_logprobs_sync([1]), lambda: lm.byte_vocab, lm.close):
        with pytest.raises(AttributeError, match=r"Own must call super\(\)\.__init__\(\)"):
            use()


def test_methods_of_other_tools_get_a_hint(mock) -> None:
    lm = mock()
    for name, way in METHODS.items():
        with pytest.raises(AttributeError, match=re.escape(f"has no attribute {name!r}: {way}")):
            getattr(lm, name)
        assert any(hasattr(lm, method) for method in re.findall(r"lm\.(\w+)", way))
    with pytest.raises(InvalidOptionError, match="stride: context_len is the least context"):
        lm.rolling_logprobs_sync([1, 2], stride=1)


def printed(error: BaseException) -> str:
    """The last line of a traceback, with Python's own guess of a name."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        sys.__excepthook__(type(error), error, None)
    return said.getvalue().splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("add_lora", "add_new_lora"),
        ("load_lora", "add_new_lora"),
        ("load_adapter", "add_new_lora"),
        ("set_adapter", "set_lora"),
        ("unload_lora", "remove_lora"),
        ("detokenize", "decode"),
        ("max_model_len", "max_context"),
        ("log_probs", "next_token_logprobs"),
        ("dtype", "next_token_logprobs"),
        # For these names, Python would suggest private names, or names with another meaning.
        ("delete_lora", "remove_lora"),
        ("list_adapters", r"lm\.adapters"),
        ("kv_cache", "clear_kv_cache"),
        ("next_token_logprobs_async", "next_token_logprobs is the coroutine"),
        ("sample_batch", "batch_sample"),
    ],
)
def test_python_adds_no_suggestion_to_a_known_hint(mock, name: str, right: str) -> None:
    with pytest.raises(AttributeError, match=right) as caught:
        getattr(mock(), name)
    assert "Did you mean" not in printed(caught.value)
    with pytest.raises(AttributeError) as caught:
        getattr(mock(), "next_token_logprob")  # noqa: B009
    assert printed(caught.value).endswith("Did you mean: 'next_token_logprobs'?")


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("load_model", r"load_model_by_name\(name, backend\)"),
        ("AsyncTransformer", r"genlm\.hf has it, or load_model_by_name\(name, 'hf'\)"),
        ("AsyncVirtualLM", r"genlm\.vllm has it"),
        ("next_bytes_logprob", r"genlm\.core\.next_bytes has it"),
    ],
)
def test_names_looked_up_in_the_package_get_a_hint(name: str, right: str) -> None:
    with pytest.raises(AttributeError, match=f"'genlm.core' has no attribute '{name}': {right}"):
        getattr(genlm.core, name)
    assert not hasattr(genlm.core, name)
    with pytest.raises(ImportError, match=right):
        exec(f"from genlm.core import {name}")
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing'$"):
        getattr(genlm.core, "nothing")  # noqa: B009


def test_request_is_the_union_of_all_kinds() -> None:
    from genlm.core import Query, Request, SampleRequest, ScoreRequest
    from genlm.core.types import ReductionRequest

    assert Request == Query | SampleRequest | ScoreRequest | ReductionRequest


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("add_new_lora", ("folder", "poems")),
        ("remove_lora", ("prose",)),
        ("cache_kv", ([1, 2],)),
        ("clear_kv_cache", ()),
    ],
)
def test_a_blocking_method_that_is_awaited_names_the_remedy(mock, name, given) -> None:
    lm = mock()
    lm.add_new_lora("folder", "prose")

    async def awaited() -> None:
        await getattr(lm, name)(*given)

    with pytest.raises(UnsupportedError, match=rf"{name} blocks, .* call it without await"):
        asyncio.run(awaited())
    assert lm.cache_kv([1, 2]) is None


@pytest.mark.parametrize(
    "ask",
    [
        lambda lm: lm.next_token_logprobs([1]),
        lambda lm: lm.batch_next_token_logprobs([[1], [2]]),
        lambda lm: lm.sample([1], 3),
        lambda lm: lm.sequence_logprobs([1], [2]),
        lambda lm: lm.batch_sequence_logprobs([[1], [1]], [[2], [3]]),
        lambda lm: anext(lm.stream([1], 3)),
        lambda lm: next_bytes_logprob(lm, [1], b"a"),
        lambda lm: lm.__aenter__(),
    ],
)
def test_request_awaited_outside_asyncio_is_rejected_with_the_remedy(mock, ask) -> None:
    """As that of trio, which steps through coroutines itself."""
    awaited = ask(mock()).__await__()
    with pytest.raises(UnsupportedError, match=r"none runs here; .* trio\.to_thread\.run_sync"):
        next(awaited)


def test_calls_of_other_libraries_name_the_method_here(mock) -> None:
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
def test_trie_over_text_or_another_object_names_byte_vocab(given) -> None:
    with pytest.raises(VocabularyItemError, match=r"lm\.byte_vocab; got"):
        TokenCharacterTrie(given)
