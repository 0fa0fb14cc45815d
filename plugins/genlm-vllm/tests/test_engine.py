"""The hooks on a real vLLM, step by step."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import vllm
from packaging.version import Version
from structlog.testing import capture_logs
from vllm.v1.engine.exceptions import EngineDeadError as DeadEngine

from genlm.conformance.declaration import failing_forward
from genlm.core.errors import EngineDeadError, EngineError, InvalidOptionError, UnsupportedError
from genlm.core.options import CoreOptions
from genlm.core.runtime.loaded_engine import LoadedEngine
from genlm.core.types import Query, SamplingParams, ScoreRequest
from genlm.vllm import in_flight, internals
from genlm.vllm.internals import ids_by_position, logits_processor_interfaces
from genlm.vllm.loading import load
from genlm.vllm.rows import LocalRows
from genlm.vllm.scoring import cheaper_as_requests
from tests.adapter_outcomes import reference_rows

from .driven import SMALL, DrivenVllm, text

ATOL = 5e-4  # float32, with prompts computed in other chunks


def test_rows_match_transformers(engine, small_path):
    contexts = [text(seed, length) for seed, length in enumerate([1, 7, 64, 65, 200])]
    rows = engine.ask(*map(Query, contexts))
    expected = reference_rows(small_path, None, contexts)
    torch.testing.assert_close(torch.stack(rows), torch.stack(expected), atol=ATOL, rtol=0)


def test_extensions_compute_only_the_new_tokens(engine):
    contexts = [text(seed, 40 + seed) for seed in range(4)]
    engine.ask(*map(Query, contexts))
    longer = [ids + text(9, new) for ids, new in zip(contexts, [1, 1, 5, 12], strict=True)]
    assert engine.computes(*longer) == [1 + 1 + 5 + 12]


@pytest.mark.parametrize("length", [20, 50], ids=["in the first block", "beyond it"])
def test_a_cold_query_computes_everything(engine, length):
    query = Query(text(0, length))
    engine.ask(query)
    with engine.computed_tokens() as counts:
        engine.ask(Query((*query.token_ids, 5), cold=True))
    assert sum(counts) == length + 1


def test_new_requests_join_at_the_next_step(engine):
    """A long prompt takes several steps of 64 tokens, and requests made meanwhile do not wait for
    its end."""
    long, short = Query(text(0, 200)), Query(text(1, 5))
    assert engine.step(long) == {}
    seen, steps = list(engine.step(short)), 1
    while len(seen) < 2:
        seen += list(engine.step())
        steps += 1
    assert steps <= 3, "200 and 5 tokens fit four steps of 64, the first of which was made before"


def test_a_full_cache_and_more_requests_than_places(engine):
    """Forty contexts of about 100 tokens where the cache holds 864 tokens and a batch 16
    requests."""
    engine.computes(*(text(seed, 90 + seed % 20) for seed in range(40)))


def test_sessions_leave_room_where_several_kinds_of_layers_have_blocks(
    load_briefly, make_tiny, monkeypatch
):
    """Seven short contexts take two blocks each, of 13; a long one takes less per token."""
    kinds = ["sliding_attention", "full_attention"]
    windows = {"head_dim": 32, "sliding_window": 24, "layer_types": kinds}
    monkeypatch.setattr(in_flight, "GIVE_UP_STEPS", 30)
    engine = load_briefly(make_tiny("Gemma3Text", **windows), num_gpu_blocks_override=14)
    engine.computes(*(text(seed, 20) for seed in range(7)))
    engine.computes(text(8, 255))


def test_sessions_leave_the_room_that_vllm_keeps_for_running_requests(load_briefly, monkeypatch):
    monkeypatch.setattr(in_flight, "GIVE_UP_STEPS", 30)
    load_briefly(watermark=0.2).computes(*(text(seed, 150) for seed in range(6)))


def test_prompts_that_are_computed_side_by_side_share_no_room(load_briefly, monkeypatch):
    monkeypatch.setattr(in_flight, "GIVE_UP_STEPS", 30)
    engine = load_briefly(long_prefill_token_threshold=32)
    for seed in range(3):
        engine.computes(*((*text(seed, 170), last) for last in range(2)))


def test_sessions_are_released_if_vllm_stands_still(load_briefly, monkeypatch):
    """They then hold more of the cache than was counted."""
    monkeypatch.setattr(internals, "footprint_of", lambda groups, block_size: lambda length: 1)
    engine = load_briefly()
    with capture_logs() as logs:
        engine.computes(*(text(seed, 100) for seed in range(12)))
    assert "vllm.stood_still" in {line["event"] for line in logs}


def test_shortest_max_model_len_leaves_one_token(load_briefly):
    engine = load_briefly(max_model_len=2)
    assert engine.max_context == 1
    engine.computes((5,))
    with pytest.raises(InvalidOptionError, match=r"max_model_len=1 leaves no room.*at least 2"):
        load_briefly(max_model_len=1)


def test_sessions_that_share_a_prompt_take_its_room_once(engine):
    """Eight contexts of 170 tokens, 160 of them a common prompt, fit into a cache of 864 tokens."""
    contexts = [(*text(0, 160), *text(seed, 10)) for seed in range(1, 9)]
    engine.ask(*map(Query, contexts))
    assert engine.computes(*((*ids, 5) for ids in contexts)) == [8]


def test_sessions_use_free_places(engine):
    contexts = [text(seed, 20) for seed in range(15)]
    engine.ask(*map(Query, contexts))
    assert engine.computes(*((*ids, 5) for ids in contexts)) == [15]
    engine.ask(*(Query((*ids, 5)) for ids in contexts))
    others = [Query(text(seed, 20)) for seed in range(50, 62)]
    assert engine.step(*others).keys() <= set(others)
    assert len(engine._sessions) == 8, "half of the places, beside requests that want the others"


# --- pinned prefixes ------------------------------------------------------------------------------


def test_pinned_prefix_survives_pressure_until_state_is_cleared(engine):
    prefix = text(0, 96)
    assert engine.genlm_cache_prefix(Query(prefix)) is True
    engine.ask(*(Query(text(seed, 200)) for seed in range(1, 9)))
    assert sum(engine.computes((*prefix, 5), (*prefix, 6))) == 2
    engine.genlm_clear_kv_cache()
    assert sum(engine.computes((*prefix, 5))) == 97


def test_pins_that_would_fill_the_cache_are_rejected(engine):
    for seed in range(2):
        engine.genlm_cache_prefix(Query(text(seed, 220)))
    with pytest.raises(EngineError, match=r"clear_kv_cache.*kv_cache_memory_bytes"):
        engine.genlm_cache_prefix(Query(text(2, 250)))
    assert engine.computes((*text(0, 220), 5)) == [1], "what was pinned before is still there"
    engine.computes(text(50, 250))


# --- failures -------------------------------------------------------------------------------------


def test_a_prefix_is_pinned_again_after_a_failure(engine):
    prefix = text(0, 96)
    engine.genlm_cache_prefix(Query(prefix))
    with failing_forward(engine.model)(1), pytest.raises(RuntimeError, match="planted"):
        engine.step(Query(text(1, 20)))
    engine.genlm_cache_prefix(Query(prefix))  # as the core requests
    engine.computes(text(1, 20))
    assert engine.computes((*prefix, 5)) == [1]


def test_failed_pin_leaves_other_requests_right(engine):
    with failing_forward(engine.model)(1), pytest.raises(RuntimeError, match="planted"):
        engine.genlm_cache_prefix(Query(text(0, 96)))
    engine.computes(text(1, 20))


def test_after_a_failed_score_the_next_one_is_right(engine):
    """vLLM enters blocks in its prefix cache before it computes them, so blocks of a failed step
    must not be found again."""
    ids, drawn = text(0, 50), text(1, 20)
    with failing_forward(engine.model)(1), pytest.raises(RuntimeError, match="planted"):
        engine.score([Query(ids)], [drawn])
    (scores,) = engine.score([Query(ids)], [drawn])
    assert scores.shape == (20,)
    engine.computes(ids)


def raising(error):
    def fail(*given):
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
            EngineError,
            r"can't allocate .*; lower max_num_batched_tokens",
        ),
        (DeadEngine(), EngineDeadError, "vLLM has died: .*load the model again"),
    ],
    ids=["no memory", "dead"],
)
def test_error_of_a_failing_step_names_the_remedy(engine, monkeypatch, error, kind, said):
    monkeypatch.setattr(engine._core, "step", raising(error))
    with pytest.raises(kind, match=said):
        engine.step(Query(text(0, 5)))


@pytest.mark.parametrize(
    ("reset", "said"),
    [
        (raising(RuntimeError("no channel")), "no channel"),
        (lambda: False, "did not empty its KV cache"),
    ],
    ids=["fails", "refuses"],
)
def test_an_engine_that_cannot_drop_its_state_is_dead(engine, monkeypatch, reset, said):
    monkeypatch.setattr(engine._core, "reset_prefix_cache", reset)
    with pytest.raises(EngineDeadError, match=f"{said}.*load the model again"):
        engine.genlm_clear_kv_cache()


def test_a_request_that_vllm_ends_without_a_row_fails_alone(engine, monkeypatch):
    usual = engine._core.step

    def step():
        first, *others = usual()
        return [first._replace(token_ids=[], finished="error"), *others]

    monkeypatch.setattr(engine._core, "step", step)
    failed, row = engine.ask(Query(text(0, 5), cold=True), Query(text(1, 5), cold=True))
    assert isinstance(failed, EngineError)
    assert row.shape == (engine.vocab_size,)


def test_an_engine_that_computes_nothing_is_given_up(engine, monkeypatch):
    monkeypatch.setattr(in_flight, "GIVE_UP_STEPS", 30)
    (drawn,) = engine.draw([Query(text(0, 5))], [SamplingParams(max_tokens=60)])
    assert len(drawn) == 60, "a draw may take more steps"
    with monkeypatch.context() as patch:
        patch.setattr(engine._core, "step", list)
        with pytest.raises(EngineError, match=r"31 steps without .* kv_cache_memory_bytes"):
            engine.ask(Query(text(0, 5)))
    engine.computes(text(0, 5))


# --- sampling -------------------------------------------------------------------------------------


def test_seeded_draws_do_not_depend_on_the_batch(engine, monkeypatch):
    """On a GPU; vLLM's sampler for CPUs is right about short prompts too."""
    monkeypatch.setattr(engine._core, "device_type", "cuda")
    queries = [Query(text(seed, 10)) for seed in range(4)]
    params = [SamplingParams(max_tokens=6, seed=seed) for seed in (3, 2**64 - 1, -1, 0)]
    together = engine.draw(queries, params)
    assert together == [engine.draw([q], [p])[0] for q, p in zip(queries, params, strict=True)]
    assert together != engine.draw(queries, [SamplingParams(max_tokens=6, seed=9)] * 4)


