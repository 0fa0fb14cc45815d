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

from .common import Keeping


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


def rotary_of(model: Any) -> Any:
    return next(module for name, module in model.named_modules() if name.endswith("rotary_emb"))


class ResumedOneOff(Hooked):
    """Tokens that resume from cached state get positions one too high.

    https://github.com/tenstorrent/vllm/issues/415
    """

    def hook(self, model: Any) -> None:
        def shift(module: Any, arguments: Any, keywords: Any) -> Any:
            position_ids = keywords.get("position_ids", arguments[-1])
            if int(position_ids.min()) > 16:
                position_ids = position_ids + 1
            return (arguments[0],), {"position_ids": position_ids}

        rotary_of(model).register_forward_pre_hook(shift, with_kwargs=True)


class RotaryNeverShrinksBack(Hooked):
    """One long context changes the rotary base, and short ones keep the changed one.

    https://github.com/huggingface/transformers/pull/24653
    """

    def hook(self, model: Any) -> None:
        def grow(module: Any, arguments: Any, keywords: Any) -> None:
            position_ids = keywords.get("position_ids", arguments[-1])
            if int(position_ids.max()) >= 100 and not hasattr(module, "grown"):
                module.grown = True
                module.inv_freq.mul_(0.9)

        rotary_of(model).register_forward_pre_hook(grow, with_kwargs=True)


class ScaleOfTheWholeBatch(Hooked):
    """Activations are quantised with one scale for all rows: a row depends on its companions.

    https://github.com/abetlen/llama-cpp-python/issues/1018
    """

    def hook(self, model: Any) -> None:
        def quantise(module: Any, arguments: Any) -> Any:
            scale = arguments[0].abs().amax() / 127
            return ((arguments[0] / scale).round() * scale,)

        next(
            module for name, module in model.named_modules() if name.endswith("down_proj")
        ).register_forward_pre_hook(quantise)


