"""Steps of constant shape, as they are and recorded, beside cold rows.

A recording is of operators and the memory that they read and write. A replay that is right for
other contexts reads all that differs from that memory, as a CUDA graph must.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers as configs
from structlog.testing import capture_logs

from genlm.core import Adapter, InvalidOptionError, Query
from genlm.hf import AsyncTransformer, strategies
from genlm.hf import static as static_module
from genlm.hf.operators import Operators
from genlm.hf.options import HFOptions
from tests.engines import add_lora, rows_of

from .models import Pair, beside, build, draw, llama_config
from .recorded import forwards_of, recorded_steps
from .shapes import LATENT
from .test_families import SHARED

pytestmark = pytest.mark.any_version

#: One model for each kind of attention that has a slot for each context.
KINDS = {**SHARED, "deepseek3, latent attention": configs.DeepseekV3Config(**LATENT)}

LLAMA = llama_config(max_position_embeddings=600)


def static(config: Any, **options: Any) -> Pair:
    """An engine beside the same model, which has no hooks."""
    model = build(copy.deepcopy(config))
    return beside(model, copy.deepcopy(model), static=True, **options)


@pytest.fixture(params=["as it is", "recorded"])
def recorder(request: pytest.FixtureRequest) -> Iterator[Operators | None]:
    """The recorder of steps; ``None`` means that steps run in Python."""
    way = recorded_steps() if request.param == "recorded" else nullcontext()
    with patch.object(strategies, "recorder_for", lambda device: None), way as given:
        yield given


@pytest.fixture
def operators() -> Iterator[Operators]:
    """Engines record their steps."""
    with recorded_steps() as given:
        yield given


def grown(contexts: list[tuple[int, ...]], source: random.Random) -> list[tuple[int, ...]]:
    return [(*one, source.randrange(200)) for one in contexts]


# --- rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_growing_resting_and_forked_contexts_have_right_rows(
    kind: str, recorder: Operators | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a few tokens to beyond two multiples of 64, a window and a chunk; one to nine contexts
    a step. The pool is resized on the way."""
    monkeypatch.setattr(static_module, "STEPS_BEFORE_RECORDING", 1)
    pair, source = static(KINDS[kind]), random.Random(kind)
    contexts = draw(3, 2)
    for step in range(140):
        contexts = grown(contexts, source)
        if step % 20 == 19:  # chosen with repetition
            contexts = source.choices(contexts, k=source.randint(2, 9))
        elif step % 3 == 0:  # the others rest
            going = source.sample(contexts, source.randint(1, len(contexts)))
            pair.ask(*{*going})
            continue
        some = list({*contexts})
        if step % 4 == 1 or len(some[0]) % 64 in (0, 1):
            pair.check(*some)
        else:
            pair.ask(*some)
    assert max(map(len, contexts)) > 128
    assert recorder is None or recorder.replays > 20


def test_a_step_has_the_same_shape_for_any_contexts(recorder: Operators | None) -> None:
    """Five and eight contexts are eight rows; a recorded step needs no Python of the model."""
    pair = static(LLAMA)
    contexts = draw(8, 70)
    pair.ask(*contexts)
    with forwards_of(pair.engine.model) as shapes:
        for count in (5, 6, 8, 7, 5, 8):
            some = grown(contexts[-count:], random.Random(count))
            pair.check(*some)
            contexts = [*some, *contexts[:-count]]
    alike = [(8, 1)] * 6
    assert shapes == alike if recorder is None else [(5, 1), (6, 1), (8, 1)]


def test_steps_of_other_shapes_are_computed_without_recordings(recorder: Operators | None) -> None:
    """New contexts, several tokens, places of a text, scores, and prompts on trunks."""
    pair, source = static(LLAMA), random.Random(0)
    contexts = draw(4, 20)
    for _ in range(6):
        contexts = grown(contexts, source)
        pair.check(*contexts)
        fresh = draw(1, 9, seed=source.random())  # type: ignore[arg-type]
        pair.check(*contexts, *fresh, (*contexts[0], 1, 2))
        pair.check(contexts[1][:7], contexts[1][:9], contexts[2][:3])
        pair.check_scores((contexts[0], (1, 2, 3)), (contexts[3], (5,)))
    (prompt,) = draw(1, 40, seed=2)
    pair.engine.genlm_cache_prefix(Query(prompt))
    behind = [(*prompt, token) for token in range(4)]
    for _ in range(6):
        pair.check(*behind)
        pair.check(*behind, *contexts)
        behind, contexts = grown(behind, source), grown(contexts, source)


