"""The model runner that vLLM prefers on GPUs ("V2"), on a CPU: its kernels run in Triton's
interpreter.

Slow, and in a process where no other test has imported vLLM or Triton; collected only when it is
named. Triton must be given a backend for CPUs: its wheels have none. The interpreter does not use
it.

One kernel is not run: in the interpreter a kernel's loop variables are plain integers, and vLLM's
for top-k and top-p calls a method of one (Triton 3.9, vLLM 0.32). vLLM's own version of it in
PyTorch takes its place.
"""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from genlm.conformance import ConformanceSuite
from genlm.core.types import Query, SampleRequest, SamplingParams
from genlm.vllm.internals import logits_processor_interfaces
from genlm.vllm.running import RunningSessions
from genlm.vllm.sessions import Sessions
from tools.tiny import write_adapter

from .driven import asynchronous_scheduling, random_program, text
from .test_conformance import LORA
from .test_running import (  # noqa: F401
    joined,
    test_a_session_that_vllm_is_computing_again_takes_a_token,
    test_an_extended_session_stays_in_the_batch,
    test_an_extension_runs_a_hundred_lines_of_our_python,
    test_idle_sessions_that_vllm_preempts_are_right_when_they_are_extended,
)
from .test_transfers import (  # noqa: F401
    test_a_step_waits_for_nothing_and_copies_no_more_for_more_requests,
)


# It has the scope of the session. Otherwise fixtures of the session that import transformers, and
# with it Triton, would run before it.
@pytest.fixture(scope="session", autouse=True)
def _interpreted():
    if imported := sorted({"vllm", "triton"} & sys.modules.keys()):
        pytest.fail(f"{imported[0]} was imported before; run this file in a process of its own")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        import triton.backends

        patch.setitem(
            triton.backends.backends,
            "cpu",
            SimpleNamespace(driver=SimpleNamespace(is_active=lambda: False)),
        )
        import vllm.v1.sample.ops.topk_topp_sampler as topk_topp

        patch.setattr(topk_topp, "HAS_TRITON", False)
        if len(logits_processor_interfaces()) == 1:
            pytest.skip("before 0.31, the runner V2 takes no logits processors")
        yield


def test_model_runner_is_v2(engine):
    assert "vllm.v1.worker.gpu.sample.sampler" in sys.modules


def drawn_after_seeding_numpy(engine):
    """Unseeded samples, beside a row and a score, of a program that has seeded NumPy; what NumPy
    gives next is what it would have given without them."""
    np.random.seed(1)
    expected = np.random.random()
    np.random.seed(1)
    drawn = engine.draw([Query(text(0, 10))] * 3, [SamplingParams(max_tokens=3)] * 3)
    engine.computes(text(1, 9))
    engine.score([Query(text(2, 9))], [(5, 6)])
    assert np.random.random() == expected
    return drawn


def test_unseeded_samples_neither_use_nor_change_numpys_generator(engine):
    """The runner takes a seed for each request without one from NumPy's global generator."""
    assert drawn_after_seeding_numpy(engine) != drawn_after_seeding_numpy(engine)


def test_the_option_seed_fixes_unseeded_draws(load_briefly):
    first, second = (drawn_after_seeding_numpy(load_briefly(seed=3)) for _ in range(2))
    assert first == second


def test_scores_of_a_prompt_that_takes_several_steps_are_the_entries_of_rows(engine):
    """vLLM 0.31 takes one list of scored ids for all positions, and cannot use others here."""
    ids, scored = text(0, 50), text(1, 60)
    (scores,) = engine.score([Query(ids)], [scored])
    for at in (0, 30, 59):
        (row,) = engine.ask(Query(ids + scored[:at], cold=True))
        assert float(scores[at]) == pytest.approx(float(row[scored[at]]), abs=5e-4)


def test_a_random_program(engine):
    """Contexts longer than a step's 64 tokens, extended by one token and by several, and forked."""
    random_program(engine, random.Random(3)).run(5)


def test_a_random_program_with_adapters(lora_engine, write_adapter):
    folders = {name: write_adapter(name, seed=ord(name)) for name in "ab"}
    program = random_program(lora_engine, random.Random(9), adapters=folders)
    program.adapt()
    program.run(5)
    program.leave()


@pytest.fixture
def load_async(load_briefly):
    """Loads an engine that plans a step before the last one has ended."""
    with asynchronous_scheduling():
        yield lambda **options: load_briefly(async_scheduling=True, **options)


def test_sessions_stay_in_the_batch_of_an_asynchronous_scheduler(load_async, monkeypatch):
    engine = load_async()
    assert joined(engine, monkeypatch) == 0
    random_program(engine, random.Random(3)).run(5)


