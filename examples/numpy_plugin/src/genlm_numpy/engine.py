"""The engine object: five attributes, and the hooks that a recurrent network can serve."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from genlm.core import Adapter, Query, hookimpl
from genlm.core.mock import ByteTokenizer
from genlm_numpy.network import Array, Network

Key = tuple[int, tuple[int, ...]]  # the adapter's version, 0 for the base model; the tokens


class RNNEngine:
    """Rows from a recurrent network; the states of the contexts asked for are kept.

    Args:
        path: A file as :meth:`Network.save` writes it.
        kept: The most states kept, besides pinned ones.
    """

    def __init__(self, path: str, kept: int = 10_000) -> None:
        self.tokenizer = ByteTokenizer()
        self.vocab_size = len(self.tokenizer)
        self.max_context = 1024
        self.device = "cpu"
        self.model = Network.load(path)
        self._kept = kept
        self._networks: dict[int, Network] = {0: self.model}  # by the adapter's version
        self._states: dict[Key, Array] = {}  # the oldest first
        self._pinned: dict[Key, Array] = {}

    @hookimpl
    def genlm_next_token_logprobs(self, queries: Sequence[Query]) -> torch.Tensor:
        logits = np.stack([self._network(query).logits(self._state(query)) for query in queries])
        return torch.log_softmax(torch.from_numpy(logits), dim=-1)

    def _state(self, query: Query) -> Array:
        """The state after a context, from the longest part of it that is known."""
        network, version, ids = self._network(query), _version(query.adapter), query.token_ids
        known, state = (
            (0, network.start()) if query.cold else self._longest_known(network, version, ids)
        )
        for end in range(known + 1, len(ids) + 1):
            state = network.advance(state, ids[end - 1])
            self._states[version, ids[:end]] = state
        while len(self._states) > self._kept:
            del self._states[next(iter(self._states))]
        return state

    def _longest_known(
        self, network: Network, version: int, ids: tuple[int, ...]
    ) -> tuple[int, Array]:
        for length in range(len(ids), 0, -1):
            for states in (self._states, self._pinned):
                if (version, ids[:length]) in states:
                    return length, states[version, ids[:length]]
        return 0, network.start()

    @hookimpl
    def genlm_cache_prefix(self, query: Query) -> bool:
        self._pinned[_version(query.adapter), query.token_ids] = self._state(query)
        return True

    @hookimpl
    def genlm_clear_kv_cache(self) -> None:
        self._states.clear()
        self._pinned.clear()

    @hookimpl
    def genlm_add_lora(self, adapter: Adapter) -> bool:
        self._networks[adapter.version] = self.model.adapted(adapter.path)
        return True

    @hookimpl
    def genlm_remove_lora(self, adapter: Adapter) -> bool:
        del self._networks[adapter.version]
        for states in (self._states, self._pinned):
            for key in [key for key in states if key[0] == adapter.version]:
                del states[key]
        return True

    def _network(self, query: Query) -> Network:
        return self._networks[_version(query.adapter)]


def _version(adapter: Adapter | None) -> int:
    return 0 if adapter is None else adapter.version