def test_static_rows_are_right_under_a_small_budget(recorder: Operators | None) -> None:
    """State is evicted, and the pool shrinks and grows."""
    pair, source = static(LLAMA, kv_cache_bytes=6 * 64 * 256), random.Random(0)
    contexts = draw(9, 20)
    for step in range(30):
        contexts = grown(contexts, source)
        pair.check(*source.sample(contexts, 1 + step % 9))


def test_dropped_requests_leave_other_rows_right(recorder: Operators | None) -> None:
    pair, source = static(LLAMA, max_batch_tokens=16), random.Random(0)
    contexts = draw(4, 12)
    pair.ask(*contexts)
    (long,) = draw(1, 100, seed=1)
    for step in range(12):
        contexts = grown(contexts, source)
        given_up = contexts[:2] if step % 2 else [long]
        answered = pair.step(long, *contexts[2:], dropped=given_up)
        assert {*contexts[2:]} <= answered
        contexts[:2] = grown(contexts[:2], source) if step % 2 else contexts[:2]


@pytest.mark.usefixtures("operators")
def test_returned_rows_are_unchanged_by_later_replays() -> None:
    """A replay overwrites the results of other recordings."""
    pair = static(LLAMA)
    given: list[tuple[Any, Any]] = []
    contexts = draw(4, 10)
    for step in range(12):
        contexts = grown(contexts, random.Random(step))
        some = contexts[: 2 + step % 3]
        given.append((pair.ask(*some), pair.expected(*some)))
    for rows, expected in given:
        torch.testing.assert_close(rows, expected, atol=1e-4, rtol=0)


# --- what drops recordings ------------------------------------------------------------------------


class Steps:
    """Growing contexts of an engine; counts how many of the requested steps were replayed."""

    def __init__(self, pair: Pair, recorder: Operators, count: int = 4) -> None:
        self.pair, self.recorder, self.contexts = pair, recorder, draw(count, 8)
        self._source = random.Random(0)
        pair.ask(*self.contexts)

    def replayed(self, steps: int, check: bool = True) -> int:
        before = self.recorder.replays
        for _ in range(steps):
            self.contexts = grown(self.contexts, self._source)
            (self.pair.check if check else self.pair.ask)(*self.contexts)
        return self.recorder.replays - before


def test_frequent_shape_is_recorded(operators: Operators) -> None:
    with capture_logs() as events:
        steps = Steps(static(LLAMA), operators)
        assert [steps.replayed(1) for _ in range(6)] == [0, 0, 0, 1, 1, 1]
    found = [event for event in events if event["event"] == "kv.step_recorded"]
    assert [(one["rows"], one["columns"]) for one in found] == [(4, 64)]


def test_resizing_the_pool_drops_recordings(operators: Operators) -> None:
    """More contexts come, so that the state moves."""
    steps = Steps(static(LLAMA), operators)
    assert steps.replayed(6) == 3
    steps.pair.check(*draw(20, 30, seed=3))
    assert steps.replayed(4) == 3  # the first one runs in Python, before it is recorded again
    steps.pair.engine.genlm_clear_kv_cache()
    assert not operators.nbytes
    steps.pair.check(*steps.contexts)
    assert steps.replayed(4) == 3


def replace_data(model: Any, weight: torch.Tensor) -> None:
    model.lm_head.weight.data = weight


def replace_parameter(model: Any, weight: torch.Tensor) -> None:
    model.lm_head.weight = torch.nn.Parameter(weight)


def replace_forward(model: Any, weight: torch.Tensor) -> None:
    model.lm_head.forward = lambda hidden: hidden @ weight.T


def replace_module(model: Any, weight: torch.Tensor) -> None:
    model.lm_head = torch.nn.Linear(*weight.T.shape, bias=False)
    model.lm_head.weight.data = weight


@pytest.mark.parametrize(
    ("replace", "replayed"),
    [
        (replace_data, 3),
        (replace_parameter, 3),
        (replace_module, 3),
        (replace_forward, 2),  # as a hook that changes rows, it drops the state too
    ],
)
def test_replaced_weights_drop_recordings(
    replace: Callable[[Any, torch.Tensor], None], replayed: int, operators: Operators
) -> None:
    """In the output layer, on which no state depends: rows follow at once."""
    steps = Steps(static(LLAMA), operators)
    assert steps.replayed(5) == 2
    weight = torch.randn_like(steps.pair.reference.lm_head.weight)
    with torch.no_grad():
        steps.pair.reference.lm_head.weight.copy_(weight)
    replace(steps.pair.engine.model, weight.clone())
    assert steps.replayed(4) == replayed


