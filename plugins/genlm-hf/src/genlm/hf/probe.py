"""The probe: finds out, when a model is loaded, which way of reusing its KV cache gives right
rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from attrs import define, field

from genlm.core.errors import EngineError
from genlm.core.logs import get_logger
from genlm.core.types import Adapter
from genlm.hf.adapters import AdapterSet
from genlm.hf.attention import SLOT_ATTENTION, attention_of
from genlm.hf.patterns import layer_patterns, reuse_limit
from genlm.hf.pool import SlotPool
from genlm.hf.positions import rope_scalings
from genlm.hf.reuse import Choice, ReuseMode
from genlm.hf.runner import Runner
from genlm.hf.trials import TRIALS, Trial, ragged, static
from genlm.kit.memory import is_out_of_memory
from genlm.kit.nan_rows import NanErrors
from genlm.kit.scaled_copy import VOCABULARY_TOKENS, Threshold, small_model, thresholds

logger = get_logger()

#: The longest window that the probe's contexts exceed.
MAX_PROBED_WINDOW = 512

#: The largest difference from log-probabilities of plain forwards that rounding explains, by the
#: type of the weights.
TOLERANCES = {torch.float32: 5e-4, torch.float16: 0.1, torch.bfloat16: 0.5}

#: Within that limit, the tolerance is the larger of three: this many times the noise of two plain
#: forwards, this share of the spread of a row's log-probabilities, and this many rounding steps of
#: the model's type at the size of its logits.
NOISE_MARGIN, SPREAD_SHARE, ROUNDING_STEPS = 8.0, 0.1, 2.0

#: If two plain forwards differ by more than the tolerance, rows may differ by this many times the
#: noise.
NOISE_MULTIPLE = 3.0

#: Many quantised layers round their input too, and amplify small changes. As a measure of this,
#: each embedding is changed by at least this fraction of itself. Rows may then differ by this many
#: times as much as they moved.
MIN_EMBEDDING_CHANGE, MOVED_MARGIN = 1e-4, 2.0

#: The value to which thresholds are lowered in scaled copies, and the lengths of the pairs of
#: contexts that cross it.
LOWERED_THRESHOLD = 8
LENGTHS_AROUND_THRESHOLD = ((4, 7), (7, 9), (8, 17), (9, 35), (20, 39))
LENGTHS_BEYOND_THRESHOLD = ((9, 35), (20, 39))

#: The largest difference between two forwards of one context that counts as rounding, in nats.
MAX_NOISE_NATS = 0.05

#: A mode that is wrong beyond a threshold is still used if the threshold is at least this long.
MIN_LIMIT_TOKENS = 512

#: The modes with attention over slots.
OVER_SLOTS = (ReuseMode.SHARED, ReuseMode.PACKED)

#: The modes that keep state in snapshots.
IN_SNAPSHOTS = (ReuseMode.SNAPSHOTS, ReuseMode.STEPWISE)

#: The attention implementations that slot attention can replace. The last one is that of a copy of
#: a model that is being served.
REPLACEABLE = ("sdpa", "eager", SLOT_ATTENTION)


def choose_reuse(
    model: Any,
    runner: Runner,
    vocab_size: int,
    max_context: int | None,
    window: int | None,
    static: bool = False,
) -> Choice:
    """Try the reuse modes, best first, on short contexts of unequal length. The first mode that
    agrees with plain forwards is chosen. It must agree on the model itself, and beyond the model's
    thresholds on a scaled copy.

    A mode that is wrong only beyond a high threshold is chosen too, for contexts below the
    threshold.

    Args:
        model: The model.
        runner: Runs its forwards.
        vocab_size, max_context, window: The model's vocabulary, longest context and sliding window.
        static: Whether to try steps of constant shape too.

    Raises:
        EngineError: not even padded and unpadded plain forwards agree, or they give NaN.
    """
    contexts = _contexts(vocab_size, max_context, window)
    _put_in(contexts, model.config, vocab_size)
    original = attention_of(model.config)
    expected = plain_rows(runner, contexts)
    if expected.isnan().any():
        remedy = nan_errors(model).remedy
        raise EngineError(f"the rows of this model are NaN in {model.dtype}; {remedy}")
    tolerance = _tolerance(model, runner, contexts, expected)
    if is_quantised(model):
        tolerance = max(tolerance, MOVED_MARGIN * _moved(model, runner, contexts, expected))
    limit = reuse_limit(model.config.get_text_config(decoder=True))
    copies = ScaledCopies(model, limit)
    reasons: dict[str, str] = {}
    # Only where an attention says that it is not causal: the look costs a forward.
    doubtful = any(getattr(one, "is_causal", None) is False for one in model.modules())
    short_enough = limit is None or len(contexts[-1]) <= limit
    if doubtful and short_enough and _sees_later(runner, contexts, expected, tolerance):
        raise _not_causal(model)
    for reuse in ReuseMode:
        try:
            if reuse in OVER_SLOTS:
                _use_slot_attention(model)
            why = disagreement(runner, TRIALS[reuse], contexts, expected, tolerance)
        except Exception as error:
            # The model's code may raise any exception for a cache or an attention implementation
            # that it does not expect.
            why = f"{type(error).__name__}: {error}"[:200]
        if why is None:
            reach = copies.reach(reuse)
            if reach is None or reach >= MIN_LIMIT_TOKENS or reuse is ReuseMode.NONE:
                logger.info("kv.reuse_chosen", reuse=reuse.value, rejected=reasons)
                if reach is not None:  # longer contexts are computed whole, without padding
                    logger.warning("kv.reuse_limited", limit=reach, why=copies.reasons[reuse])
                least = _least(limit, reach)
                rows_apart = least is not None and copies.rows_apart()
                is_ragged = reuse in IN_SNAPSHOTS and _is_ragged(
                    runner, contexts, expected, tolerance
                )
                is_static = static and _is_static(
                    runner, reuse, copies, contexts, expected, tolerance
                )
                return Choice(
                    reuse, tolerance, least, rows_apart, is_ragged, is_static, contexts, expected
                )
            why = f"beyond {reach} tokens: {copies.reasons[reuse]}"
        reasons[reuse.value] = why
        if attention_of(model.config) != original:
            model.set_attn_implementation(original)
        runner.pool.forget_layers()
    logger.info("kv.no_reuse_mode", rejected=reasons)
    raise _not_causal(model)


def nan_errors(model: Any) -> NanErrors:
    """The errors for rows of a model that are NaN."""
    return NanErrors(str(model.dtype), "load it with dtype='bfloat16' or 'float32'")


def _not_causal(model: Any) -> EngineError:
    return EngineError(
        f"the rows of this {type(model).__name__} depend on later tokens or padding, as in a "
        "masked language model; load a causal language model. If a forward hook that changes the "
        "last position is the cause, set it after AsyncTransformer is made"
    )


def _sees_later(
    runner: Runner, contexts: Sequence[Sequence[int]], expected: torch.Tensor, tolerance: float
) -> bool:
    """Whether the row of the short context is another one where tokens follow. The reuse modes
    cannot tell of a masked language model of one layer: the last of its rows are right in all of
    them, and the others are not."""
    short, long = contexts
    longer = [*short, *long[len(short) :]]
    row = _logprobs([runner.plain([longer], [None], [[len(short) - 1]])])
    distance = apart(row, expected[:1])
    return distance > tolerance and distance > _rounding(runner, contexts, expected)


def plain_rows(runner: Runner, contexts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Log-probabilities of plain forwards. If the model fails in inference mode, ``no_grad`` is
    used from then on: quanto's 4-bit weights, for instance, make views that inference mode
    rejects."""
    try:
        return _logprobs([runner.plain([context], [None]) for context in contexts])
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        runner.without_gradients = torch.no_grad
        try:
            expected = _logprobs([runner.plain([context], [None]) for context in contexts])
        except Exception:
            raise error from None
    logger.info("kv.no_inference_mode", why="the model cannot be computed in it")
    return expected


