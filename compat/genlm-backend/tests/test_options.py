"""Every parameter that 0.3.1 takes is taken by the same name at the same place, or rejected."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from genlm.backend import llm
from genlm.backend.cache import OutputCache
from genlm.backend.trie import (
    AsyncTokenCharacterTrie,
    ParallelTokenCharacterTrie,
    TokenCharacterTrie,
)
from genlm.core import InvalidOptionError, UnsupportedError

#: The parameters of 0.3.1, in its order. A coroutine is marked with `async`.
SIGNATURES = """
llm: load_model_by_name(name, backend, llm_opts)
llm.AsyncLM: async next_token_logprobs(token_ids, lora_name)
llm.AsyncLM: next_token_logprobs_sync(token_ids, lora_name)
llm.AsyncLM: async batch_next_token_logprobs(token_ids_list, lora_name)
llm.AsyncLM: batch_next_token_logprobs_sync(token_ids_list, lora_name)
llm.AsyncLM: add_new_lora(lora_path, lora_name)
llm.AsyncLM: remove_lora(lora_name)
llm.AsyncLM: clear_lora()
llm.AsyncLM: clear_cache()
llm.AsyncLM: async sample(prompt_token_ids, max_tokens, eos_token_ids, temperature, seed, lora_name)
llm.AsyncLM: async batch_sample(prompt_token_ids_list, max_tokens, eos_token_ids, temperature, \
seed, lora_name)
llm.MockAsyncLM: __init__(tokenizer)
llm.MockAsyncLM: from_name(model_name)
llm.AsyncTransformer: __init__(hf_model, hf_tokenizer, batch_size, timeout)
llm.AsyncTransformer: from_name(model_id, bitsandbytes_opts, hf_opts)
llm.AsyncTransformer: clear_kv_cache()
llm.AsyncTransformer: reset_async_queries()
llm.AsyncTransformer: cache_kv(prompt_tokens, lora_name)
llm.AsyncTransformer: next_token_logprobs_uncached(token_ids, lora_name)
llm.AsyncMlxLM: from_name(model_name)
llm.AsyncSGLTransformer: from_name(model_id, engine_opts, gpu_id)
llm.AsyncSGLTransformer: clear_kv_cache()
llm.AsyncSGLTransformer: reset_async_queries()
llm.AsyncVirtualLM: from_name(model_name, engine_opts)
cache.OutputCache: __init__(maxsize, move_to_cpu)
cache.OutputCache: clear()
tokenization: decode_vocab(tokenizer, byte2str_fallback)
tokenization.bytes: get_byte_vocab(tokenizer)
tokenization.bytes: check_byte_decoder(tokenizer, byte_decoder)
trie.TokenCharacterTrie: __init__(decode)
trie.TokenCharacterTrie: weight_sum(ws)
trie.TokenCharacterTrie: weight_max(ws)
trie.TokenCharacterTrie: batch_weight_sum(ws)
trie.TokenCharacterTrie: batch_weight_max(ws)
trie.TokenCharacterTrie: visualize(ws)
trie.ParallelTokenCharacterTrie: __init__(decode, device)
trie.AsyncTokenCharacterTrie: __init__(trie)
trie.AsyncTokenCharacterTrie: from_vocab(vocab, backend)
trie.AsyncTokenCharacterTrie: async weight_sum(ws)
trie.AsyncTokenCharacterTrie: async weight_max(ws)
trie.AsyncTokenCharacterTrie: start()
trie.AsyncTokenCharacterTrie: async cleanup()
trie.AsyncTokenCharacterTrie: shutdown()
"""

#: The plugin that a class needs.
PLUGINS = {"AsyncMlxLM": "mlx", "AsyncSGLTransformer": "sgl", "AsyncVirtualLM": "vllm"}

MODEL_OPTIONS = ("batch_size", "timeout", "cache_size", "cache_opts")


@pytest.mark.parametrize("signature", SIGNATURES.strip().splitlines())
def test_a_call_of_0_3_1_is_a_call_here(signature: str) -> None:
    where, _, call = signature.partition(": ")
    name, _, parameters = call.removesuffix(")").partition("(")
    owner = owner_of(where)
    function = getattr(owner, name.removeprefix("async "))
    assert inspect.iscoroutinefunction(inspect.unwrap(function)) == name.startswith("async ")
    wanted = [parameter for parameter in parameters.split(", ") if parameter]
    found = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.name != "self"
    ]
    assert found[: len(wanted)] == wanted


def owner_of(where: str) -> Any:
    """A module of genlm.backend, or a class of one. Skips where the class's plugin is absent."""
    module, _, name = where.rpartition(".")
    if not name[0].isupper():
        return importlib.import_module(f"genlm.backend.{where}")
    plugin = PLUGINS.get(name)
    if plugin and not importlib.util.find_spec(f"genlm.{plugin}"):
        pytest.skip(f"genlm-{plugin} is not installed here")
    return getattr(importlib.import_module(f"genlm.backend.{module}"), name)