class LastRowsSwapped(Hooked):
    """With more outputs than one micro-batch holds, two rows change places.

    https://github.com/ggml-org/llama.cpp/pull/14853
    """

    def hook(self, model: Any) -> None:
        def swap(module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
            rows = output.reshape(-1, output.shape[-1])
            if len(rows) > 64:
                rows = torch.cat([rows[:-2], rows[-1:], rows[-2:-1]])
            return rows.reshape(output.shape)

        model.get_output_embeddings().register_forward_hook(swap)


class AddedTokensUnknown(Hooked):
    """Tokens at the end of the vocabulary are unknown to the engine: all have one embedding.

    https://github.com/huggingface/trl/issues/3425
    """

    def hook(self, model: Any) -> None:
        def clamp(module: Any, arguments: Any) -> Any:
            return (arguments[0].clamp(max=self.vocab_size - 8),)

        model.get_input_embeddings().register_forward_pre_hook(clamp)


class LongContextsLoseTheirStart(Hooked):
    """Long contexts silently lose a part of their state; here, their first token.

    https://github.com/jundot/omlx/issues/3777
    """

    def hook(self, model: Any) -> None:
        def forget(module: Any, arguments: Any) -> Any:
            ids = arguments[0].clone()
            if ids.shape[-1] > 96:
                ids[..., 0] = ids[..., 1]
            return (ids,)

        model.get_input_embeddings().register_forward_pre_hook(forget)


class TrainingModeAfterLoading(Hooked):
    """Loading an adapter leaves the model in training mode, with dropout.

    https://github.com/huggingface/peft/issues/2438
    """

    training_mode = False

    def hook(self, model: Any) -> None:
        def drop(module: Any, arguments: Any) -> Any:
            if self.training_mode:
                return (torch.dropout(arguments[0], 0.02, True),)
            return None

        model.get_output_embeddings().register_forward_pre_hook(drop)

    @hookimpl
    def genlm_add_lora(self, adapter: Adapter, contents: Any) -> bool:
        self.training_mode = False  # or the engine would see the model change while it loads
        added = super().genlm_add_lora(adapter, contents)
        self.training_mode = True
        return added


class MergedAndNotQuiteUnmerged(HFEngine):
    """Merging and unmerging an adapter leaves a difference in the base weights.

    https://github.com/huggingface/peft/issues/1388
    """

    @hookimpl
    def genlm_remove_lora(self, adapter: Adapter) -> bool:
        removed = super().genlm_remove_lora(adapter)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(0)
            weight = next(
                p for n, p in self.model.named_parameters() if "q_proj" in n and "lora" not in n
            )
            weight.add_(torch.randn(weight.shape, generator=generator) * weight.std() * 0.1)
        return removed


class UnknownNamesAreTheBase(Batched):
    """In a batch with two adapters, rows of the second are computed as the base model's.

    https://github.com/huggingface/peft/pull/2090
    """

    @hookimpl
    def genlm_next_token_logprobs(self, queries: Sequence[Query]) -> torch.Tensor:
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


class ScoresWithoutTheAdapter(HFEngine):
    """Scoring goes through the base model whatever adapter was asked.

    https://github.com/unslothai/unsloth/issues/2142
    """

    @hookimpl
    def genlm_sequence_logprobs(
        self, queries: Sequence[Query], continuations: Sequence[Sequence[int]]
    ) -> Sequence[torch.Tensor]:
        return super().genlm_sequence_logprobs(
            [evolve(query, adapter=None) for query in queries], continuations
        )


class AdapterSwitchLost(Batched):
    """After an exception in a batch with an adapter, the adapter stays on for the base's rows.

    https://github.com/huggingface/peft/issues/2270
    """

    left: Adapter | None = None

    @hookimpl
    def genlm_next_token_logprobs(self, queries: Sequence[Query]) -> torch.Tensor:
        if self.left is not None and not any(query.adapter for query in queries):
            queries = [evolve(query, adapter=self.left) for query in queries]
        try:
            rows = super().genlm_next_token_logprobs(queries)
        except Exception:
            self.left = next((query.adapter for query in queries if query.adapter), None)
            raise
        return rows

    @hookimpl
    def genlm_remove_lora(self, adapter: Adapter) -> bool:
        self.left = None
        return super().genlm_remove_lora(adapter)


class StateOutlivesTheWeights(HFEngine):
    """Clearing key/value state is a stub, so state of older weights is used after an update.

    https://github.com/vllm-project/vllm/issues/9744
    """

    @hookimpl
    def genlm_clear_kv_cache(self) -> None:
        return None


class LogitsKept(Hooked):
    """Something keeps a reference to the logits of every forward, also after the end.

    https://github.com/vllm-project/vllm/pull/14326
    """

    def hook(self, model: Any) -> None:
        KEPT.append(kept := [])

        def keep(module: Any, arguments: Any, output: torch.Tensor) -> None:
            kept.append(output.detach())

        model.get_output_embeddings().register_forward_hook(keep)


KEPT: list[list[torch.Tensor]] = []


class WorkerOutlivesTheModel(HFEngine):
    """A worker thread of the engine is not stopped when the model is closed.

    https://github.com/vllm-project/vllm/issues/8933
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        threading.Thread(target=threading.Event().wait, daemon=True, name="worker").start()


class OutputInTheGraphsBuffer(Keeping, Batched, buffers=dict):
    """Rows are views of one buffer that the next batch of the same size overwrites.

    https://github.com/sgl-project/sglang/pull/29779
    """

    @hookimpl
    def genlm_next_token_logprobs(self, queries: Sequence[Query]) -> torch.Tensor:
        rows = super().genlm_next_token_logprobs(queries)
        return self.buffers.setdefault(len(rows), torch.empty_like(rows)).copy_(rows)


class PositionsOfTheFirstRow(Hooked):
    """All sequences of a batch share the positions of one.

    https://github.com/unslothai/unsloth/pull/3795
    """

    def hook(self, model: Any) -> None:
        def share(module: Any, arguments: Any, keywords: Any) -> Any:
            position_ids = keywords.get("position_ids", arguments[-1])
            if position_ids.shape[0] > 1:
                position_ids = position_ids[:1].expand_as(position_ids)
            elif position_ids.shape[-1] > 1 and (position_ids.diff() != 1).any():
                first = position_ids[..., :1]
                position_ids = first + torch.arange(position_ids.shape[-1])
            return (arguments[0],), {"position_ids": position_ids}

        rotary_of(model).register_forward_pre_hook(share, with_kwargs=True)


#: With a clause that catches each, found by ``nox -s mutants`` once the suite was there.
MUTANTS = {
    ResumedOneOff: "extended_context",
    RotaryNeverShrinksBack: "two_long_contexts_in_turn",
    ScaleOfTheWholeBatch: "batch_answers_in_order",
    LastRowsSwapped: "large_batch",
    AddedTokensUnknown: "row_depends_on_every_token",
    LongContextsLoseTheirStart: "row_depends_on_every_token",
    TrainingModeAfterLoading: "cold_row_is_repeatable",
    MergedAndNotQuiteUnmerged: "removed_adapter",
    UnknownNamesAreTheBase: "adapters_in_one_batch",
    ScoresWithoutTheAdapter: "scores_agree_with_rows",
    AdapterSwitchLost: "error_inside_the_engine",
    StateOutlivesTheWeights: "weights_changed_in_place",
    LogitsKept: "nothing_is_left_after_close",
    WorkerOutlivesTheModel: "nothing_is_left_after_close",
    OutputInTheGraphsBuffer: "contract_is_kept_throughout",
    PositionsOfTheFirstRow: "batch_answers_in_order",
}