def disagreement(
    runner: Runner,
    trial: Trial,
    contexts: Sequence[Sequence[int]],
    expected: torch.Tensor,
    tolerance: float,
) -> str | None:
    """Why the rows of a trial are wrong; ``None`` if they are right."""
    try:
        rows = _logprobs(trial(runner, contexts))
    finally:
        runner.pool.resize(0, 0)
    distance = apart(rows, expected)
    if distance <= tolerance or distance <= _rounding(runner, contexts, expected):
        return None
    return f"rows differ by {distance:.3g}"


def _is_ragged(
    runner: Runner,
    contexts: Sequence[Sequence[int]],
    expected: torch.Tensor,
    tolerance: float,
) -> bool:
    """Whether contexts of unequal length have the right rows when they are extended together."""
    try:
        rows = _logprobs([ragged(runner, contexts)])
        distance = apart(rows, expected.repeat(2, 1))
        why = "" if distance <= tolerance else f"rows differ by {distance:.3g}"
    except Exception as error:  # the model's code may raise any exception here too
        why = f"{type(error).__name__}: {error}"[:200]
    if why:
        logger.info("kv.equal_lengths", why=why)
    return not why


def _is_static(
    runner: Runner,
    reuse: ReuseMode,
    copies: ScaledCopies,
    contexts: Sequence[Sequence[int]],
    expected: torch.Tensor,
    tolerance: float,
) -> bool:
    """Whether a recorded step of constant shape gives the right rows when replayed for other
    contexts."""
    why: str | None = None
    if reuse not in OVER_SLOTS:
        why = f"state is kept in another way: {reuse.value}"
    elif is_quantised(copies.model):
        why = "the model is quantised"
    else:
        try:
            why = disagreement(runner, static, contexts, expected, tolerance)
        except Exception as error:  # the model's code may raise any exception here too
            why = f"{type(error).__name__}: {error}"[:200]
        why = why or copies.why_not_static(reuse)
    if why is not None:
        logger.info("kv.step_not_static", why=why)
    return why is None


