"""HFEngine, the object that implements the hooks of the core."""

from __future__ import annotations

import importlib.util
import weakref
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import torch
import transformers

from genlm.core import hookimpl
from genlm.core.checks import describe_error
from genlm.core.errors import EngineError, GenlmError
from genlm.core.logs import get_logger
from genlm.core.types import Adapter, Answer, Query
from genlm.hf.adapters import AdapterSet
from genlm.hf.attention import (
    attention_of,
    register_slot_attention,
    require_alibi_once,
    use_attention_with_caps,
)
from genlm.hf.budget import budget
from genlm.hf.evaluator import Evaluator
from genlm.hf.hooks import ForeignHooks
from genlm.hf.options import HFOptions
from genlm.hf.patterns import attention_window, layer_patterns
from genlm.hf.pool import SlotPool
from genlm.hf.positions import longest_context
from genlm.hf.probe import (
    MAX_NOISE_NATS,
    NOISE_MULTIPLE,
    apart,
    choose_reuse,
    nan_errors,
    noise_of,
)
from genlm.hf.proof import BaseRow
from genlm.hf.reuse import Choice, ReuseMode
from genlm.hf.runner import Runner, served_model
from genlm.hf.schedule import Schedule
from genlm.hf.scores import Scores, logprobs
from genlm.hf.strategies import strategy_for
from genlm.kit.adapter_files import AdapterFolder
from genlm.kit.kv.scored import scored_sequences
from genlm.kit.kv.sequence import TokenSequence
from genlm.kit.memory import is_out_of_memory, lower
from genlm.kit.model_files import ids_of
from genlm.kit.nan_rows import NanErrors, is_looked_for
from genlm.kit.settings import misread

log = get_logger()

#: For rows of long contexts, the tolerance that the probe found on short ones is multiplied by
#: this.
PROOF_MARGIN = 4.0


LORA_HOOKS = ("genlm_read_lora", "genlm_add_lora", "genlm_remove_lora")


