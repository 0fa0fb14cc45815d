"""The device's memory runs out."""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from genlm.core import EngineError, Query
from genlm.hf import budget as budget_module
from genlm.hf import engine as engine_module
from genlm.hf import pool as pool_module
from genlm.hf import strategies
from genlm.hf.attention import SLOT_ATTENTION
from genlm.hf.engine import HFEngine
from genlm.hf.pool import SlotPool
from genlm.hf.reuse import Choice, ReuseMode
from genlm.hf.slabs import Part, Slab
from genlm.hf.strategies import Computed
from genlm.hf.table import PoolTable
from genlm.kit import memory as kit_memory
from genlm.kit.kv.commands import Command, Join
from genlm.kit.kv.sharing import SharingCosts

from .families import small_family
from .models import beside, build, draw, llama_config, proven

pytestmark = pytest.mark.any_version

#: PyTorch's message on a CPU, for which it has no class of error.
ON_CPU = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes")


@contextmanager
def failing(
    module: torch.nn.Module, fails: Callable[[int], bool], error: BaseException | None = None
) -> Iterator[None]:
    """Inside the block, calls of a module run out of memory if ``fails`` is true for their number
    of tokens."""

    forward = module.forward

    @functools.wraps(forward)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        given = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        if fails(given.numel()):
            raise error or torch.OutOfMemoryError("out of memory")
        return forward(*args, **kwargs)

    with of_another_class(module, refuse):
        yield