def _rounding(runner: Runner, contexts: Sequence[Sequence[int]], expected: torch.Tensor) -> float:
    """How much rows may differ because two plain forwards differ; always less than rows of
    different contexts do."""
    spread = min(float(row[row.isfinite()].std()) for row in expected)
    return min(NOISE_MULTIPLE * noise_of(runner, contexts, expected), SPREAD_SHARE * spread)


@define(slots=False)
class ScaledCopies:
    """Small models of a model's class, each with some thresholds a few tokens away.

    Attributes:
        model: The model.
        limit: The most tokens of a context whose state is kept, even if the scaled copies allow
            more.
        reasons: For each reuse mode that failed, what was wrong with it.
    """

    model: Any
    limit: int | None
    reasons: dict[ReuseMode, str] = field(factory=dict)

    def reach(self, reuse: ReuseMode) -> int | None:
        """The longest context for which a mode is right on the scaled copies; ``None`` means any
        length."""
        # Only thresholds that contexts with kept state can cross matter.
        found = [one for one in self._thresholds if self.limit is None or one.value < self.limit]
        # A quantised model's own rows are too noisy to tell.
        if not found and not is_quantised(self.model):
            return None
        why = self._why_wrong(reuse, found)
        if why is None:
            return None
        alone = [one for one in found if self._why_wrong(reuse, [one]) is not None]
        guilty = alone or found
        self.reasons[reuse] = f"{', '.join('.'.join(one.path) for one in guilty) or 'any'}: {why}"
        return min((one.value for one in guilty), default=1) - 1

    def why_not_static(self, reuse: ReuseMode) -> str | None:
        """Why steps of constant shape are wrong on the scaled copy with all thresholds lowered;
        ``None`` if they are right. The copy's float32 rows show errors that rounding hides in a
        large model."""
        near = [one for one in self._thresholds if self.limit is None or one.value < self.limit]
        return self._why_wrong(reuse, near, static)

    def rows_apart(self) -> bool:
        """Whether a row beyond all thresholds depends on later tokens. Also true if no scaled copy
        can tell."""
        if rope_scalings(self.model.config.get_text_config(decoder=True), "dynamic"):
            return True  # each length has frequencies of its own
        try:
            return (
                self._disagreement(ReuseMode.NONE, self._thresholds, LENGTHS_BEYOND_THRESHOLD)
                is not None
            )
        except (EngineError, ValueError):
            return True

    @cached_property
    def _thresholds(self) -> list[Threshold]:
        return thresholds(self.model.config.to_dict())

    def _why_wrong(
        self, reuse: ReuseMode, near: Sequence[Threshold], trial: Trial | None = None
    ) -> str | None:
        """Why a mode is wrong on the scaled copy with the thresholds ``near`` lowered; ``None`` if
        it is right."""
        try:
            return self._disagreement(reuse, near, LENGTHS_AROUND_THRESHOLD, trial)
        except ValueError as error:  # the comparisons with cold rows still protect the model
            logger.info("kv.no_scaled_copy", why=str(error))
            return None

    def _disagreement(
        self,
        reuse: ReuseMode,
        near: Sequence[Threshold],
        around: Sequence[Sequence[int]],
        trial: Trial | None = None,
    ) -> str | None:
        """Why a mode is wrong on the scaled copy, for contexts of the lengths ``around``. If
        ``trial`` is given, it replaces the mode's own.

        Raises:
            ValueError: there is no such scaled copy.
            EngineError: the copy's rows differ from forward to forward.
        """
        model, changed = self.model, {one.path: LOWERED_THRESHOLD for one in near}
        scaled = small_model(type(model), model.config, model.device, changed)
        runner = Runner(scaled, AdapterSet(scaled), SlotPool(), layer_patterns(scaled))
        try:
            if reuse in OVER_SLOTS:
                _use_slot_attention(scaled)
            for lengths in around:
                contexts = _random_contexts(VOCABULARY_TOKENS - 4, lengths)
                expected = _logprobs([runner.plain([context], [None]) for context in contexts])
                noise = noise_of(runner, contexts, expected)
                if noise > MAX_NOISE_NATS:
                    beyond = ", ".join(f"{'.'.join(one.path)}={one.value}" for one in near)
                    raise EngineError(
                        f"rows of this model differ by {noise:.3g} nats from forward to forward "
                        f"beyond {beyond or 'one'} tokens; such a model cannot be served"
                    )
                tolerance = _tolerance(scaled, runner, contexts, expected)
                if why := disagreement(
                    runner, trial or TRIALS[reuse], contexts, expected, tolerance
                ):
                    return why
                runner.pool.forget_layers()
        except EngineError:
            raise
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:200]
        finally:
            # Otherwise a reference cycle would keep the scaled copy's memory until a garbage
            # collection.
            runner.close()
        return None


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _tolerance(
    model: Any, runner: Runner, contexts: Sequence[Sequence[int]], expected: torch.Tensor
) -> float:
    """How much rows may differ: as much as rounding explains, but less than rows of different
    contexts do."""
    dtype = model.dtype
    most = TOLERANCES.get(dtype, TOLERANCES[torch.float32])
    finite = [row[row.isfinite()] for row in expected]  # a model may give some tokens no mass
    spread = min(float(row.std()) for row in finite)
    size = max(float(row.max() - row.min()) for row in finite)
    steps = ROUNDING_STEPS * torch.finfo(dtype).eps * size
    least = max(SPREAD_SHARE * spread, steps)
    if least >= most:  # whatever the noise is
        return most
    return min(most, max(NOISE_MARGIN * noise_of(runner, contexts, expected), least))


