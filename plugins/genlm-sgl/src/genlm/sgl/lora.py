"""LoRA adapters: an engine with two hooks more, for models loaded with ``enable_lora``."""

from __future__ import annotations

from genlm.core import Adapter, Query, hookimpl
from genlm.sgl.engine import SglEngine, adapter_id


class SglLoraEngine(SglEngine):
    """An engine that evaluates queries of different adapters in one batch."""

    @hookimpl
    def genlm_add_lora(self, adapter: Adapter) -> bool:
        self.scheduler.load_adapter(_id(adapter), adapter.path)
        return True

    @hookimpl
    def genlm_remove_lora(self, adapter: Adapter) -> bool:
        for query in [query for query in self._pinned if query.adapter == adapter]:
            self.scheduler.unlock(self._pinned.pop(query))
        self.scheduler.unload_adapter(_id(adapter))
        return True


def _id(adapter: Adapter) -> str:
    return str(adapter_id(Query(token_ids=(0,), adapter=adapter)))