@pytest.mark.parametrize("params", [{"temperature": 0.001}, {"temperature": 3.0}, {"seed": 1}])
def test_core_draws_samples_that_vllm_would_draw_wrongly(engine, params):
    asked = SamplingParams(max_tokens=3, **params)
    assert engine.draw([Query(text(0, 10))], [asked]) == [None]


@pytest.mark.parametrize("cut", [{}, {"temperature": 2.0}, {"top_k": 3}, {"top_p": 0.5}])
def test_sample_frequencies_match_the_row(engine, cut):
    engine.check_frequencies(Query(text(0, 10)), **cut)


# --- padded embeddings ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def padded(load_for_module):
    """A model with more ids than the tokenizer has tokens: some ids have no token, and padding
    follows the last one."""
    return DrivenVllm(load_for_module().engine, width=900)


@pytest.mark.parametrize("cut", [{"temperature": 2.0}, {"top_k": 300}])
def test_padding_is_never_drawn(padded, cut):
    padded.check_frequencies(Query(text(0, 10)), **cut)


def test_padding_has_no_mass_in_rows_and_scores(padded):
    context, continuation = (100, 101, 1700), (899, *range(200, 230))
    (scores,) = padded.score([Query(context)], [continuation])
    for at, (score, token_id) in enumerate(zip(scores, continuation, strict=True)):
        (row,) = padded.ask(Query(context + continuation[:at], cold=True))
        assert row.shape == (900,)
        assert float(row.logsumexp(0)) == pytest.approx(0, abs=ATOL)
        assert float(score) == pytest.approx(float(row[token_id]), abs=ATOL)


