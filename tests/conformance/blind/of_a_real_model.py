"""Mutants of a tiny real model behind ``genlm-hf``, written before the suite was looked at.

Each cites the thread that reports the bug. They take hold of the engine's hooks and of the torch
module, so they do not depend on how the plugin is made.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve

from genlm.core import hookimpl
from genlm.core.types import Adapter, Query
from genlm.hf.engine import HFEngine
from tests.engines import rows_of

from .common import Keeping, Mutants

#: With a clause that catches each, found by ``nox -s mutants`` once the suite was there.
MUTANTS = Mutants()
seen_in = MUTANTS.seen_in


class Hooked(HFEngine):
    """Calls :meth:`hook` once the model stands."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.hook(self.model)

    def hook(self, model: Any) -> None:
        raise NotImplementedError


class Batched(HFEngine):
    """Is asked for one batch after the other, as the engines were whose bugs these are."""

    genlm_step = None

    @hookimpl
    def genlm_next_token_logprobs(self, queries: Sequence[Query]) -> torch.Tensor:
        return rows_of(super(), queries)


class Positions(Hooked):
    """Computes with the positions that :meth:`changed` makes of those that it is given."""

    def hook(self, model: Any) -> None:
        def change(module: Any, arguments: Any, keywords: Any) -> Any:
            positions = keywords.get("position_ids", arguments[-1])
            return (arguments[0],), {"position_ids": self.changed(positions)}

        found = (module for name, module in model.named_modules() if name.endswith("rotary_emb"))
        self.rotary = next(found)
        self.rotary.register_forward_pre_hook(change, with_kwargs=True)

    def changed(self, positions: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


@seen_in("https://github.com/tenstorrent/vllm/issues/415", "extended_context")
class ResumedOneOff(Positions):
    """Tokens that resume from cached state get positions one too high."""

    def changed(self, positions):
        return positions + 1 if int(positions.min()) > 16 else positions


@seen_in("https://github.com/huggingface/transformers/pull/24653", "two_long_contexts_in_turn")
class RotaryNeverShrinksBack(Positions):
    """One long context changes the rotary base, and short ones keep the changed one."""

    grown = False

    def changed(self, positions):
        if int(positions.max()) >= 100 and not self.grown:
            self.grown = True
            self.rotary.inv_freq.mul_(0.9)
        return positions


@seen_in("https://github.com/abetlen/llama-cpp-python/issues/1018", "batch_answers_in_order")
class ScaleOfTheWholeBatch(Hooked):
    """Activations are quantised with one scale for all rows: a row depends on its companions."""

    def hook(self, model):
        def quantise(module, arguments):
            scale = arguments[0].abs().amax() / 127
            return ((arguments[0] / scale).round() * scale,)

        next(
            module for name, module in model.named_modules() if name.endswith("down_proj")
        ).register_forward_pre_hook(quantise)


@seen_in("https://github.com/ggml-org/llama.cpp/pull/14853", "large_batch")
class LastRowsSwapped(Hooked):
    """With more outputs than one micro-batch holds, two rows change places."""

    def hook(self, model):
        def swap(module, arguments, output):
            rows = output.reshape(-1, output.shape[-1])
            if len(rows) > 64:
                rows = torch.cat([rows[:-2], rows[-1:], rows[-2:-1]])
            return rows.reshape(output.shape)

        model.get_output_embeddings().register_forward_hook(swap)


@seen_in("https://github.com/huggingface/trl/issues/3425", "row_depends_on_every_token")
class AddedTokensUnknown(Hooked):
    """Tokens at the end of the vocabulary are unknown to the engine: all have one embedding."""

    def hook(self, model):
        def clamp(module, arguments):
            return (arguments[0].clamp(max=self.vocab_size - 8),)

        model.get_input_embeddings().register_forward_pre_hook(clamp)


@seen_in("https://github.com/jundot/omlx/issues/3777", "row_depends_on_every_token")
class LongContextsLoseTheirStart(Hooked):
    """Long contexts silently lose a part of their state; here, their first token."""

    def hook(self, model):
        def forget(module, arguments):
            ids = arguments[0].clone()
            if ids.shape[-1] > 96:
                ids[..., 0] = ids[..., 1]
            return (ids,)

        model.get_input_embeddings().register_forward_pre_hook(forget)


@seen_in("https://github.com/huggingface/peft/issues/2438", "cold_row_is_repeatable")
class TrainingModeAfterLoading(Hooked):
    """Loading an adapter leaves the model in training mode, with dropout."""

    training_mode = False

    def hook(self, model):
        def drop(module, arguments):
            if self.training_mode:
                return (torch.dropout(arguments[0], 0.02, True),)
            return None

        model.get_output_embeddings().register_forward_pre_hook(drop)

    @hookimpl
    def genlm_add_lora(self, adapter, contents):
        self.training_mode = False  # or the engine would see the model change while it loads
        added = super().genlm_add_lora(adapter, contents)
        self.training_mode = True
        return added


@seen_in("https://github.com/huggingface/peft/issues/1388", "removed_adapter")
class MergedAndNotQuiteUnmerged(HFEngine):
    """Merging and unmerging an adapter leaves a difference in the base weights."""

    @hookimpl
    def genlm_remove_lora(self, adapter):
        removed = super().genlm_remove_lora(adapter)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(0)
            weight = next(
                p for n, p in self.model.named_parameters() if "q_proj" in n and "lora" not in n
            )
            weight.add_(torch.randn(weight.shape, generator=generator) * weight.std() * 0.1)
        return removed


@seen_in("https://github.com/huggingface/peft/pull/2090", "adapters_in_one_batch")
class UnknownNamesAreTheBase(Batched):
    """In a batch with two adapters, rows of the second are computed as the base model's."""

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        names = list(dict.fromkeys(query.adapter for query in queries if query.adapter))
        if len(names) > 1:
            keep = names[0]
            changed = [
                query if query.adapter in (None, keep) else evolve(query, adapter=None)
                for query in queries
            ]
            if len(set(changed)) == len(changed):
                queries = changed
        return super().genlm_next_token_logprobs(queries)


@seen_in("https://github.com/unslothai/unsloth/issues/2142", "scores_together")
class ScoresWithoutTheAdapter(HFEngine):
    """Scoring goes through the base model whatever adapter was asked."""

    @hookimpl
    def genlm_sequence_logprobs(self, queries, continuations):
        return super().genlm_sequence_logprobs(
            [evolve(query, adapter=None) for query in queries], continuations
        )


@seen_in("https://github.com/huggingface/peft/issues/2270", "error_inside_the_engine")
class AdapterSwitchLost(Batched):
    """After an exception in a batch with an adapter, the adapter stays on for the base's rows."""

    left: Adapter | None = None

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        if self.left is not None and not any(query.adapter for query in queries):
            queries = [evolve(query, adapter=self.left) for query in queries]
        try:
            rows = super().genlm_next_token_logprobs(queries)
        except Exception:
            self.left = next((query.adapter for query in queries if query.adapter), None)
            raise
        return rows

    @hookimpl
    def genlm_remove_lora(self, adapter):
        self.left = None
        return super().genlm_remove_lora(adapter)


@seen_in("https://github.com/vllm-project/vllm/issues/9744", "weights_changed_in_place")
class StateOutlivesTheWeights(HFEngine):
    """Clearing key/value state is a stub, so state of older weights is used after an update."""

    @hookimpl
    def genlm_clear_kv_cache(self):
        return None


@seen_in("https://github.com/vllm-project/vllm/pull/14326", "nothing_is_left_after_close")
class LogitsKept(Hooked):
    """Something keeps a reference to the logits of every forward, also after the end."""

    def hook(self, model):
        KEPT.append(kept := [])

        def keep(module, arguments, output):
            kept.append(output.detach())

        model.get_output_embeddings().register_forward_hook(keep)


KEPT: list[list[torch.Tensor]] = []


@seen_in("https://github.com/vllm-project/vllm/issues/8933", "nothing_is_left_after_close")
class WorkerOutlivesTheModel(HFEngine):
    """A worker thread of the engine is not stopped when the model is closed."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        threading.Thread(target=threading.Event().wait, daemon=True, name="worker").start()


@seen_in("https://github.com/sgl-project/sglang/pull/29779", "contract_is_kept_throughout")
class OutputInTheGraphsBuffer(Keeping, Batched, buffers=dict):
    """Rows are views of one buffer that the next batch of the same size overwrites."""

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        rows = super().genlm_next_token_logprobs(queries)
        return self.buffers.setdefault(len(rows), torch.empty_like(rows)).copy_(rows)


@seen_in("https://github.com/unslothai/unsloth/pull/3795", "batch_answers_in_order")
class PositionsOfTheFirstRow(Positions):
    """All sequences of a batch share the positions of one."""

    def changed(self, positions):
        if positions.shape[0] > 1:
            return positions[:1].expand_as(positions)
        if positions.shape[-1] > 1 and (positions.diff() != 1).any():
            return positions[..., :1] + torch.arange(positions.shape[-1])
        return positions
