"""The engine object: rows from a transformers model, with key/value state kept per context."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from genlm.core import Adapter, Query, hookimpl

Key = tuple[int, tuple[int, ...]]  # the adapter's version, 0 for the base model; the tokens
State = list[tuple[torch.Tensor, torch.Tensor]]  # per layer: keys and values, [heads, length, head_dim]


class HFEngine:
    """Rows from a causal model.

    Queries that continue a known context start from its key/value state; those with equally long known and new parts share
    a forward pass, so that no row is padded.
    """

    def __init__(self, model: Any, tokenizer: Any, contexts: int = 256) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.device = str(model.device)
        self.vocab_size = model.get_output_embeddings().weight.shape[0]
        self.max_context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._contexts = contexts
        self._states: OrderedDict[Key, State] = OrderedDict()
        self._pinned: dict[Key, State] = {}

    @hookimpl
    def genlm_next_token_logprobs(self, queries: Sequence[Query]) -> torch.Tensor:
        rows: dict[int, torch.Tensor] = {}
        for (adapter, known, _), members in self._groups(queries).items():
            self._select(adapter)
            logits, states = self._forward([queries[i] for i, _ in members], known, [state for _, state in members])
            for (i, _), row, state in zip(members, logits, states, strict=True):
                rows[i] = row
                if not queries[i].cold:
                    self._keep(queries[i], state)
        return torch.stack([rows[i] for i in range(len(queries))])

    def _groups(self, queries: Sequence[Query]) -> dict[tuple[Adapter | None, int, int], list[tuple[int, State | None]]]:
        groups = defaultdict(list)
        for i, query in enumerate(queries):
            known, state = self._longest_known(query)
            groups[query.adapter, known, len(query.token_ids) - known].append((i, state))
        return groups

    def _longest_known(self, query: Query) -> tuple[int, State | None]:
        if query.cold:
            return 0, None
        for length in range(len(query.token_ids) - 1, 0, -1):
            key = _key(query, length)
            state = self._states.get(key) or self._pinned.get(key)
            if state is not None:
                return length, state
        return 0, None

    @torch.inference_mode()
    def _forward(
        self, queries: Sequence[Query], known: int, states: Sequence[State | None]
    ) -> tuple[torch.Tensor, list[State]]:
        new = torch.tensor([query.token_ids[known:] for query in queries], device=self.device)
        cache = DynamicCache()
        if known:
            layers = zip(*(state for state in states if state is not None), strict=True)
            for i, layer in enumerate(layers):
                cache.update(torch.stack([k for k, _ in layer]), torch.stack([v for _, v in layer]), i)
        logits = self.model(new, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        rows = torch.log_softmax(logits.float(), dim=-1)
        return rows, [[(layer.keys[i], layer.values[i]) for layer in cache.layers] for i in range(len(queries))]

    def _keep(self, query: Query, state: State) -> None:
        self._states[_key(query)] = state
        while len(self._states) > self._contexts:
            self._states.popitem(last=False)

    # --- state ----------------------------------------------------------------------------------------------------------

    @hookimpl
    def genlm_cache_prefix(self, query: Query) -> bool:
        self.genlm_next_token_logprobs([query])
        self._pinned[_key(query)] = self._states[_key(query)]
        return True

    @hookimpl
    def genlm_clear_kv_cache(self) -> None:
        self._states.clear()
        self._pinned.clear()

    @hookimpl
    def genlm_add_lora(self, adapter: Adapter) -> bool:
        from peft import PeftModel

        if isinstance(self.model, PeftModel):
            self.model.load_adapter(adapter.path, _adapter_name(adapter))
        else:
            self.model = PeftModel.from_pretrained(self.model, adapter.path, _adapter_name(adapter))
        self.model.eval()
        return True

    @hookimpl
    def genlm_remove_lora(self, adapter: Adapter) -> bool:
        self.model.delete_adapter(_adapter_name(adapter))
        for states in (self._states, self._pinned):
            for key in [key for key in states if key[0] == adapter.version]:
                del states[key]
        return True

    def _select(self, adapter: Adapter | None) -> None:
        if hasattr(self.model, "peft_config"):
            if adapter is None:
                self.model.base_model.disable_adapter_layers()
            else:
                self.model.base_model.enable_adapter_layers()
                self.model.set_adapter(_adapter_name(adapter))

    @hookimpl
    def genlm_close(self) -> None:
        self.genlm_clear_kv_cache()


def _key(query: Query, length: int | None = None) -> Key:
    return (query.adapter.version if query.adapter else 0), query.token_ids[:length]


def _adapter_name(adapter: Adapter) -> str:
    return f"v{adapter.version}"