def is_quantised(model: Any) -> bool:
    """Whether transformers has loaded the model quantised."""
    return getattr(model, "hf_quantizer", None) is not None


def _moved(
    model: Any, runner: Runner, contexts: Sequence[Sequence[int]], expected: torch.Tensor
) -> float:
    """How much rows change if each embedding changes by about as much as rounding could change
    it."""
    change = max(torch.finfo(model.dtype).eps, MIN_EMBEDDING_CHANGE)
    generator = torch.Generator().manual_seed(0)

    def disturb(module: Any, given: Any, embedded: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(embedded.shape, generator=generator).to(embedded)
        return embedded * (1.0 + change * noise)

    hook = model.get_input_embeddings().register_forward_hook(disturb)
    try:
        return apart(_logprobs([runner.plain([each], [None]) for each in contexts]), expected)
    finally:
        hook.remove()


def noise_of(
    runner: Runner,
    contexts: Sequence[Sequence[int]],
    expected: torch.Tensor,
    adapter: Adapter | None = None,
) -> float:
    """The noise of rounding: the largest difference between the rows of a context computed alone
    and in a batch with itself."""
    twice = [runner.plain([context] * 2, [adapter] * 2)[:1] for context in contexts]
    return apart(_logprobs(twice), expected)


def apart(rows: torch.Tensor, others: torch.Tensor) -> float:
    """The largest difference between rows. Values that are both minus infinity or both NaN are
    equal."""
    same = (rows == others) | (rows.isnan() & others.isnan())
    return float((rows - others).abs().masked_fill(same, 0.0).max())


def _use_slot_attention(model: Any) -> None:
    if model.config._attn_implementation not in REPLACEABLE:
        raise ValueError(
            f"attention implementation {model.config._attn_implementation!r} has no rows"
        )
    # This is checked first, since transformers would log a warning.
    if not getattr(model, "_supports_attention_backend", True):
        raise ValueError("its attention does not go through transformers' attention interface")
    model.set_attn_implementation(SLOT_ATTENTION)


def _contexts(vocab_size: int, max_context: int | None, window: int | None) -> list[list[int]]:
    """A context longer than the attention's window, unless the window is too long, and a context of
    half that length."""
    length = window + 8 if window is not None and window <= MAX_PROBED_WINDOW else 12
    if max_context is not None:
        length = max(min(length, max_context), 4)
    return _random_contexts(vocab_size, (length // 2, length))


def _put_in(contexts: Sequence[list[int]], config: Any, vocab_size: int) -> None:
    """Put the padding token into the contexts. Some models do not count it as a position, which
    kept state cannot reproduce."""
    padding = getattr(config.get_text_config(decoder=True), "pad_token_id", None)
    if isinstance(padding, int) and 0 <= padding < vocab_size:
        for context in contexts:
            context[len(context) // 3] = padding


def _random_contexts(vocab_size: int, lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths
    ]


def _logprobs(logits: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(logits)).float().log_softmax(-1)