@pytest.mark.parametrize("name", MODEL_OPTIONS)
def test_the_options_of_every_model_are_checked_so_they_are_read(name: str) -> None:
    with pytest.raises(InvalidOptionError, match=name):
        llm.load_model_by_name("mock", "mock", {name: "many"})


def test_batch_size_bounds_a_batch() -> None:
    contexts = [[i] for i in range(12)]
    for size, batches in ((3, 4), (12, 1)):
        with llm.load_model_by_name("mock", "mock", {"batch_size": size}) as lm:
            asyncio.run(lm.batch_next_token_logprobs(contexts))
            assert lm.stats.batches == batches


def test_cache_size_and_cache_opts_bound_the_rows_that_are_kept() -> None:
    for options in ({"cache_size": 1}, {"cache_opts": {"maxsize": 1, "move_to_cpu": True}}):
        with llm.load_model_by_name("mock", "mock", options) as lm:
            for ids in ([1], [2], [1]):
                lm.next_token_logprobs_sync(ids)
            assert lm.stats.batches == 3


def test_a_model_that_is_loaded_is_wrapped_with_the_options_at_their_places(tmp_path: Path) -> None:
    model, tokenizer = tiny_model()
    with llm.AsyncTransformer(model, tokenizer, 2, 0.0) as lm:
        asyncio.run(lm.batch_next_token_logprobs([[1], [2], [3], [4]]))
        assert lm.stats.batches == 2
    folder = str(tmp_path)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    options = {"hf_opts": {"torch_dtype": torch.bfloat16, "device_map": "cpu"}}
    with llm.AsyncTransformer.from_name(folder, None, **options, batch_size=2) as lm:
        assert lm.underlying_model.dtype == torch.bfloat16
        asyncio.run(lm.batch_next_token_logprobs([[1], [2], [3], [4]]))
        assert lm.stats.batches == 2


def tiny_model() -> tuple[Any, Any]:
    from tokenizers import Tokenizer, decoders, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {bytes([i]).decode("latin-1"): i for i in range(97, 123)}
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "a"))
    tokenizer.decoder = decoders.Fuse()
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    return LlamaForCausalLM(config), PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("mock", {"use_fast": True}),
        ("hf", {"engine_opts": {"enable_chunked_prefill": True}}),
        ("hf", {"prefill_step_size": 512}),
    ],
)
def test_an_option_of_another_backend_is_rejected_and_not_dropped(
    backend: str, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidOptionError, match=rf"no option {next(iter(options))}"):
        llm.load_model_by_name("mock", backend, options)


@pytest.mark.parametrize("name", PLUGINS)
def test_wrapping_a_loaded_engine_names_the_replacement(name: str) -> None:
    with pytest.raises(UnsupportedError, match="from_name"):
        owner_of(f"llm.{name}")(object())


def test_the_options_of_caches_and_tries() -> None:
    cache = OutputCache(1, True)
    cache["a"], cache["b"] = torch.zeros(1), torch.ones(1)
    assert "a" not in cache
    with pytest.raises(KeyError, match="a"):
        cache["a"]
    cache["b"].zero_()
    assert torch.equal(cache["b"], torch.ones(1))
    assert cache["b"].device.type == "cpu"
    words = [b"a", b"ab"]
    weights = torch.tensor([0.25, 0.75])
    for trie in (
        TokenCharacterTrie(decode=words),
        ParallelTokenCharacterTrie(decode=words, device="cpu"),
        AsyncTokenCharacterTrie.from_vocab(words, backend="parallel", device="cpu").trie,
        AsyncTokenCharacterTrie.from_vocab(words, "sequential").trie,
    ):
        assert float(trie.weight_sum(weights)[trie.root]) == 1.0
        assert float(trie.mass_sum(weights)[trie.root]) == 1.0
        assert float(trie.batch_mass_sum([weights])[0][trie.root]) == 1.0
    for make in (
        lambda: AsyncTokenCharacterTrie.from_vocab(words, backend="quick"),
        lambda: ParallelTokenCharacterTrie(words, device="abacus"),
    ):
        with pytest.raises(ValueError, match=r"quick|abacus"):
            make()


def test_a_small_trie_is_drawn_with_graphviz() -> None:
    pytest.importorskip("graphviz", reason="the package graphviz is not installed")
    trie = TokenCharacterTrie(llm.MockAsyncLM().byte_vocab[97:99])
    source = trie.visualize(trie.weight_sum([0.75, 0.25])).source
    assert source.count("circle") == len(trie)
    assert source.count(" -> ") == len(trie) - 1
    assert 'fillcolor="#40ff40"' in source
    with pytest.raises(ValueError, match="5 weights, one for each node"):
        trie.visualize([1.0])