@contextmanager
def of_another_class(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside the block, the class of a module has this forward. A hook, or a forward that is set on
    the module, would be noticed and tried first."""
    kind = type(module)

    def of_class(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    functools.update_wrapper(of_class, kind.forward)
    module.__class__ = type(kind.__name__, (kind,), {"forward": of_class})
    try:
        yield
    finally:
        module.__class__ = kind


def memory_for(
    model: Any, tokens: int, error: BaseException | None = None
) -> AbstractContextManager[None]:
    """Forwards of more tokens than this run out of memory."""
    return failing(model.engine.model, lambda given: given > tokens, error)


def only(which: int) -> Callable[[int], bool]:
    """True for one call, by its number."""
    calls = itertools.count()
    return lambda _: next(calls) == which


@pytest.mark.parametrize("tokens", [25, 45])
def test_a_batch_is_split_until_it_fits(llama: Any, tokens: int) -> None:
    prompts = draw(7, 20)
    with memory_for(llama, tokens):
        llama.check(*prompts)
        llama.check(*[(*prompt, 1) for prompt in prompts])


def test_memory_of_a_cpu_runs_out(llama: Any) -> None:
    prompts = draw(7, 20)
    with memory_for(llama, 45, ON_CPU):
        llama.check(*prompts)
        with pytest.raises(
            EngineError, match=r"a context of 60 tokens does not fit .* lower max_b"
        ):
            llama.ask(*draw(1, 60))
    with memory_for(llama, 25, RuntimeError("another")), pytest.raises(RuntimeError, match="anoth"):
        llama.ask(*draw(1, 60))
    llama.check(*draw(1, 60))


def test_default_budget_is_a_quarter_of_available_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu, said = torch.device("cpu"), tmp_path / "meminfo"
    monkeypatch.setattr(kit_memory, "Path", lambda _: said)
    pages = {"SC_AVPHYS_PAGES": 1 << 18, "SC_PAGE_SIZE": 1 << 12}
    monkeypatch.setattr(kit_memory.os, "sysconf", pages.__getitem__)
    assert budget_module.budget(None, cpu) == 1 << 28  # macOS reports memory this way
    for kib, bytes_ in ((1 << 20, 1 << 28), (1 << 30, 1 << 32)):  # 4 GiB at most
        said.write_text(f"MemTotal: {2 * kib} kB\nMemFree: 9 kB\nMemAvailable: {kib} kB\n")
        assert budget_module.budget(None, cpu) == bytes_
    assert budget_module.budget(7, cpu) == 7


@pytest.mark.parametrize("family", ["deepseek_v3", "nemotron"])
def test_rejected_reuse_modes_leave_the_pool_budget_unchanged(family: str) -> None:
    """These families reject the first reuse mode and, one of them, also the second."""
    pool = HFEngine(small_family(family, 2000), None)._runner.pool
    pool.resize(1, 1)
    assert pool.bytes_per_column == sum(slab.states.nbytes for slab in pool.slot(0).slabs)


@contextmanager
def out_of_memory_once(owner: object, name: str, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """The next call fails."""
    real, failed = getattr(owner, name), []

    def fail(*arguments: Any) -> Any:
        if not failed:
            failed.append(True)
            raise torch.OutOfMemoryError("out of memory")
        return real(*arguments)

    with patch.context() as patched:
        patched.setattr(owner, name, fail)
        yield
    assert failed


def assert_nothing_stays(model: Any) -> None:
    """Check that all unpinned state can be dropped, so that nothing is held for a failed
    sequence."""
    store = model.engine._strategy.planner
    store.tree.check_integrity()
    store.drop_unpinned()
    store.tree.check_integrity()
    assert store.tree.positions == 0


def test_failed_normalisation_releases_its_memory(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is kept, as a user's program may do, until others have the memory."""
    kept, *others = draw(9, 20)
    with (
        out_of_memory_once(engine_module, "logprobs", monkeypatch),
        pytest.raises(torch.OutOfMemoryError) as error,
    ):
        llama.ask(kept)
    llama.engine.genlm_clear_kv_cache()
    llama.check(*others)
    del error
    gc.collect()
    llama.check((1, 2, 3), *((*other, 1) for other in others))
    llama.check((4, 5, 6))
    assert_nothing_stays(llama)


@pytest.mark.parametrize(("owner", "name"), [(SlotPool, "fork"), (Slab, "shift")])
def test_out_of_memory_while_slots_are_copied(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str
) -> None:
    monkeypatch.setattr(
        strategies, "SHARING_COSTS", SharingCosts(sharing=16 if name == "shift" else 1024)
    )
    llama = proven(llama_config())
    (prompt,) = draw(1, 40)
    llama.check(prompt[:20])
    llama.check(prompt)
    with out_of_memory_once(owner, name, monkeypatch):
        llama.check(*((*prompt[:30], at) for at in range(3)))
    llama.check((*prompt, 1), *((*prompt[:30], at, 1) for at in range(3)))
    assert_nothing_stays(llama)


@pytest.mark.parametrize("fails", [False, True], ids=["there is room", "out of memory"])
def test_trunks_are_merged(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "SHARING_COSTS", SharingCosts(trunk=32))
    real, merged = PoolTable.do, []

    def do(table: PoolTable, command: Command) -> None:
        if isinstance(command, Join):
            merged.append(command)
            if fails and len(merged) == 1:
                raise torch.OutOfMemoryError("out of memory")
        real(table, command)

    monkeypatch.setattr(PoolTable, "do", do)
    model = proven(llama_config())
    merged.clear()
    (prompt,) = draw(1, 160)
    model.check(prompt[:80])
    model.check((7, 7, 7))
    model.check(prompt, (7, 7, 7, 8), (9, 9))
    model.check((*prompt, 1), (7, 7, 7, 8, 9), (9, 9, 9))
    assert merged
    model.check((*prompt, 2), (7, 7, 7, 9), (9, 9, 8))
    assert_nothing_stays(model)


#: A token whose state is NaN.
NAN_TOKEN = 200


def damage(model: Any) -> None:
    damage_one(model.engine.model)
    damage_one(model.reference)


@torch.no_grad()
def damage_one(model: Any) -> None:
    model.get_input_embeddings().weight[NAN_TOKEN] = float("inf")


def only_way(reuse: ReuseMode) -> Callable[..., Choice]:
    """A probe that has rejected all modes better than this one."""

    def choose(model: Any, *_: Any) -> Choice:
        if reuse in (ReuseMode.SHARED, ReuseMode.PACKED):
            model.set_attn_implementation(SLOT_ATTENTION)
        return Choice(reuse, 5e-4, None, False)

    return choose


def test_nan_state_reaches_no_other_context(llama: Any) -> None:
    """A masked column still takes part in a product: what is left in memory must be finite."""
    damage(llama)
    tokens = range(8)
    assert all(llama.errors(*((at, NAN_TOKEN, *[at] * 20) for at in tokens)))
    llama.check((1, 2), (3,) * 12)  # together with a longer one
    for length in range(3, 8):
        llama.check(*((50 + at,) * (length + 2 * at % 7) for at in tokens))
    error, right = llama.errors((0, NAN_TOKEN, *[0] * 21), (5, 6, 7))
    assert error
    assert right is None
    llama.check((0,), (5, 6, 7, 8))


@pytest.mark.parametrize("reuse", list(ReuseMode))
def test_nan_token_leaves_shorter_contexts_right(
    reuse: ReuseMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read from one forward, in which masked columns take part in products; so does
    padding."""
    monkeypatch.setattr(engine_module, "choose_reuse", only_way(reuse))
    llama = proven(llama_config())
    damage(llama)
    whole = tuple(range(20))
    spoilt = [(*whole[:at], NAN_TOKEN, *whole[at:]) for at in (12, 15, 20)]
    asked = [*spoilt, whole, whole[:12], whole[:3], (30, 31, 32), (33,) * 30]
    assert [error is None for error in llama.errors(*asked)] == [False] * 3 + [True] * 5
    llama.engine.genlm_clear_kv_cache()
    llama.check(*asked[3:])
    llama.engine.genlm_clear_kv_cache()
    scored = [(whole[:4], each[4:]) for each in (spoilt[0], spoilt[2], whole, whole[:9])]
    assert [isinstance(each, EngineError) for each in llama.scores(scored)] == [True] + [False] * 3


def test_nan_padding_leaves_contexts_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "choose_reuse", only_way(ReuseMode.NONE))
    llama = proven(llama_config())
    for one in (llama.engine.model, llama.reference):
        with torch.no_grad():
            one.get_input_embeddings().weight[0] = float("inf")  # padding uses token 0
    llama.check((1, 2, 3), (4, 5, 6, 7, 8), (9,) * 6)


def test_overflow_error_names_the_type_and_a_wider_one() -> None:
    llama = beside(build(llama_config()).half(), None)
    damage_one(llama.engine.model)
    for _ in range(8):  # also later, when the core no longer checks rows
        (error,) = llama.errors((1, 2, NAN_TOKEN, 3))
        assert "NaN in torch.float16 for the context [1, 2, 200, 3] of 4 tokens" in str(error)
        assert "load it with dtype='bfloat16' or 'float32'" in str(error)
    with pytest.raises(EngineError, match=r"NaN in torch.float16 .* dtype='bfloat16'"):
        llama.engine.genlm_cache_prefix(Query((1, 2, NAN_TOKEN, 3)))
    assert llama.engine.genlm_cache_prefix(Query((1, 2, 3)))


def test_error_of_a_score_names_the_token_and_its_position(llama: Any) -> None:
    damage(llama)
    for tail, token, at in (((3, 4, NAN_TOKEN, 5, 6), 5, 5), ((NAN_TOKEN, 5), 5, 3)):
        (error,) = llama.scores([((1, 2), tail)])
        whole = [1, 2, *tail]
        said = f"for the score of token {token} at position {at} of {whole} of {len(whole)} tokens"
        assert said in str(error)


def test_step_does_not_wait_to_look_for_nan(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device, looking for NaN would wait for the computation."""
    events: list[str] = []
    look = Computed.broken
    monkeypatch.setattr(Computed, "broken", lambda self: events.append("look") or look(self))
    llama.engine.model.register_forward_pre_hook(lambda *_: events.append("forward"))
    live = [*draw(3, 20)]
    for step in range(4):
        llama.ask(*live)
        assert events == ["look", "forward"][step == 0 :]
        events.clear()
        live = [(*context, step) for context in live]


def test_nan_state_is_dropped_when_a_later_forward_fails() -> None:
    model = proven(llama_config(), max_batch_tokens=16)
    damage(model)
    with (
        failing(model.engine.model, only(1), KeyboardInterrupt()),
        pytest.raises(KeyboardInterrupt),
    ):
        model.ask((1, 2, 3, NAN_TOKEN, *range(20)))
    model.check((1, 2, 3, 4), (5,) * 30, (1, 2))


def test_failed_scores_leave_their_contexts_right(llama: Any) -> None:
    """They compute positions again that are known, for their rows."""
    whole, other = draw(2, 40)
    llama.check(other)  # the lengths that are compared with cold rows
    llama.check(whole[:30])
    head = llama.engine.model.get_output_embeddings()
    with (
        failing(head, only(0), RuntimeError("a kernel failed")),
        pytest.raises(RuntimeError, match="a kernel failed"),
    ):
        llama.scores([(whole[:20], whole[20:])])
    llama.check((*whole[:30], 1))


def test_nan_forward_leaves_known_state_right(llama: Any) -> None:
    """It computes known positions again, of a context that is asked again or scored."""
    whole, other = draw(2, 40)
    layer = llama.engine.model.model.layers[0]
    llama.check(other)  # the lengths that are compared with cold rows
    forward, calls = layer.forward, itertools.count()

    def nan_once(*args: Any, **kwargs: Any) -> torch.Tensor:
        given: torch.Tensor = forward(*args, **kwargs)
        return given if next(calls) else torch.full_like(given, float("nan"))

    for again in (
        lambda: llama.errors(whole) != [None],
        # A row that a later token may have made nan is computed again.
        lambda: llama.check_scores((whole[:30], whole[30:])) is None,
    ):
        llama.check(whole)
        calls = itertools.count()
        with of_another_class(layer, nan_once):
            assert again()
        llama.check((*whole, 1), (*whole, 2), (*whole[:35], 3))


def test_a_pool_that_cannot_grow_is_emptied(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, *others = draw(9, 20)
    llama.engine.genlm_cache_prefix(Query(prompt))
    slabs = itertools.count()

    def refuse(parts: Sequence[Part], states: torch.Tensor) -> Slab:
        if states.shape[1] > 4 and next(slabs) % 2:  # the first slab has already been moved
            raise torch.OutOfMemoryError("out of memory")
        return Slab(parts, states)

    monkeypatch.setattr(pool_module, "Slab", refuse)
    with capture_logs() as events:
        llama.check(*others, (*prompt, 1))
    assert {
        "event": "kv.lost",
        "log_level": "warning",
        "slots": 1,
        "pinned": 1,
        "reason": "OutOfMemoryError: out of memory",
    } in events
    llama.check(prompt, (*prompt, 1, 2), *[(*other, 1) for other in others])


@pytest.mark.parametrize("cold", [False, True])
def test_prompt_that_runs_out_of_memory_fits_once_others_are_dropped(
    llama: Any, cold: bool
) -> None:
    *others, prompt = draw(4, 20)
    llama.ask(*others)
    with failing(llama.engine.model, only(0)):
        (answer,) = llama.engine.genlm_step([Query(prompt, cold=cold)], (), llama.engine.vocab_size)
    torch.testing.assert_close(answer.result[None], llama.expected(prompt), atol=1e-4, rtol=0)
    llama.forwards.clear()
    llama.check((*others[0], 1))
    assert llama.forwards == [21]


def test_rows_given_before_memory_ran_out_are_not_computed_again() -> None:
    model = proven(llama_config(), max_batch_tokens=32)
    with failing(model.engine.model, only(1)):
        model.check_scores((range(10), range(60)))
