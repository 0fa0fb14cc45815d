from __future__ import annotations

import gc

import pytest
import torch

from genlm.core.types import Adapter
from tests.fixtures import *  # noqa: F403
from tools.tiny import write_adapter as save_adapter
from tools.tiny import write_tokenizer

from .driven import (
    LEFT_OUT,
    MOST_ADAPTERS,
    SMALL,
    VOCABULARY,
    DrivenVllm,
    inspected_here,
    rarely_collected,
)


@pytest.fixture(scope="session", autouse=True)
def _offline():
    """No test uses the network: models are local folders, and vLLM's usage statistics are switched
    off."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        yield


@pytest.fixture(autouse=True)
def _frozen():
    """Importing vLLM makes a million objects, which a model that is closed thaws. To search them
    for garbage takes longer than all else here."""
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _collected():
    """Frees the models of a file together, if its tests left them to be collected."""
    yield
    if LEFT_OUT:
        LEFT_OUT.clear()
        gc.unfreeze()
        gc.collect()


@pytest.fixture(scope="session")
def make_tiny(tmp_path_factory):
    """Make a small random model, whose heads two workers can share, with a tokenizer of bytes:
    ``make_tiny("Llama", **config)`` gives its folder; without ``weights``, only its configuration
    is there."""
    import transformers

    def make(family, *, weights=True, **config):
        size = {
            "vocab_size": VOCABULARY,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "initializer_range": 0.2,
            "pad_token_id": 0,
        }
        made = getattr(transformers, f"{family}Config")(**size | config)
        folder = tmp_path_factory.mktemp("tiny")
        if not weights:
            made.save_pretrained(folder)
            return str(folder)
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(made).save_pretrained(folder)
        write_tokenizer(folder)
        return str(folder)

    return make


@pytest.fixture(scope="session")
def small_path(make_tiny):
    return make_tiny("Llama")


@pytest.fixture(scope="session")
def bytes_path(make_tiny):
    """The small model, with rows as wide as the vocabulary of its tokenizer."""
    return make_tiny("Llama", vocab_size=256)


@pytest.fixture(scope="session")
def tiny_path(make_tiny, real_model):
    """The same with a real tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real_model)
    folder = make_tiny("Llama", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def padded_path(make_tiny, tiny_path):
    """The same folder, with more rows in its embeddings than its tokenizer has tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_path)
    folder = make_tiny("Llama", vocab_size=len(tokenizer) + 64)
    tokenizer.save_pretrained(folder)
    return folder


def _engines(small_path):
    """Loads engines, of the small model unless another is given, and closes them at the end."""
    from genlm.vllm.loading import load

    opened = []

    def open_engine(path=small_path, live_sessions=True, **engine_opts):
        options = {"engine_opts": SMALL | engine_opts, "live_sessions": live_sessions}
        with inspected_here():
            opened.append(DrivenVllm(load(path, options)))
        return opened[-1]

    yield open_engine
    with rarely_collected():
        for engine in opened:
            engine.genlm_close()


load_briefly = pytest.fixture(_engines)
load_for_module = pytest.fixture(_engines, scope="module")
load_for_session = pytest.fixture(_engines, scope="session")


@pytest.fixture(scope="session")
def _plain(load_for_session):
    return load_for_session()


@pytest.fixture
def engine(_plain):
    """The small model, which keeps nothing of a test for the next."""
    yield _plain
    _plain.genlm_clear_kv_cache()


@pytest.fixture(scope="session")
def _with_adapters(load_for_session):
    return load_for_session(enable_lora=True, max_loras=MOST_ADAPTERS, max_lora_rank=8)


@pytest.fixture
def lora_engine(_with_adapters):
    """The small model with room for two adapters."""
    yield _with_adapters
    _with_adapters.genlm_clear_kv_cache()


@pytest.fixture
def add(lora_engine, write_adapter):
    """Add an adapter of this name to the engine; all are removed at the end."""
    added = []

    def add_adapter(name):
        adapter = Adapter(name, write_adapter(name, seed=ord(name)), ord(name))
        assert lora_engine.genlm_add_lora(adapter, lora_engine.genlm_read_lora(adapter)) is True
        added.append(adapter)
        return adapter

    yield add_adapter
    for adapter in added:
        lora_engine.genlm_remove_lora(adapter)


@pytest.fixture(scope="session")
def write_adapter(tmp_path_factory, small_path):
    """Writes a random LoRA adapter of the small model, new or over another; gives its folder."""
    folder = tmp_path_factory.mktemp("adapters")
    return lambda name, seed, rank=4: save_adapter(small_path, folder / name, seed, rank)