def test_closed_model_with_padding_is_freed_at_once(small_path):
    """Also without a search for garbage, which may be long in coming."""
    engine = DrivenVllm(load(small_path, {"engine_opts": SMALL}), width=900)
    engine.ask(Query(text(0, 5)))
    model = weakref.ref(engine.model)
    gc.disable()  # only explicit collections remain
    try:
        engine.genlm_close()
        assert model() is None
    finally:
        gc.enable()


def test_everything_is_made_from_rows_if_padding_cannot_be_hidden(load_briefly, monkeypatch):
    monkeypatch.setattr(LocalRows, "hide_padding", lambda self, model, width: None)
    engine = DrivenVllm(load_briefly().engine, width=900)
    assert engine.draw([Query(text(0, 5))], [SamplingParams(max_tokens=3)]) == [None]
    assert engine.score([Query(text(0, 5))], [text(1, 20)]) == [None]
    (row,) = engine.ask(Query(text(0, 5)))
    assert row.isfinite().all()


# --- scoring --------------------------------------------------------------------------------------


def test_scores_over_several_steps_are_the_entries_of_rows(engine):
    (ids, other), drawn = (text(seed, 100) for seed in (0, 1)), text(2, 156)
    scores = engine.score([Query(ids), Query(other)], [drawn, drawn[:-1]])
    assert [len(score) for score in scores] == [156, 155]
    for score, begun, at in (*((scores[0], ids, at) for at in (0, 78, 155)), (scores[1], other, 0)):
        (row,) = engine.ask(Query(begun + drawn[:at], cold=True))
        assert float(score[at]) == pytest.approx(float(row[drawn[at]]), abs=ATOL)


