"""Faults of a tiny real model: of clauses that no mock can break."""

from __future__ import annotations

import os
import shutil
import tempfile

import torch
from attrs import evolve

from genlm.core import hookimpl
from genlm.hf.engine import HFEngine

from ..blind.common import Keeping
from ..blind.of_a_real_model import Batched


class WeightsKeptByPath(Keeping, Batched, by_path=dict):
    """The weights of an adapter are kept by the path of its folder, whatever that holds now.

    Breaks ``same_path_with_other_weights``.
    """

    @hookimpl
    def genlm_add_lora(self, adapter, contents):
        if adapter.path not in self.by_path:
            super().genlm_add_lora(adapter, contents)
            self.by_path[adapter.path] = adapter
        return True

    @hookimpl
    def genlm_remove_lora(self, adapter):
        return True

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        known = [
            evolve(query, adapter=query.adapter and self.by_path[query.adapter.path])
            for query in queries
        ]
        unique = list(dict.fromkeys(known))
        rows = super().genlm_next_token_logprobs(unique)
        return rows[torch.tensor([unique.index(query) for query in known])]


class FolderReadOnce(Keeping, HFEngine, downloads=tempfile.mkdtemp, by_path=dict):
    """The files of an adapter are downloaded once, and never looked at again.

    Breaks ``same_path_with_other_weights``.
    """

    @hookimpl
    def genlm_read_lora(self, adapter):
        if adapter.path not in self.by_path and os.path.isdir(adapter.path):
            copy = os.path.join(self.downloads, str(len(self.by_path)))
            self.by_path[adapter.path] = shutil.copytree(adapter.path, copy)
        path = self.by_path.get(adapter.path, adapter.path)
        return super().genlm_read_lora(evolve(adapter, path=path))

    @hookimpl
    def genlm_close(self):
        super().genlm_close()
        shutil.rmtree(self.downloads)


class WrongAdapterPassedOver(Keeping, Batched, passed_over=set):
    """An adapter that does not fit is passed over, and its rows are the base model's.

    Breaks ``adapter_of_another_model``.
    """

    @hookimpl
    def genlm_add_lora(self, adapter, contents):
        try:
            return super().genlm_add_lora(adapter, contents)
        except Exception:
            if adapter.name != "wider":
                raise
            self.passed_over.add(adapter.version)
            return True

    @hookimpl
    def genlm_remove_lora(self, adapter):
        return adapter.version in self.passed_over or super().genlm_remove_lora(adapter)

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        return super().genlm_next_token_logprobs(
            [
                evolve(query, adapter=None)
                if query.adapter and query.adapter.version in self.passed_over
                else query
                for query in queries
            ]
        )


#: With the clause that each breaks.
MUTANTS = {
    WeightsKeptByPath: "same_path_with_other_weights",
    FolderReadOnce: "same_path_with_other_weights",
    WrongAdapterPassedOver: "adapter_of_another_model",
}