class HFEngine:
    """A transformers model behind the hooks of genlm-core.

    Args:
        model: A causal language model. It stays in evaluation mode until the engine is closed.
        tokenizer: Its tokenizer.
        options: ``kv_cache_bytes``, ``max_batch_tokens`` and ``static`` matter here.

    Attributes:
        tokenizer, vocab_size, max_context, device, model: See :class:`genlm.core.types.Engine`.
        dtype: The type in which the model computes.
        lacking: For each missing hook, why it is missing.
        reuse: How the KV cache is reused with this model, as the probe found out.
    """

    def __init__(self, model: Any, tokenizer: Any, options: HFOptions | None = None) -> None:
        options = options or HFOptions()
        self._refuse(model)
        self.lacking: dict[str, str] = {}
        self._describe(model, tokenizer)
        looks = is_looked_for(model.device.type, str(model.dtype))
        self._nan: NanErrors | None = nan_errors(model) if looks else None
        self._training = [module for module in model.modules() if module.training]
        self._original_attention = attention_of(model.config)
        use_attention_with_caps(model)
        self._adapters = AdapterSet(model)
        register_slot_attention()
        self._runner = Runner(model.eval(), self._adapters, SlotPool(), layer_patterns(model))
        if why := _why_no_adapters(options):
            for hook in LORA_HOOKS:
                setattr(self, hook, None)  # pluggy then finds no such hook on this engine
                self.lacking[hook] = why
        static = model.device.type == "cuda" if options.static is None else options.static
        choice = self._choose_reuse(static)
        self.reuse, self._tolerance = choice.reuse, choice.tolerance
        room = budget(options.kv_cache_bytes, model.device)
        most = options.max_batch_tokens
        self._strategy = strategy_for(choice, self._runner, most, room)
        self._evaluator = Evaluator(self._strategy, self._adapters, choice.limit, choice.rows_apart)
        self._schedule: Schedule[Query] = Schedule(self._evaluator, most)
        self._hooks = ForeignHooks(self._runner, choice)
        served = served_model(model)
        served._genlm_engine = (id(served), weakref.ref(self))

    def _describe(self, model: Any, tokenizer: Any) -> None:
        """Set what the core asks of an engine, from the model's configuration."""
        self.model = model
        self.tokenizer = tokenizer
        self._config = model.config.get_text_config(decoder=True)
        self.vocab_size: int = _vocab_size(model, self._config)
        # of rows; later, each step gives the number of ids without padding
        self._width = self.vocab_size
        self.max_context = longest_context(model)
        self.device = str(model.device)
        self.dtype = str(model.dtype).removeprefix("torch.")
        self._kind = self._kind_of(model)
        generation = getattr(model, "generation_config", None)
        self.eos_token_ids = ids_of(getattr(generation, "eos_token_id", None))

    def _kind_of(self, model: Any) -> str:
        """A description of what must not change while the model is served."""
        tokens = _vocab_size(model, self._config)
        return f"{tokens} tokens in {model.dtype} on {model.device}"

    def _choose_reuse(self, static: bool) -> Choice:
        """Probe the model, with ``static`` also for steps of constant shape. On an error the model
        is left as it was.

        Raises:
            EngineError: the model cannot be served.
        """
        window = attention_window(self.model) or getattr(self._config, "window_size", None)
        try:
            return choose_reuse(
                self.model, self._runner, self.vocab_size, self.max_context, window, static
            )
        except BaseException as error:
            self._restore()
            if isinstance(error, GenlmError) or not isinstance(error, Exception):
                raise
            if is_out_of_memory(error):
                raise
            remedy = (
                "its forward must take token ids [batch, tokens], without more, and give logits "
                "[batch, tokens, vocabulary]"
            )
            if getattr(self.model, "hf_quantizer", None) is not None:
                remedy = f"it is quantised: load it without that, or {remedy}"
            raise EngineError(
                f"{type(self.model).__name__} cannot be served ({describe_error(error)}); {remedy}"
            ) from error

    @staticmethod
    def _refuse(model: Any) -> None:
        """Reject an unsuitable model before anything in it is changed.

        Raises:
            EngineError: the model is not a causal language model, or is served already, or its
                attention computes something else than its configuration says.
        """
        kind = type(model).__name__
        if not (hasattr(model, "config") and hasattr(model, "device")):
            inner = "model.module" if hasattr(model, "module") else "a PreTrainedModel"
            lacks = "device" if hasattr(model, "config") else "configuration"
            raise EngineError(f"{kind} has no {lacks}, which every model has; give {inner}")
        if model.device.type == "meta":
            raise EngineError(
                f"the first weights of this {kind} are not in memory (device 'meta'), probably "
                "because they were offloaded to disk; load it with a device_map that keeps the "
                "embeddings in memory"
            )
        require_alibi_once(model)
        if hasattr(model.config, "model_type") and (setting := misread(model.config)) is not None:
            raise EngineError(
                f"transformers {transformers.__version__} computes {setting} of {kind} differently "
                "from later versions, and from the model's own code; upgrade transformers"
            )
        if getattr(model.config, "is_encoder_decoder", False):
            raise EngineError(
                f"{kind} is an encoder-decoder model, whose rows need an input to the encoder; "
                "give a causal language model (AutoModelForCausalLM)"
            )
        generates = getattr(model, "can_generate", lambda: True)()
        if not generates and model.get_output_embeddings() is None:
            raise EngineError(
                f"{kind} has no output layer over the vocabulary; give a causal language model "
                "(AutoModelForCausalLM); a class of your own must return the layer from "
                "get_output_embeddings()"
            )
        served = served_model(model)
        owner, engine = getattr(served, "_genlm_engine", (None, lambda: None))
        if owner == id(served) and engine() is not None:  # a copy of a model has another id
            raise EngineError(
                "this model object is served by another AsyncTransformer, which owns its state; "
                "use that AsyncTransformer, close it first, or load the model a second time"
            )

    @hookimpl
    def genlm_step(
        self, queries: Sequence[Query], dropped: Sequence[Query], width: int
    ) -> list[Answer]:
        """Answer as many requests as about ``max_batch_tokens`` new tokens allow."""
        self._width = width
        if dropped:
            self._schedule.drop(set(dropped))
        if queries and queries[0].cold:
            rows = self._rows([_sequence(queries[0])], cold=True)
            return self._row_answers(queries, rows)
        self._schedule.add({TokenSequence(one.context, one.adapter): one for one in queries})
        if not self._schedule:
            return []
        try:
            step = self._schedule.next()
            rows = self._answers(list(step.answered), step.chunk)
        except BaseException:
            self._schedule.clear()
            raise
        return self._row_answers([*step.answered.values()], rows)

    def _row_answers(self, queries: Sequence[Query], rows: torch.Tensor) -> list[Answer]:
        """The rows as answers. If the engine looks for NaN, rows that are NaN become errors."""
        return [*map(Answer, queries, self._nan.in_rows(queries, rows) if self._nan else rows)]

    def _cold(self, sequence: TokenSequence) -> torch.Tensor:
        """The cold row of a sequence, including the padding tokens of the vocabulary."""
        return logprobs(self._evaluator.cold(sequence).logits)[0]

    def _answers(
        self, sequences: Sequence[TokenSequence], chunk: TokenSequence | None
    ) -> torch.Tensor:
        """A row for each sequence. The chunk is computed too, but only for its state."""
        self._heed_hooks()
        # The chunk comes first: when memory is short, the others may evict the state that it
        # continues from.
        ahead = [] if chunk is None else [chunk]
        unproven = self._evaluator.unproven(sequences) if sequences else None
        if unproven is not None:
            self._rows([self._evaluator.compared_part(sequences[unproven])])
        rows = self._rows([*ahead, *sequences])[len(ahead) :]
        for one in ahead:
            self._strategy.leave_unfinished(one)
        if unproven is None or self._agrees_with_cold(sequences[unproven], rows[unproven]):
            return rows
        return self._rows(sequences)

    def _rows(self, sequences: Sequence[TokenSequence], cold: bool = False) -> torch.Tensor:
        # The generator is closed here. Otherwise an error would keep it alive, with the slots it
        # has assigned, for as long as somebody holds the error.
        with closing(self._evaluator.run(sequences, cold)) as results:
            some = [
                (result.owners, logprobs(result.logits[:, : self._width])) for result in results
            ]
            return _in_order(some)

    def _heed_hooks(self) -> None:
        """If forward hooks have been set or removed, drop the state computed with the old ones, and
        find out whether state may be reused with the new ones."""
        effect = self._hooks.effect_of_change()
        if effect is None:
            return
        if effect.changes_rows:
            self._strategy.clear()
        self._evaluator.whole = effect.why_not_reused is not None
        if effect.why_not_reused is not None:
            log.warning("kv.reuse_stopped", why=f"with its hooks {effect.why_not_reused}")

    def _agrees_with_cold(self, sequence: TokenSequence, row: torch.Tensor) -> bool:
        """Whether a row agrees with a cold one. If not, the evaluator computes long contexts cold
        from now on."""
        try:
            cold = self._cold(sequence)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):  # the context is too long to be computed in one forward
                raise
            self._evaluator.prove(sequence.length, right=True)
            return True
        distance = apart(row, cold[: len(row)].log_softmax(-1))
        right = distance <= PROOF_MARGIN * self._tolerance  # false if the distance is NaN
        right = right or distance <= NOISE_MULTIPLE * self._noise(sequence, cold)
        self._evaluator.prove(sequence.length, right)
        return right

    def _noise(self, sequence: TokenSequence, cold: torch.Tensor) -> float:
        """The distance between two cold rows of a context, alone and in a batch with itself. Long
        contexts may round more than the probe's short ones."""
        try:
            noise = noise_of(self._runner, [sequence.tokens], cold[None], sequence.adapter)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return 0.0
        return min(noise, MAX_NOISE_NATS)

    @hookimpl
    def genlm_sequence_logprobs(
        self, queries: Sequence[Query], continuations: Sequence[Sequence[int]], width: int
    ) -> Sequence[torch.Tensor | EngineError]:
        """Each pair is one sequence. Only the logits of the continuation's positions are made, and
        each forward's logits are reduced to scores at once."""
        self._heed_hooks()
        sequences = scored_sequences(queries, continuations)
        unproven = self._evaluator.unproven(sequences)
        if unproven is not None:
            last = TokenSequence(sequences[unproven].tokens, sequences[unproven].adapter)
            self._rows([self._evaluator.compared_part(last)])
            self._agrees_with_cold(last, self._rows([last])[0])
        scores = Scores(sequences, continuations, self._evaluator, self.device, width)
        with closing(self._evaluator.run(scores.pieces)) as results:
            for result in results:
                scores.add(result)
        found = scores.whole
        return self._nan.in_scores(queries, continuations, found) if self._nan else found

    @hookimpl
    def genlm_cache_prefix(self, query: Query) -> bool:
        """Raises: EngineError: there is no room beside the pinned prefixes, or the row is NaN."""
        self._heed_hooks()
        sequence = _sequence(query)
        if self.reuse is ReuseMode.NONE or self._evaluator.is_beyond(sequence.length):
            return True  # no state of it can be kept
        if self._strategy.pin(sequence):  # its state is already kept
            return True
        if self._evaluator.keeps(sequence.length):
            nan = [bool(each.nan.any()) for each in self._evaluator.run([sequence])]
            if any(nan):
                raise nan_errors(self.model).of_row(query)
            if self._strategy.pin(sequence):
                return True
        raise EngineError(
            f"a prefix of {sequence.length} tokens cannot be pinned beside the others; "
            "raise kv_cache_bytes or call clear_kv_cache()"
        )

    @hookimpl
    def genlm_clear_kv_cache(self) -> None:
        """Raises: EngineError: the model's type, device or vocabulary has changed."""
        # A user who trains the model may have added PEFT's layers.
        with self._runner.head_may_change():
            self._strategy.clear()
        if self._kind != (kind := self._kind_of(self.model)):
            raise EngineError(
                f"the model has changed since AsyncTransformer was made: it is {kind}, and was "
                f"{self._kind}; close this AsyncTransformer and make a new one"
            )

    @hookimpl
    def genlm_read_lora(self, adapter: Adapter) -> AdapterFolder:
        return self._adapters.read(adapter)

    @hookimpl
    def genlm_add_lora(self, adapter: Adapter, contents: AdapterFolder) -> bool:
        with lower("kv_cache_bytes"):
            base = BaseRow(self._runner)
            with self._runner.head_may_change():
                self._adapters.add(adapter, contents)
            if not base.is_unchanged():
                self.genlm_remove_lora(adapter)
                raise base.error(adapter)
            try:
                base.check(adapter)
            except BaseException:
                self.genlm_remove_lora(adapter)
                raise
        return True

    @hookimpl
    def genlm_remove_lora(self, adapter: Adapter) -> bool:
        with self._runner.head_may_change():
            self._adapters.remove(adapter)
        self._strategy.drop_adapter(adapter)
        return True

    @hookimpl
    def genlm_close(self) -> None:
        """Restore the model to its state before it was served."""
        self._strategy.clear()
        self._restore()
        del served_model(self.model)._genlm_engine

    def _restore(self) -> None:
        self._runner.close()
        self._adapters.close()
        if attention_of(self.model.config) != self._original_attention:
            self.model.set_attn_implementation(self._original_attention)
        for module in self._training:
            module.training = True


def _sequence(query: Query) -> TokenSequence:
    return TokenSequence(query.context, query.adapter)


def _in_order(parts: Sequence[tuple[list[int], torch.Tensor]]) -> torch.Tensor:
    """The rows of several forwards in the order of the sequences. If one forward gave all of them
    in order, nothing is copied."""
    if len(parts) == 1 and parts[0][0] == [*range(len(parts[0][0]))]:
        return parts[0][1]
    places = sorted(
        (owner, part, at)
        for part, (owners, _) in enumerate(parts)
        for at, owner in enumerate(owners)
    )
    runs: list[tuple[int, int, int]] = []  # of neighbouring rows: slices need no index
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


def _why_no_adapters(options: HFOptions) -> str | None:
    if importlib.util.find_spec("peft") is None:
        return "it needs PEFT: pip install 'genlm-hf[lora]'"
    if (options.compile_opts or {}).get("fullgraph"):
        return "compile_opts={'fullgraph': True} cannot compile PEFT's layers; leave it out"
    return None
