"""HFEngine: what the core talks to."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from attrs import evolve

from genlm.core import hookimpl
from genlm.core.adapter_files import AdapterFolder
from genlm.core.errors import EngineError
from genlm.core.types import Adapter, Answer, Query
from genlm.hf.adapters import AdapterSet
from genlm.hf.attention import register_row_attention
from genlm.hf.evaluator import Evaluator
from genlm.hf.options import HFOptions
from genlm.hf.patterns import attention_window, layer_patterns
from genlm.hf.pool import RowPool
from genlm.hf.positions import longest_context
from genlm.hf.probe import Choice, choose_reuse
from genlm.hf.proof import BaseRow
from genlm.hf.reuse import Reuse
from genlm.hf.runner import Runner
from genlm.hf.schedule import Schedule
from genlm.hf.sequence import TokenSequence
from genlm.hf.strategies import Result, strategy_for
from genlm.hf.upload import Upload

GIB = 1 << 30

#: Rows of long contexts may be off by so many times what the probe of short ones allows.
PROOF_MARGIN = 4.0


class HFEngine:
    """A transformers model behind the hooks of genlm-core.

    Args:
        model: A causal language model; it is put into evaluation mode.
        tokenizer: Its tokenizer.
        options: ``kv_cache_bytes`` and ``max_batch_tokens`` matter here.

    Attributes:
        tokenizer, vocab_size, max_context, device, model: See :class:`genlm.core.types.Engine`.
        reuse: How key/value state is reused with this model, found out by a probe.
    """

    def __init__(self, model: Any, tokenizer: Any, options: HFOptions | None = None) -> None:
        options = options or HFOptions()
        self._refuse(model)
        self._describe(model, tokenizer)
        self._was_training = model.training
        self._original_attention = model.config._attn_implementation
        self._adapters = AdapterSet(model)
        register_row_attention()
        self._runner = Runner(model.eval(), self._adapters, RowPool(), layer_patterns(model))
        choice = self._choose_reuse()
        self.reuse, self._tolerance = choice.reuse, choice.tolerance
        budget = _budget(options, model.device)
        self._strategy = strategy_for(self.reuse, self._runner, options.max_batch_tokens, budget)
        self._evaluator = Evaluator(self._strategy, self._adapters, choice.limit, choice.rows_apart)
        self._schedule: Schedule[Query] = Schedule(self._evaluator, options.max_batch_tokens)
        model._genlm_engine = (id(model), weakref.ref(self))

    def _describe(self, model: Any, tokenizer: Any) -> None:
        """Set what the core asks of an engine, from the model's configuration."""
        self.model = model
        self.tokenizer = tokenizer
        self._config = model.config.get_text_config(decoder=True)
        self.vocab_size: int = _vocab_size(model, self._config)
        self.max_context = longest_context(model)
        self.device = str(model.device)

    def _choose_reuse(self) -> Choice:
        """Probe the model; on an error it is left as it was before."""
        window = attention_window(self.model) or getattr(self._config, "window_size", None)
        try:
            return choose_reuse(self.model, self._runner, self.vocab_size, self.max_context, window)
        except BaseException:
            self._restore()
            self.model.train(self._was_training)
            raise

    @staticmethod
    def _refuse(model: Any) -> None:
        """Refuse what cannot be served, before the model is changed.

        Raises:
            EngineError: the model is not a causal language model, or is served already.
        """
        kind = type(model).__name__
        if getattr(model.config, "is_encoder_decoder", False):
            raise EngineError(
                f"{kind} is an encoder-decoder model, whose rows need an input to the encoder; "
                "give a causal language model (AutoModelForCausalLM)"
            )
        generates = getattr(model, "can_generate", lambda: True)()
        if not generates and model.get_output_embeddings() is None:
            raise EngineError(
                f"{kind} has no output layer over the vocabulary; "
                "give a causal language model (AutoModelForCausalLM)"
            )
        owner, engine = getattr(model, "_genlm_engine", (None, lambda: None))
        if owner == id(model) and engine() is not None:  # a copy of a model has another id
            raise EngineError(
                "this model object is served by another AsyncTransformer, which owns its state; "
                "share that one, close it first, or load the model a second time"
            )

    @hookimpl
    def genlm_step(self, queries: Sequence[Query], dropped: Sequence[Query]) -> list[Answer]:
        """Answer what about one chunk of ``max_batch_tokens`` is enough for."""
        for query in dropped:
            self._schedule.drop(query)
        if queries and queries[0].cold:
            return [Answer(queries[0], self._cold(_sequence(queries[0])))]
        for query in queries:
            self._schedule.add(query, _sequence(query))
        if not self._schedule:
            return []
        try:
            step = self._schedule.next()
            rows = self._answers(list(step.answered.values()), step.chunk)
        except BaseException:
            self._schedule.clear()
            raise
        return [Answer(query, row) for query, row in zip(step.answered, rows, strict=True)]

    def _cold(self, sequence: TokenSequence) -> torch.Tensor:
        """Its row, from its tokens only."""
        return _logprobs(self._evaluator.cold(sequence).logits)[0]

    def _answers(
        self, sequences: Sequence[TokenSequence], chunk: TokenSequence | None = None
    ) -> torch.Tensor:
        """A row for each sequence; the chunk is computed for its state."""
        # First: where memory is short, the others may drive out what it goes on from.
        ahead = [] if chunk is None else [chunk]
        unproven = self._evaluator.unproven(sequences) if sequences else None
        if unproven is not None:
            self._rows([self._evaluator.compared_part(sequences[unproven])])
        rows = self._rows([*ahead, *sequences])[len(ahead) :]
        if unproven is not None and not self._proven(sequences[unproven], rows[unproven]):
            rows = self._rows(sequences)
        return rows

    def _rows(self, sequences: Sequence[TokenSequence]) -> torch.Tensor:
        # Closed here: an error of ours would keep it, with what it has assigned, for as long as
        # somebody keeps the error.
        with closing(self._evaluator.run(sequences)) as results:
            return _in_order([(result.owners, _logprobs(result.logits)) for result in results])

    def _proven(self, sequence: TokenSequence, row: torch.Tensor) -> bool:
        """Compare a row with a cold one; where it is wrong, long contexts are computed cold from
        now on."""
        try:
            cold = self._cold(sequence)
        except torch.OutOfMemoryError:  # longer than can be computed in one forward
            self._evaluator.prove(sequence.length, right=True)
            return True
        same = (row == cold) | (row.isnan() & cold.isnan())  # both may be minus infinity
        difference = (row - cold).abs().masked_fill(same, 0.0)
        right = float(difference.max()) <= PROOF_MARGIN * self._tolerance  # not if one is nan
        self._evaluator.prove(sequence.length, right)
        return right

    @hookimpl
    def genlm_sequence_logprobs(
        self, queries: Sequence[Query], continuations: Sequence[Sequence[int]]
    ) -> Sequence[torch.Tensor]:
        """One sequence per pair: logits of the continuation's positions only, reduced at once."""
        sequences = [
            TokenSequence(
                (*query.token_ids, *continuation[:-1]), query.adapter, keep=len(continuation)
            )
            for query, continuation in zip(queries, continuations, strict=True)
        ]
        unproven = self._evaluator.unproven(sequences)
        if unproven is not None:
            last = evolve(sequences[unproven], keep=1)
            self._rows([self._evaluator.compared_part(last)])
            self._proven(last, self._rows([last])[0])
        scores = [
            torch.empty(len(continuation), dtype=torch.float32, device=self.device)
            for continuation in continuations
        ]
        pieces: list[TokenSequence] = []
        targets: list[Sequence[int]] = []
        parts: list[torch.Tensor] = []
        for sequence, continuation, score in zip(sequences, continuations, scores, strict=True):
            at = 0
            for piece in self._evaluator.pieces(sequence):
                pieces.append(piece)
                targets.append(continuation[at : at + piece.keep])
                parts.append(score[at : at + piece.keep])
                at += piece.keep
        done = [0] * len(pieces)
        with closing(self._evaluator.run(pieces)) as results:
            for result in results:
                self._score(result, targets, parts, done)
        return scores

    def _score(
        self,
        result: Result,
        continuations: Sequence[Sequence[int]],
        scores: Sequence[torch.Tensor],
        done: list[int],
    ) -> None:
        """Write the scores that a forward gave behind the ``done`` ones of each continuation."""
        if not result.owners:  # of a chunk before the first position that is wanted
            return
        runs = [(owner, len(list(run))) for owner, run in groupby(result.owners)]
        targets = [
            token
            for owner, n in runs
            for token in continuations[owner][done[owner] : done[owner] + n]
        ]
        columns = Upload().add(targets).on(result.logits.device)
        picked = _logprobs(result.logits).gather(1, columns[:, None])
        for (owner, n), part in zip(
            runs, torch.split(picked[:, 0], [n for _, n in runs]), strict=True
        ):
            scores[owner][done[owner] : done[owner] + n] = part
            done[owner] += n

    @hookimpl
    def genlm_cache_prefix(self, query: Query) -> bool:
        """Raises: EngineError: there is no room beside what is pinned."""
        sequence = TokenSequence(query.token_ids, query.adapter)
        if self.reuse is Reuse.NONE:
            return True  # nothing can be kept of this model; it was logged at load
        if self._evaluator.keeps(sequence):
            for _ in self._evaluator.run([sequence]):
                pass
            if self._strategy.pin(sequence):
                return True
        raise EngineError(
            f"a prefix of {sequence.length} tokens cannot be pinned beside the others; "
            "raise kv_cache_bytes or call clear_kv_cache()"
        )

    @hookimpl
    def genlm_clear_kv_cache(self) -> None:
        self._strategy.clear()

    @hookimpl
    def genlm_read_lora(self, adapter: Adapter) -> AdapterFolder:
        return self._adapters.read(adapter)

    @hookimpl
    def genlm_add_lora(self, adapter: Adapter, contents: AdapterFolder) -> bool:
        base = BaseRow(self._runner)
        with self._runner.head_may_change():
            self._adapters.add(adapter, contents)
        if not base.is_unchanged():
            self.genlm_remove_lora(adapter)
            raise base.error(adapter)
        return True

    @hookimpl
    def genlm_remove_lora(self, adapter: Adapter) -> bool:
        with self._runner.head_may_change():
            self._adapters.remove(adapter)
        self._strategy.drop_adapter(adapter)
        return True

    @hookimpl
    def genlm_close(self) -> None:
        """Leave the model as it was before."""
        self._schedule.clear()
        self._strategy.clear()
        self._restore()
        del self.model._genlm_engine

    def _restore(self) -> None:
        self._runner.close()
        self._adapters.close()
        if self.model.config._attn_implementation != self._original_attention:
            self.model.set_attn_implementation(self._original_attention)


