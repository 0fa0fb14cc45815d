"""Names of genlm-backend 0.3 that genlm-core lacks, each with its replacement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from genlm.core import UnsupportedError

BATCHED = "batching is inside; await lm.next_token_logprobs(ids) in as many coroutines as you like"
ADAPTERS = {"UNKNOWN_ADAPTER": "catch genlm.core.UnknownAdapterError"}
ONE_DECODER = "decode_vocab(tokenizer) reads every kind of tokenizer, and checks what it reads"


def removed_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's ``__getattr__``: a name of 0.3 is answered with what replaces it."""

    def look_up(name: str) -> Any:
        if name in names:
            raise AttributeError(
                f"{module}.{name} existed in genlm-backend 0.3 and is gone: {names[name]}"
            )
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return look_up


class TokenTrie:
    """The prefix cache of genlm-backend 0.3. It is named for annotations only; none can be made."""

    def __init__(self, *arguments: object, **options: object) -> None:
        raise UnsupportedError("TokenTrie is gone: reuse is automatic, lm.cache_kv(prompt) pins")