def test_replay_reads_changed_weights(operators: Operators) -> None:
    """An optimizer writes weights in place, from where a recording reads them."""
    steps = Steps(static(LLAMA), operators)
    assert steps.replayed(5) == 2
    for model in (steps.pair.engine.model, steps.pair.reference):
        with torch.no_grad():
            model.lm_head.weight.mul_(0.5)
    assert steps.replayed(3) == 3


def test_hook_on_the_whole_model_runs_in_every_step(operators: Operators) -> None:
    """It changes no row, so nothing is dropped."""
    pair = static(LLAMA)
    steps, calls = Steps(pair, operators), list[int]()
    assert steps.replayed(5) == 2
    hook = pair.engine.model.register_forward_hook(lambda *_: calls.append(1))
    try:
        assert steps.replayed(4) == 0
    finally:
        hook.remove()
    assert len(calls) >= 4
    assert steps.replayed(3) == 3


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_hook_runs_in_every_step(everywhere: bool, operators: Operators) -> None:
    pair = static(LLAMA)
    steps, calls = Steps(pair, operators), list[int]()
    assert steps.replayed(5) == 2

    def double(module: Any, args: Any, output: Any) -> Any:
        if module is pair.engine.model.lm_head:
            calls.append(len(output))
            return 2 * output
        return None

    if everywhere:
        hook = torch.nn.modules.module.register_module_forward_hook(double)
    else:
        hook = pair.engine.model.lm_head.register_forward_hook(double)
    try:
        assert steps.replayed(4, check=False) == 0
    finally:
        hook.remove()
    assert calls.count(4) == 4
    assert {*calls} <= {1, 2, 4}, "it sees no padding; one row or two are compared with cold ones"
    assert steps.replayed(6) >= 2, "the hook changed rows, so state was dropped with recordings"


def test_adapters_each_have_recordings(
    operators: Operators, tiny: str, lora_folders: dict[str, str]
) -> None:
    peft = pytest.importorskip("peft", reason="LoRA needs peft")
    base = [configs.AutoModelForCausalLM.from_pretrained(tiny) for _ in range(2)]
    adapted = peft.PeftModel.from_pretrained(base[1], lora_folders["a"], adapter_name="a")
    adapted.load_adapter(lora_folders["b"], adapter_name="b")
    engine = beside(base[0], adapted.eval(), static=True).engine
    adapters = {name: Adapter(name, lora_folders[name], at) for at, name in enumerate("ab", 1)}
    contexts, source = draw(4, 10), random.Random(0)

    def check(*names: str | None) -> None:
        """Check the rows of all contexts with each of some adapters, in one step."""
        queries = [
            (Query(one, adapters[name] if name else None), name)
            for name in names
            for one in contexts
        ]
        rows = rows_of(engine, [query for query, _ in queries])
        for row, (query, name) in zip(rows, queries, strict=True):
            adapted.set_adapter(name or "a")
            plain = adapted.disable_adapter() if name is None else nullcontext()
            with plain, torch.no_grad():
                logits = adapted(torch.tensor([query.token_ids])).logits[0, -1]
            torch.testing.assert_close(row, logits.log_softmax(-1), atol=1e-4, rtol=0)

    def check_all(*ways: tuple[str | None, ...]) -> int:
        nonlocal contexts
        for _ in range(6):
            for names in ways:
                check(*names)
            contexts = grown(contexts, source)
        return len(operators.recordings)

    check_all((None,))
    assert operators.recordings
    add_lora(engine, adapters["a"])
    assert check_all((None,), ("a",)) == 2
    add_lora(engine, adapters["b"])
    assert check_all((None,), ("a",), ("b",), (None, "a", "b")) == 3
    engine.genlm_remove_lora(adapters["a"])
    assert check_all((None,), ("b",)) == 2


# --- memory, and what cannot be recorded ----------------------------------------------------------


def test_recordings_and_state_share_the_memory(operators: Operators) -> None:
    most = 1 << 24
    pair, source = static(LLAMA, kv_cache_bytes=most), random.Random(0)
    contexts = draw(60, 6)
    pair.ask(*contexts)
    for step in range(60):
        contexts = grown(contexts, source)
        pair.ask(*contexts[: 1 << step % 6])
        pool = pair.engine._runner.pool
        state = pool.slots * pool.columns * pool.bytes_per_column
        assert operators.nbytes <= most // 8
        assert state + operators.nbytes <= most
    pair.check(*contexts)
    assert operators.replays