def _sequence(query: Query) -> TokenSequence:
    return TokenSequence(query.token_ids, query.adapter)


@torch.no_grad()
def _logprobs(logits: torch.Tensor) -> torch.Tensor:
    """Float32 and normalised, outside inference mode, so that the core may write into them."""
    return logits.float().log_softmax(-1)


def _in_order(parts: Sequence[tuple[list[int], torch.Tensor]]) -> torch.Tensor:
    """One row per sequence, from what the forwards gave: without a copy where one forward gave
    all, in order."""
    places = sorted(
        (owner, part, at)
        for part, (owners, _) in enumerate(parts)
        for at, owner in enumerate(owners)
    )
    runs: list[tuple[int, int, int]] = []  # of rows that stay neighbours: no index is needed
    for _, part, at in places:
        if runs and (part, at) == (runs[-1][0], runs[-1][2]):
            runs[-1] = part, runs[-1][1], at + 1
        else:
            runs.append((part, at, at + 1))
    rows = [parts[part][1][first:stop] for part, first, stop in runs]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _vocab_size(model: Any, config: Any) -> int:
    head = model.get_output_embeddings()
    return int(head.out_features if hasattr(head, "out_features") else config.vocab_size)


def _budget(options: HFOptions, device: torch.device) -> int:
    """The most bytes of key/value state to keep."""
    given = options.kv_cache_bytes
    return _default_budget(device) if given is None else given


def _default_budget(device: torch.device) -> int:
    """Half of the free device memory; on the CPU a quarter of the available memory, at most 4
    GiB."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 2
    available = _available_memory()
    return 2 * GIB if available is None else min(available // 4, 4 * GIB)


def _available_memory() -> int | None:
    """Bytes that this machine can give without swapping; ``None`` where it does not say."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():  # it counts what files are cached in; free pages are without that
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None