def test_ids_to_score_differ_by_position_where_vllm_takes_an_array():
    """vLLM 0.31 takes one list for all positions."""

    class Of031:
        prompt_logprob_token_ids: list[int] | None = None

    assert not ids_by_position(Of031)
    assert not ids_by_position(object), "0.30 has no such parameter"
    assert ids_by_position(vllm.SamplingParams) == (Version(vllm.__version__) >= Version("0.32"))


def test_scores_of_tokens_with_kept_state_are_right(engine):
    """vLLM returns nothing for tokens whose state it finds. Here it would find that of all tokens,
    in a full block and in a live request."""
    ids, drawn = text(0, 10), text(1, 40)
    engine.ask(Query(ids + drawn))
    (warm,) = engine.score([Query(ids)], [drawn])
    engine.genlm_clear_kv_cache()
    (cold_scores,) = engine.score([Query(ids)], [drawn])
    torch.testing.assert_close(warm, cold_scores, atol=ATOL, rtol=0)


@pytest.mark.parametrize(
    ("length", "scored", "mode", "forks", "native"),
    [
        (200, 8, "raw_logprobs", True, True),
        (200, 8, "raw_logits", True, False),  # the engine was told to give logits
        (31, 2, "raw_logprobs", False, True),
        (32, 2, "raw_logprobs", False, False),  # rows find the state of a long context
        (15, 1, "raw_logprobs", False, False),
    ],
)
def test_scores_are_native_if_they_cost_less_than_rows(length, scored, mode, forks, native):
    core = SimpleNamespace(block_size=32, logprobs_mode=mode, forks=forks)
    request = ScoreRequest(Query(text(0, length)), text(1, scored))
    assert cheaper_as_requests([request], core) == [request] * native


def assert_scores(engine, scores, asked):
    """Against the entries of cold rows."""
    for given, (context, continuation) in zip(scores, asked, strict=True):
        for at, (score, token) in enumerate(zip(given, continuation, strict=True)):
            (row,) = engine.ask(Query(context + continuation[:at], cold=True))
            assert float(score) == pytest.approx(float(row[token]), abs=ATOL)


