"""Faults of a tiny real model behind ``genlm-hf``: of clauses that no mock can break, of rows that
differ by rounding, and of state that the planner of genlm-kit moves."""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Any

import torch
from attrs import evolve

from genlm.core import hookimpl
from genlm.hf.engine import HFEngine
from genlm.kit.kv.commands import Fork, Shift

from .registry import Keeping, Registry

MUTANTS = Registry()
breaks = MUTANTS.breaks


class Hooked(HFEngine):
    """Calls :meth:`hook` once the model stands."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.hook(self.model)

    def hook(self, model: Any) -> None:
        raise NotImplementedError


@breaks("extended_context", "https://github.com/tenstorrent/vllm/issues/415")
class ResumedOneOff(Hooked):
    """Tokens that resume from cached state get positions one too high."""

    def hook(self, model):
        def change(module, arguments, keywords):
            positions = keywords.get("position_ids", arguments[-1])
            if int(positions.min()) > 16:
                positions = positions + 1
            return (arguments[0],), {"position_ids": positions}

        rotary = next(part for name, part in model.named_modules() if name.endswith("rotary_emb"))
        rotary.register_forward_pre_hook(change, with_kwargs=True)


@breaks("batch_answers_in_order", "https://github.com/abetlen/llama-cpp-python/issues/1018")
class ScaleOfTheWholeBatch(Hooked):
    """Activations are quantised with one scale for all rows: a row depends on its companions."""

    def hook(self, model):
        def quantise(module, arguments):
            scale = arguments[0].abs().amax() / 127
            return ((arguments[0] / scale).round() * scale,)

        down = next(part for name, part in model.named_modules() if name.endswith("down_proj"))
        down.register_forward_pre_hook(quantise)


@breaks("cold_row_is_repeatable", "https://github.com/huggingface/peft/issues/2438")
class TrainingModeAfterLoading(Hooked):
    """Loading an adapter leaves the model in training mode, with dropout."""

    training_mode = False

    def hook(self, model):
        def drop(module, arguments):
            return (torch.dropout(arguments[0], 0.02, self.training_mode),)

        model.get_output_embeddings().register_forward_pre_hook(drop)

    @hookimpl
    def genlm_add_lora(self, adapter, contents):
        self.training_mode = False  # Else the engine sees a model that changes while it loads.
        added = super().genlm_add_lora(adapter, contents)
        self.training_mode = True
        return added


@breaks("weights_changed_in_place", "https://github.com/vllm-project/vllm/issues/9744")
class StateOutlivesTheWeights(HFEngine):
    """Clearing key/value state is a stub, so state of older weights is used after an update."""

    @hookimpl
    def genlm_clear_kv_cache(self):
        return None


@breaks("weights_changed_in_place")
class ColdFromState(HFEngine):
    """Cold rows start from kept state too."""

    def _rows(self, sequences, cold=False):
        return super()._rows(sequences)


@breaks("same_path_with_other_weights")
class FolderReadOnce(Keeping, HFEngine, downloads=tempfile.mkdtemp, by_path=dict):
    """The files of an adapter are downloaded once, and never looked at again."""

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


@breaks("adapter_of_another_model", "https://github.com/huggingface/peft/pull/2090")
class WrongAdapterPassedOver(HFEngine):
    """Instead of an adapter that does not fit the first one is taken."""

    #: The contents of the first adapter; the folders of later ones may be gone.
    first = None

    @hookimpl
    def genlm_add_lora(self, adapter, contents):
        try:
            added = super().genlm_add_lora(adapter, contents)
        except Exception:
            if adapter.name != "wider":
                raise
            return super().genlm_add_lora(adapter, self.first)
        self.first = self.first or contents
        return added


# --- of the planner's commands --------------------------------------------------------------------


class Commands(HFEngine):
    """Carries out what ``change`` makes of the planner's commands."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        table = self._strategy.planner._table
        right = table.do
        table.do = lambda command: right(self.change(command))


def fork_of_three(engine, command):
    """One row is forked into several in turn, and where there are more the last is left out."""
    if isinstance(command, Fork) and len(command.targets) > 3:
        command = evolve(command, sources=command.sources[:-1], targets=command.targets[:-1])
    return command


def shift_too_far(engine, command):
    """https://github.com/waybarrios/vllm-mlx/pull/353"""
    if isinstance(command, Shift) and command.columns > 1:
        command = evolve(command, by=command.by + 1, columns=command.columns - 1)
    return command


MUTANTS.changes(
    Commands,
    ("ForksInTurn", "large_batch", fork_of_three),
    ("ShiftsTooFar", "all_lengths_in_one_batch", shift_too_far),
)
