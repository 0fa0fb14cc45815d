"""A tokenizer in several threads: each call has its own options."""

from __future__ import annotations

import copy
import pickle
import sys
import threading

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from genlm.core import AsyncLM
from genlm.core.mock import MockEngine

TEXT = "Once upon a time there was a small model. " * 40 + "<|end|>"


@pytest.fixture
def tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", pad_token="<|end|>")


@pytest.fixture
def lm(tokenizer):
    with AsyncLM(lambda: MockEngine(tokenizer), backend="mock") as lm:
        yield lm


@pytest.fixture
def impatient():
    """Threads change places as often as Python can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("impatient")
def test_each_call_in_several_threads_has_its_own_options(lm):
    ways = [
        lambda: lm.encode(TEXT),
        lambda: lm.encode(TEXT, truncation=True, max_length=16),
        lambda: lm.encode(TEXT, split_special_tokens=True),
        lambda: lm.tokenizer(TEXT, truncation=True, max_length=8)["input_ids"],
        lambda: lm.tokenizer([TEXT, "a"], padding=True)["input_ids"],
    ]
    alone = [way() for way in ways]
    assert [len(ids) for ids in alone] == [1681, 16, 1687, 8, 2]
    wrong, start = [], threading.Barrier(len(ways))

    def work(way, expected):
        start.wait()
        for _ in range(100):
            found = way()
            if found != expected:
                wrong.append((len(found), len(expected)))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(ways, alone, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_given_tokenizer_object_is_unchanged(lm, tokenizer):
    assert lm.tokenizer is tokenizer
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert type(tokenizer).__name__ == PreTrainedTokenizerFast.__name__
    for other in (copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
        assert type(other) is PreTrainedTokenizerFast
        assert other.encode(TEXT) == tokenizer.encode(TEXT)
        assert other.padding_side == tokenizer.padding_side
    assert b"genlm" not in pickle.dumps(tokenizer)  # it can be unpickled without this library
    other = copy.copy(tokenizer)
    other.truncation_side = "left"
    assert other.encode("abc", truncation=True, max_length=2) == tokenizer.encode("bc")
    assert tokenizer.encode("abc", truncation=True, max_length=2) == tokenizer.encode("ab")
    with AsyncLM(lambda: MockEngine(tokenizer), backend="mock") as again:
        assert again.encode("abc") == lm.encode("abc")
