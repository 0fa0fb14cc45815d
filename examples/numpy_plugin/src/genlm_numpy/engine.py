"""The engine object: five attributes, and the hooks that this engine can serve."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from genlm.core import Adapter, Query, hookimpl
from genlm.core.mock import ByteTokenizer
from genlm.kit.kv import SharingCosts, TokenSequence
from genlm_numpy.network import Network
from genlm_numpy.states import States


class NumpyEngine:
    """Rows from a transformer in NumPy; the state of contexts is kept.

    Args:
        path: A file written by :meth:`Network.save`.
        kept: The most positions whose state is kept, besides what a batch and pinned prefixes take.
    """

    def __init__(self, path: str, kept: int = 100_000) -> None:
        self.tokenizer = ByteTokenizer()
        self.vocab_size = len(self.tokenizer)
        self.max_context = 1024
        self.device = "cpu"
        self.model = Network.load(path)
        self._networks = {0: self.model}  # by version of the adapter
        self._states = States(self._networks, kept, SharingCosts())

    @hookimpl
    def genlm_next_token_logprobs(self, queries: Sequence[Query]) -> torch.Tensor:
        sequences = [TokenSequence(query.token_ids, query.adapter) for query in queries]
        if queries[0].cold:
            network = self._networks[sequences[0].version]
            logits = np.stack([network.cold(queries[0].token_ids)])
        else:
            logits = self._states.logits(sequences)
        return torch.log_softmax(torch.from_numpy(logits), dim=-1)

    @hookimpl
    def genlm_cache_prefix(self, query: Query) -> bool:
        sequence = TokenSequence(query.token_ids, query.adapter)
        self._states.logits([sequence])
        return self._states.planner.pin(sequence)

    @hookimpl
    def genlm_clear_kv_cache(self) -> None:
        self._states.planner.clear()

    @hookimpl
    def genlm_add_lora(self, adapter: Adapter) -> bool:
        self._networks[adapter.version] = self.model.adapted(adapter.path)
        return True

    @hookimpl
    def genlm_remove_lora(self, adapter: Adapter) -> bool:
        del self._networks[adapter.version]
        self._states.planner.drop_adapter(adapter.version)
        return True