def test_sessions_that_an_asynchronous_scheduler_preempts_are_right(load_async, monkeypatch):
    engine = load_async()
    test_idle_sessions_that_vllm_preempts_are_right_when_they_are_extended(engine, monkeypatch)


def test_a_session_is_extended_whose_shorter_context_a_step_under_way_computes(
    load_async, monkeypatch
):
    """vLLM has preempted it and computes it again. What that step draws is no answer."""
    usual, could = RunningSessions.can_extend, []

    def can_extend(self, request_id):
        could.append(usual(self, request_id))
        return could[-1]

    engine = load_async(
        max_model_len=128,
        max_num_batched_tokens=48,
        num_gpu_blocks_override=12,
        enable_prefix_caching=False,
    )
    monkeypatch.setattr(RunningSessions, "can_extend", can_extend)
    monkeypatch.setattr(Sessions, "trim", lambda self, in_flight: [])
    draw = SampleRequest(Query(text(50, 44)), SamplingParams(max_tokens=24, temperature=0.0))
    known = [text(n, 95) for n in range(3)]
    rows = engine.step(draw)
    waits, asked = {draw, *map(Query, known)}, [*map(Query, known)]
    while not rows.keys() >= waits:  # the sample takes room from the last session
        rows |= engine.step(*asked)
        asked = []
    longer = known
    for token in range(5):
        for at in (0, 2, 1):
            longer = [(*ids, token) if n == at else ids for n, ids in enumerate(longer)]
            query = Query(longer[at])
            rows |= engine.step(query)
            while query not in rows:
                rows |= engine.step()
    assert {*could} == {True, False}, "once a step was under way that computed one again"
    del rows[draw]
    monkeypatch.undo()
    engine.genlm_clear_kv_cache()
    engine.assert_cold_rows(rows)


def test_positions_on_several_axes_go_on_after_an_extension(engine):
    """As models have them that also see: after a picture, positions are behind the tokens. The
    runner's own kernel reads them."""
    from vllm.v1.worker.gpu.mm.rope import RopeState
    from vllm.v1.worker.gpu.states import RequestState

    from genlm.vllm.runner_tokens import V2Tokens

    device, axes = torch.device("cpu"), [[0, 1, 1, 1, 2], [0, 1, 1, 2, 3], [0, 1, 2, 1, 3]]
    states = RequestState(2, 32, 16, 0, 64, device)
    rope = RopeState(len(axes), 2, 16, 32, device)
    states.add_request("other", 1, [1], 0, 1)
    states.add_request("seen", 5, [1, 2, 3, 4, 5], 0, 1)
    slot = states.req_id_to_index["seen"]
    for axis, positions in enumerate(axes):
        rope.prefill_positions.stage_write(slot * len(axes) + axis, 0, positions)
    rope.prefill_delta.np[slot] = -1
    states.apply_staged_writes()
    model = SimpleNamespace(rope_state=rope, apply_staged_writes=rope.apply_staged_writes)
    runner = SimpleNamespace(device=device, req_states=states, model_state=model)
    tokens = V2Tokens(runner)
    tokens.append(SimpleNamespace(request_id="seen", num_computed_tokens=5), 5, [7, 8, 9])
    tokens.write()
    computed = torch.tensor([5, 5], dtype=torch.int32)
    begins = torch.tensor([0, 3], dtype=torch.int32)
    rope.prepare_positions(torch.tensor([slot]), begins, states.prefill_len.gpu, computed)
    assert rope.get_positions(3).tolist() == [[4, 5, 6]] * len(axes)
    assert states.all_token_ids.gpu[slot, :8].tolist() == [1, 2, 3, 4, 5, 7, 8, 9]


class TestVllmV2(ConformanceSuite):
    """The whole contract, with adapters, on a small random model with padded embeddings. Its tokens
    are bytes: in the interpreter, to draw one of 49,152 takes a second. A small ``max_num_seqs``
    would not do: the suite pins 12 prompts at once, and half as many sequences may be pinned."""

    backend = "vllm"
    options = {  # noqa: RUF012
        "engine_opts": {
            "dtype": "float32",
            "max_model_len": 160,
            "kv_cache_memory_bytes": 64 << 20,
        }
        | LORA
    }
    longest = 159
    effort = 0.1
    patience = 900.0

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _given(cls, make_tiny, tmp_path_factory):
        cls.model = make_tiny("Llama", vocab_size=256 + 64)
        folder = tmp_path_factory.mktemp("adapters")
        cls.adapters = {
            name: write_adapter(cls.model, folder / name, seed) for seed, name in enumerate("ab")
        }
