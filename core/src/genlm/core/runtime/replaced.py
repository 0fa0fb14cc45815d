"""Attributes of genlm-backend 0.3 that the classes here lack, each with what to use instead."""

from __future__ import annotations

from collections.abc import Mapping

_BATCHING = "batching is inside, so await lm.next_token_logprobs(ids) in as many tasks as you like"
_LOADING = "give it when the model is loaded, for instance load_model_by_name(name, {}=40)"
_LOADED = "lm.underlying_model is the engine's own model"

LM: Mapping[str, str] = {
    "add_query": _BATCHING,
    "batch_evaluate_queries": _BATCHING,
    "batch_size": _LOADING.format("batch_size"),
    "cache": "lm.stats counts its hits, and lm.clear_cache() empties it",
    "device": "row.device is that of a row",
    "llm_engine": _LOADED,
    "mlx_lm_model": _LOADED,
    "model": _LOADED,
    "prefill_step_size": _LOADING.format("prefill_step_size"),
    "queries": _BATCHING,
    "release_all": "lm.clear_kv_cache() drops the state of every context",
    "timeout": _LOADING.format("timeout"),
    "timer": _BATCHING,
    "walk_cache": "reuse is automatic, and lm.cache_kv(prompt) pins a prompt",
}

#: What can only be given when the model is loaded.
OPTIONS = ("batch_size", "timeout")

_SUMS = "trie.weight_sum and trie.weight_max do it all"

TRIE: Mapping[str, str] = {
    "M": _SUMS,
    "dst_indices": _SUMS,
    "jump": "trie.children has the children of every node",
    "ordering": _SUMS,
    "src_indices": _SUMS,
    "visualize": "trie.draw(ws) draws it as text",
}


def missing_attribute(owner: object, name: str, replaced: Mapping[str, str]) -> AttributeError:
    """The error for an attribute that ``owner`` lacks. For one of 0.3, it says what replaced it."""
    kind = type(owner).__name__
    if name in replaced:
        message = f"{kind!r} has no attribute {name!r}, as it had in genlm-backend 0.3"
        return AttributeError(f"{message}: {replaced[name]}", name=name, obj=owner)
    return AttributeError(f"{kind!r} object has no attribute {name!r}", name=name, obj=owner)