class Failing(Operators):
    """A recorder that fails for steps with at least this many rows."""

    def __init__(self, rows: int, error: Exception) -> None:
        super().__init__()
        self._rows, self._error, self.tried = rows, error, 0

    def record(self, step: Any) -> Any:
        recording = super().record(step)
        if len(recording.result) >= self._rows:
            self.tried += 1
            raise self._error
        return recording


def test_unrecordable_step_is_computed_without_recording() -> None:
    """After the driver rejects one step, no step is recorded, and this is logged once."""
    with recorded_steps(Failing(4, RuntimeError("operation not permitted"))) as recorder:
        steps = Steps(static(LLAMA), recorder)
        with capture_logs() as events:
            assert steps.replayed(6) == 0
            steps.contexts = steps.contexts[:2]
            assert steps.replayed(6) == 0
    assert recorder.tried == 1
    (event,) = [one for one in events if one["event"] == "kv.step_not_recorded"]
    assert "operation not permitted" in event["reason"]


def test_step_without_memory_for_recording_is_computed() -> None:
    """Smaller steps are still recorded."""
    with recorded_steps(Failing(4, torch.OutOfMemoryError("out of memory"))) as recorder:
        steps = Steps(static(LLAMA), recorder)
        assert steps.replayed(6) == 0
        steps.contexts = steps.contexts[:2]
        assert steps.replayed(6) == 3
    assert recorder.tried == 1


class Baked(torch.nn.Module):
    """A rotary embedding of positions that Python has read, which no operator shows."""

    def __init__(self, rope: torch.nn.Module) -> None:
        super().__init__()
        self.rope = rope

    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return self.rope(hidden, self.read(position_ids))

    def read(self, positions: torch.Tensor) -> torch.Tensor:
        values = itertools.chain.from_iterable(positions.tolist())
        read = [*map(torch.full_like, positions.flatten(), values)]
        return torch.stack(read).view_as(positions)


class Read(Baked):
    """The same, by operators that copy between the host and the device."""

    def read(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.tensor([[int(one) for one in some] for some in positions])


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}


@pytest.mark.parametrize(
    ("rope", "changes", "why"),
    [
        (Baked, {}, "rows differ by"),
        (Read, {}, "_local_scalar_dense is an operator that cannot be recorded"),
        (lambda rope: rope, {"rope_parameters": DYNAMIC}, "cannot be recorded"),
    ],
    ids=["a value", "an operator", "dynamic frequencies"],
)
def test_model_that_reads_values_is_not_recorded(
    rope: Callable[[Any], Any], changes: dict[str, Any], why: str
) -> None:
    model = build(llama_config(**changes))
    model.model.rotary_emb = rope(model.model.rotary_emb)
    with capture_logs() as events, recorded_steps() as recorder:
        pair = beside(model, copy.deepcopy(model), static=True)
    (event,) = [one for one in events if one["event"] == "kv.step_not_static"]
    assert why in event["why"]
    contexts = draw(3, 5)
    for step in range(8):
        contexts = grown(contexts, random.Random(step))
        pair.check(*contexts)
    assert not recorder.replays


# --- the option -----------------------------------------------------------------------------------


def test_steps_on_a_cpu_are_static_only_on_request() -> None:
    for options in ({}, {"static": None}, {"static": False}):
        model = build(LLAMA)
        pair = beside(model, copy.deepcopy(model), **options)
        contexts = draw(3, 5)
        pair.ask(*contexts)
        with forwards_of(model) as shapes:
            pair.ask(*grown(contexts, random.Random(0)))
        assert shapes == [(3, 1)]


@pytest.mark.parametrize("given", [1, "yes"])
def test_another_value_is_rejected(given: object) -> None:
    with pytest.raises(InvalidOptionError, match="static must be True, False or None; got"):
        HFOptions.parse({"static": given})


def test_static_option_applies_to_a_loaded_model() -> None:
    from genlm.core.mock import ByteTokenizer

    model = build(LLAMA)
    with AsyncTransformer(model, ByteTokenizer(), static=True, cache_size=0) as lm:
        contexts = [lm.context(one) for one in draw(3, 5)]
        lm.batch_next_token_logprobs_sync(contexts)
        with forwards_of(model) as shapes:
            lm.batch_next_token_logprobs_sync([one.extend(3) for one in contexts])
    assert shapes == [(4, 1)]
