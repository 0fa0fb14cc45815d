"""Options of the core: an invalid option is reported before a model is loaded."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from decimal import Decimal

import numpy as np
import pytest
import torch

from genlm.core import AsyncLM, InvalidOptionError, PluginError, hookimpl, load_model_by_name
from genlm.core.mock import ByteTokenizer, MockEngine
from genlm.core.options import CoreOptions, refuse_unknown, unknown_argument

from .doubles import Processor


class Watcher:
    @hookimpl
    def genlm_call_begins(self, hook): ...


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"timeout": threading.TIMEOUT_MAX * 2},
            r"timeout must be a finite number of at least 0 and at most \d+",
        ),
        ({"timeout": 10**5000}, "timeout must be .* got an integer of 16610 bits"),
        ({"timeout": True}, "timeout must be .* got True"),
        ({"timeout": -1}, "timeout must be .* got -1"),
        ({"timeout": float("nan")}, "timeout must be .* got nan"),
        ({"timeout": "soon"}, "timeout must be a finite number .* got 'soon'"),
        ({"batch_size": True}, "batch_size must be an integer of at least 1, or None; got True"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, or None; got 0"),
        ({"cache_size": -1}, "cache_size must be an integer of at least 0, or None; got -1"),
        ({"cache_size": "many"}, "cache_size must be .* got 'many'"),
        ({"cache_size": 2, "cache_opts": {"maxsize": 3}}, "contradicts"),
        ({"wrappers": None}, r"wrappers must be a list of objects, \[\] for none; got None"),
        ({"wrappers": Watcher()}, "wrappers must be a list of objects"),
        ({"wrappers": [Watcher]}, "the wrapper Watcher is a class; give an instance"),
        ({"cache_opts": 5}, "cache_opts must be a dict of maxsize, max_bytes, move_to_cpu; got 5"),
        (
            {"cache_opts": {"max_size": 3}},
            "cache_opts has no max_size; it has maxsize, max_bytes, move_to_cpu",
        ),
        ({"cache_opts": {"max_bytes": -5}}, "max_bytes"),
        (
            {"cache_opts": {"move_to_cpu": "no"}},
            r"cache_opts\['move_to_cpu'\] must be True, False or None; got 'no'",
        ),
        (
            {"cache_opts": {"maxsize": False}},
            r"cache_opts\['maxsize'\] must be an integer of .* got False",
        ),
        ({"check": "no"}, "check must be True, False or None; got 'no'"),
    ],
)
def test_values_that_are_rejected(options, message):
    with pytest.raises(InvalidOptionError, match=message):
        CoreOptions(**options)


def test_defaults_wait_for_nothing_and_do_not_limit_batches():
    assert (CoreOptions().timeout, CoreOptions().batch_size) == (0, None)
    assert CoreOptions(timeout=threading.TIMEOUT_MAX).timeout == threading.TIMEOUT_MAX


@pytest.mark.parametrize(
    "timeout", [np.float32(1e-3), np.int64(0), torch.tensor(1e-3), Decimal("0.001")]
)
def test_a_timeout_may_be_any_number(mock, timeout):
    assert mock(timeout=timeout).next_token_logprobs_sync([1]).shape == (258,)


@pytest.mark.parametrize(
    ("value", "checks"),
    [*((off, False) for off in ("", "0", "false", "False", "NO", "off")), ("1", True)],
)
def test_the_environment_turns_checking_on_and_off(mock, monkeypatch, value, checks):
    monkeypatch.setenv("GENLM_CHECK", value)
    coarse = Processor(lambda _, rows: rows + 2e-3)
    assert mock(wrappers=[coarse], check=False).next_token_logprobs_sync([1]).shape == (258,)
    refused = pytest.raises(PluginError, match="logsumexp") if checks else nullcontext()
    with refused:
        mock(wrappers=[coarse]).next_token_logprobs_sync([1])


@pytest.mark.parametrize(
    ("environment", "given", "verifies"),
    [(None, None, None), ("1", None, True), ("0", None, False), ("0", True, True)],
)
def test_the_environment_asks_for_verification_where_no_option_does(
    monkeypatch, environment, given, verifies
):
    if environment is not None:
        monkeypatch.setenv("GENLM_VERIFY", environment)
    else:
        monkeypatch.delenv("GENLM_VERIFY", raising=False)
    assert CoreOptions(verify=given).verification is verifies


def test_error_without_verification_names_backends_that_verify():
    with pytest.raises(InvalidOptionError, match="genlm verify mock --backend mock"):
        load_model_by_name("mock", "mock", verify=True)
    load_model_by_name("mock", "mock", verify=False).close()


def test_a_model_without_a_folder_cannot_be_verified(mock):
    with pytest.raises(InvalidOptionError, match="load it by name"):
        mock(verify=True)


# --- names ----------------------------------------------------------------------------------------


def test_unknown_option_error_lists_all_options():
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
        "cache_opts, check, verify, wrappers"
    )


@pytest.mark.parametrize(
    "load",
    [
        lambda **options: load_model_by_name("mock", "mock", options),
        lambda **options: AsyncLM(lambda: MockEngine(ByteTokenizer()), backend="mock", **options),
    ],
)
def test_misspelt_option_of_the_core_gets_a_suggestion(load):
    with pytest.raises(
        InvalidOptionError, match=r"no option batchsize \(did you mean batch_size\?\)"
    ):
        load(batchsize=1)


@pytest.mark.parametrize(
    ("name", "remedy"), [("dytpe", "did you mean 'dtype'?"), ("xyzzy", "see its documentation")]
)
def test_an_argument_that_the_engine_lacks(name, remedy):
    error = unknown_argument("SGLang", "server argument", name, {"dtype", "device"})
    assert str(error).startswith(f"SGLang has no server argument {name!r}; {remedy}")
