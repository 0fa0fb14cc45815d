"""LoRA adapters: an engine with more hooks, for models loaded with ``enable_lora``."""

from __future__ import annotations

import tempfile
from functools import cached_property
from pathlib import Path

from genlm.core import Adapter, hookimpl
from genlm.kit.adapter_files import (
    AdapterFolder,
    Feature,
    presumed_shapes,
    read_adapter,
    shapes_in_transformers,
    write_plain,
)
from genlm.sgl.engine import SglEngine, adapter_id

#: Settings that are applied correctly once the scale is multiplied into the matrices, because
#: SGLang (to 0.5.23) always scales by ``lora_alpha / r``.
APPLIED = frozenset({Feature.RSLORA, Feature.RANKS, Feature.ALPHAS})

#: The last parts of the names of modules that SGLang joins into one. An adapter must change all
#: modules of a group or none.
ONE_MODULE = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)


class SglLoraEngine(SglEngine):
    """An engine that evaluates queries of different adapters in one batch."""

    gives_scores = False

    @hookimpl
    def genlm_read_lora(self, adapter: Adapter) -> AdapterFolder:
        """Raises: InvalidAdapterError: the adapter is invalid, or of a kind that SGLang applies
        wrongly."""
        folder = read_adapter(adapter.path)
        folder.require(APPLIED, "SGLang")
        return folder

    @hookimpl
    def genlm_add_lora(self, adapter: Adapter, contents: AdapterFolder) -> bool:
        """Raises: InvalidAdapterError: the adapter is made for another model."""
        contents.require_modules(self._shapes or presumed_shapes(contents, self.scheduler.config))
        with tempfile.TemporaryDirectory() as plain:
            write_plain(contents, Path(plain), self._missing(contents))
            self.scheduler.load_adapter(adapter_id(adapter), plain, named=adapter.path)
        return True

    @hookimpl
    def genlm_remove_lora(self, adapter: Adapter) -> bool:
        self._settle()
        for query in [query for query in self._pinned if query.adapter == adapter]:
            self.scheduler.unlock(self._pinned.pop(query))
        self.scheduler.unload_adapter(adapter_id(adapter))
        return True

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, int]] | None:
        return shapes_in_transformers(self.scheduler.config)

    def _missing(self, folder: AdapterFolder) -> dict[str, tuple[int, int]]:
        """The modules that the adapter lacks, although SGLang joins them with an adapted one."""
        missing = {}
        for name in folder.modules:
            parent, _, last = name.rpartition(".")
            for group in ONE_MODULE:
                for each in group if last in group else ():
                    other = f"{parent}.{each}"
                    if other not in folder.modules and other in (self._shapes or {}):
                        missing[other] = (self._shapes or {})[other]
        return missing