@pytest.mark.parametrize("length", [20, 32, 33, 90])
@pytest.mark.parametrize("is_live", [False, True])
def test_score_computes_only_the_scored_tokens(engine, length, is_live):
    """The context is computed once, and its last token, which gives the first score, for each
    score. This also holds if other requests have the scored tokens."""
    context = text(0, length)
    if is_live:
        engine.ask(Query(context))
    asked = [(context, text(seed, 40)) for seed in (1, 2, 3)] + [(context, text(1, 35))]
    with engine.computed_tokens() as counts:
        scores = engine.score([Query(each) for each, _ in asked], [each for _, each in asked])
    assert sum(counts) == 155 + (0 if is_live else length - 1)
    assert_scores(engine, scores, asked)


def test_a_scored_text_is_live(engine):
    whole = text(0, 100)
    engine.score([Query(whole[:60])], [whole[60:]])
    changed = (*whole[:80], 5, *whole[81:])
    with engine.computed_tokens() as counts:
        scores = engine.score([Query(changed[:80])], [changed[80:]])
    assert counts == [20]
    assert_scores(engine, scores, [(changed[:80], changed[80:])])
    assert engine.computes(whole) == [1]
    assert engine.computes((*whole, 5)) == [1]


# --- two models, and other options ----------------------------------------------------------------


def test_two_models_never_compute_at_once(engine, load_briefly):
    """vLLM keeps the forward pass under way in a global: rows would be wrong, or the process die.
    Where both could, they meet here."""
    meeting, query = threading.Barrier(2), Query(text(0, 5))
    (expected,) = engine.ask(query)
    engine.genlm_clear_kv_cache()

    def meet(*given):
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait(1)
            raise AssertionError("they compute at once")

    engines = engine, load_briefly()
    hooks = [each.model.register_forward_pre_hook(meet) for each in engines]
    try:
        with ThreadPoolExecutor(2) as threads:
            rows = [*threads.map(lambda each: each.ask(query)[0], engines)]
    finally:
        for hook in hooks:
            hook.remove()
    torch.testing.assert_close(rows, [expected] * 2, atol=ATOL, rtol=0)


def test_without_live_sessions_and_prefix_caching(load_briefly):
    engine = load_briefly(live_sessions=False, enable_prefix_caching=False)
    engine.ask(Query(text(0, 50)))
    assert sum(engine.computes((*text(0, 50), 5))) == 51
    with pytest.raises(UnsupportedError, match="prefix caching"):
        engine.genlm_cache_prefix(Query(text(0, 50)))


def test_processors_of_the_users_own_change_draws_and_no_rows(engine, load_briefly):
    class AlwaysSeven:
        def __init__(self, *config):
            pass

        def is_argmax_invariant(self):
            return False

        def update_state(self, batch_update):
            pass

        def apply(self, logits, context=None):
            logits[:, 7] = 1e4
            return logits

    own = type("Own", (AlwaysSeven, *logits_processor_interfaces()), {})
    query, changed = Query(text(0, 5)), load_briefly(logits_processors=[own])
    torch.testing.assert_close(changed.ask(query), engine.ask(query), atol=ATOL, rtol=0)
    params = SamplingParams(max_tokens=2, temperature=0.0)
    assert changed.draw([query], [params]) == [[7, 7]]


def test_a_scheduler_of_the_users_own_makes_no_forks(load_briefly):
    engine = load_briefly(scheduler_cls="vllm.v1.core.sched.scheduler.Scheduler")
    parent = text(0, 45)
    engine.ask(Query(parent))
    assert sum(engine.computes((*parent, 5), (*parent, 6))) == 1 + (46 - 32)


@pytest.mark.parametrize("limit", ["long_prefill_token_threshold", "max_num_scheduled_tokens"])
def test_slow_progress_of_a_prompt_is_not_standing_still(load_briefly, monkeypatch, limit):
    monkeypatch.setattr(in_flight, "GIVE_UP_STEPS", 2)
    load_briefly(**{limit: 5}).computes(text(0, 100))


def test_error_without_lora_says_how_to_load_it(engine):
    loaded = LoadedEngine(engine.engine, "vllm", (), CoreOptions())
    with pytest.raises(UnsupportedError, match=r"load it with .*'enable_lora': True"):
        loaded.require("genlm_add_lora", "LoRA")
