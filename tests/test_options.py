"""Options of the core: what is wrong with one is said before a model is loaded."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from genlm.core import AsyncLM, InvalidOptionError, hookimpl, load_model_by_name
from genlm.core.contract import ContractCheck
from genlm.core.mock import ByteTokenizer, MockEngine
from genlm.core.options import CoreOptions, refuse_unknown, unknown_argument


class Watcher:
    @hookimpl(wrapper=True)
    def genlm_next_token_logprobs(self, queries):
        return (yield)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"timeout": threading.TIMEOUT_MAX * 2},
            r"out of range; give seconds, 0 or more and at most \d+",
        ),
        ({"timeout": 10**400}, "out of range"),
        ({"timeout": True}, "timeout=True is no number"),
        ({"batch_size": True}, "batch_size=True is no integer"),
        ({"wrappers": None}, "wrappers=None is no list"),
        ({"wrappers": Watcher()}, "is no list; give a list of objects"),
        ({"wrappers": [Watcher]}, "the wrapper Watcher is a class; give an instance"),
        (
            {"cache_opts": 5},
            "cache_opts=5 is no mapping; give a dict of maxsize, max_bytes, move_to_cpu",
        ),
        (
            {"cache_opts": {"move_to_cpu": "no"}},
            r"cache_opts\['move_to_cpu'\]='no' is neither true nor false",
        ),
        ({"cache_opts": {"maxsize": False}}, r"cache_opts\['maxsize'\]=False is no integer"),
        ({"check": "no"}, "check='no' is neither true nor false"),
    ],
)
def test_values_that_are_refused(options, message):
    with pytest.raises(InvalidOptionError, match=message):
        CoreOptions(**options)


@pytest.mark.parametrize("timeout", [0, 0.1, np.float32(0.1), np.int64(1), threading.TIMEOUT_MAX])
def test_timeouts_that_are_accepted(timeout):
    assert CoreOptions(timeout=timeout).timeout == timeout


@pytest.mark.parametrize("value", ["", "0", "false", "False", "NO", "off"])
def test_the_environment_turns_checking_off(monkeypatch, value):
    monkeypatch.setenv("GENLM_CHECK", value)
    assert CoreOptions().contract_check("x") == []


@pytest.mark.parametrize("value", ["1", "true"])
def test_the_environment_turns_checking_on(monkeypatch, value):
    monkeypatch.setenv("GENLM_CHECK", value)
    assert [type(wrapper) for wrapper in CoreOptions().contract_check("x")] == [ContractCheck]
    assert CoreOptions(check=False).contract_check("x") == []


# --- names ----------------------------------------------------------------------------------------


def test_an_unknown_option_is_answered_with_all_that_there_are():
    with pytest.raises(InvalidOptionError) as caught:
        refuse_unknown(
            "mine",
            {"kv_cache_byte": 1, "batchsize": 2, "xyzzy": 3, "dtype": "auto"},
            ["kv_cache_bytes", "dtype"],
        )
    assert str(caught.value) == (
        "backend 'mine' has no option kv_cache_byte, batchsize, xyzzy (did you mean "
        "kv_cache_bytes, batch_size?); "
        "it has kv_cache_bytes, dtype; every backend has batch_size, timeout, cache_size, "
        "cache_opts, check, wrappers"
    )


def test_known_options_pass():
    refuse_unknown("mine", {"dtype": "auto"}, ["dtype"])
    refuse_unknown("mine", {})


@pytest.mark.parametrize(
    "load",
    [
        lambda **options: load_model_by_name("mock", "mock", options),
        lambda **options: AsyncLM(lambda: MockEngine(ByteTokenizer()), backend="mock", **options),
    ],
)
def test_a_misspelt_option_of_the_core(load):
    with pytest.raises(
        InvalidOptionError, match=r"no option batchsize \(did you mean batch_size\?\)"
    ):
        load(batchsize=1)


def test_a_misspelt_option_of_the_engine(mock):
    with pytest.raises(
        InvalidOptionError,
        match=r"'mock' has no option max_contxt \(did you mean max_context\?\); it has delay",
    ):
        mock(max_contxt=5)


@pytest.mark.parametrize(
    ("name", "remedy"), [("dytpe", "did you mean 'dtype'?"), ("xyzzy", "see its documentation")]
)
def test_an_argument_that_the_engine_lacks(name, remedy):
    error = unknown_argument("SGLang", "server argument", name, {"dtype", "device"})
    assert str(error).startswith(f"SGLang has no server argument {name!r}; {remedy}")
