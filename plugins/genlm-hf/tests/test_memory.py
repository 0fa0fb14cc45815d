"""What happens when the device's memory runs out."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from genlm.core import EngineError, Query
from genlm.hf import budget as budget_module
from genlm.hf import engine as engine_module
from genlm.hf import strategies
from genlm.hf.pool import PoolLayer, RowPool
from genlm.hf.strategies import Computed
from genlm.hf.table import PoolTable
from genlm.kit.kv.commands import Command, Join
from genlm.kit.kv.sharing import Worth

Contexts = Callable[..., list[tuple[int, ...]]]
Make = Callable[..., Any]


#: As PyTorch says it on a CPU, where it has no kind of its own for this.
ON_CPU = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes")


@contextmanager
def memory_for(model: Any, tokens: int, error: Exception | None = None) -> Iterator[None]:
    """Forwards of more tokens than this run out of memory."""

    def refuse(
        module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, torch.Tensor]
    ) -> None:
        if kwargs["input_ids"].numel() > tokens:
            raise error or torch.OutOfMemoryError("out of memory")

    hook = model.engine.model.register_forward_pre_hook(refuse, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@pytest.mark.parametrize("tokens", [25, 45])
def test_a_batch_is_split_until_it_fits(llama: Any, contexts: Contexts, tokens: int) -> None:
    prompts = contexts(7, 20)
    with memory_for(llama, tokens):
        llama.check(*prompts)
        llama.check(*[(*prompt, 1) for prompt in prompts])


def test_memory_of_a_cpu_runs_out(llama: Any, contexts: Contexts) -> None:
    prompts = contexts(7, 20)
    with memory_for(llama, 45, ON_CPU):
        llama.check(*prompts)
        with pytest.raises(
            EngineError, match=r"a context of 60 tokens does not fit .* lower max_b"
        ):
            llama.ask(*contexts(1, 60))
    with memory_for(llama, 25, RuntimeError("another")), pytest.raises(RuntimeError, match="anoth"):
        llama.ask(*contexts(1, 60))


def test_state_takes_a_quarter_of_what_the_machine_can_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu, said = torch.device("cpu"), tmp_path / "meminfo"
    monkeypatch.setattr(budget_module, "Path", lambda _: said)
    pages = {"SC_AVPHYS_PAGES": 1 << 18, "SC_PAGE_SIZE": 1 << 12}
    monkeypatch.setattr(budget_module.os, "sysconf", pages.__getitem__)
    assert budget_module.budget(None, cpu) == 1 << 28  # as macOS says it
    for kib, bytes_ in ((1 << 20, 1 << 28), (1 << 30, 1 << 32)):  # 4 GiB at most
        said.write_text(f"MemTotal: {2 * kib} kB\nMemFree: 9 kB\nMemAvailable: {kib} kB\n")
        assert budget_module.budget(None, cpu) == bytes_
    assert budget_module.budget(7, cpu) == 7


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


@contextmanager
def out_of_memory_at(kind: type, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """The next command of a kind fails."""
    real, failed = PoolTable.do, []

    def fail(table: PoolTable, command: Command) -> None:
        if isinstance(command, kind) and not failed:
            failed.append(True)
            raise torch.OutOfMemoryError("out of memory")
        real(table, command)

    with patch.context() as patched:
        patched.setattr(PoolTable, "do", fail)
        yield
    assert failed


def assert_nothing_stays(model: Any) -> None:
    """What no context needs can be dropped: nothing is held for a sequence that failed."""
    store = model.engine._strategy.planner
    store.tree.check_integrity()
    store.drop_unpinned()
    store.tree.check_integrity()
    assert store.tree.positions == 0


def test_rows_that_cannot_be_normalised_leave_nothing_behind(
    llama: Any, contexts: Contexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is kept, as a user's program may do, until others have the memory."""
    kept, *others = contexts(9, 20)
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


@pytest.mark.parametrize(("owner", "name"), [(RowPool, "fork"), (PoolLayer, "shift")])
def test_out_of_memory_while_rows_are_copied(
    pair: Make,
    llama_config: Make,
    contexts: Contexts,
    monkeypatch: pytest.MonkeyPatch,
    owner: object,
    name: str,
) -> None:
    monkeypatch.setattr(strategies, "WORTH", Worth(sharing=16 if name == "shift" else 1024))
    llama = pair(llama_config())
    (prompt,) = contexts(1, 40)
    llama.check(prompt[:20])
    llama.check(prompt)
    with out_of_memory_once(owner, name, monkeypatch):
        llama.check(*((*prompt[:30], at) for at in range(3)))
    llama.check((*prompt, 1), *((*prompt[:30], at, 1) for at in range(3)))
    assert_nothing_stays(llama)


def test_out_of_memory_while_trunks_are_merged(
    pair: Make,
    llama_config: Make,
    contexts: Contexts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(strategies, "WORTH", Worth(trunk=32))
    model = pair(llama_config())
    (prompt,) = contexts(1, 160)
    model.check(prompt[:80])
    model.check((7, 7, 7))
    with out_of_memory_at(Join, monkeypatch):
        model.check(prompt, (7, 7, 7, 8), (9, 9))
        model.check((*prompt, 1), (7, 7, 7, 8, 9), (9, 9, 9))
    model.check((*prompt, 2), (7, 7, 7, 9), (9, 9, 8))
    assert_nothing_stays(model)


def test_state_that_is_no_number_reaches_no_other_context(llama: Any) -> None:
    """A masked column still takes part in a product: what is left in memory must be finite."""
    bad, tokens = 200, list(range(8))
    for model in (llama.engine.model, llama.reference):
        with torch.no_grad():
            model.get_input_embeddings().weight[bad] = float("inf")
    assert llama.ask(*((at, bad, *[at] * 20) for at in tokens)).isnan().all()
    llama.check((1, 2), (3,) * 12)  # beside a longer one
    for length in range(3, 8):
        llama.check(*((50 + at,) * (length + 2 * at % 7) for at in tokens))
    row, *_ = llama.ask((0, bad, *[0] * 21), (5, 6, 7))
    assert row.isnan().all()
    llama.check((0,), (5, 6, 7, 8))


def test_no_step_waits_to_see_whether_its_rows_are_numbers(
    llama: Any, contexts: Contexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device, a look waits for what is computed there."""
    events: list[str] = []
    look = Computed.broken
    monkeypatch.setattr(Computed, "broken", lambda self: events.append("look") or look(self))
    llama.engine.model.register_forward_pre_hook(lambda *_: events.append("forward"))
    live = [*contexts(3, 20)]
    for step in range(4):
        llama.ask(*live)
        assert events == ["look", "forward"][step == 0 :]
        events.clear()
        live = [(*context, step) for context in live]


def test_state_that_is_no_number_is_not_kept_where_a_later_forward_fails(
    pair: Make, llama_config: Make
) -> None:
    model, bad = pair(llama_config(), max_batch_tokens=16), 200
    for one in (model.engine.model, model.reference):
        with torch.no_grad():
            one.get_input_embeddings().weight[bad] = float("inf")
    forwards = itertools.count()

    def fail(*_: Any) -> None:
        if next(forwards) == 1:
            raise KeyboardInterrupt

    hook = model.engine.model.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model.ask((1, 2, 3, bad, *range(20)))
    hook.remove()
    model.check((1, 2, 3, 4), (5,) * 30, (1, 2))


def test_scores_that_fail_spoil_no_context_that_they_went_on_from(
    llama: Any, contexts: Contexts
) -> None:
    """They compute positions again that are known, for their rows."""
    whole, other = contexts(2, 40)
    llama.check(other)  # the lengths that are compared with cold rows
    llama.check(whole[:30])

    def fail(*_: object) -> None:
        raise RuntimeError("a kernel failed")

    hook = llama.engine.model.get_output_embeddings().register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        llama.engine.genlm_sequence_logprobs([Query(whole[:20])], [whole[20:]])
    hook.remove()
    llama.check((*whole[:30], 1))


def test_a_pool_that_cannot_grow_is_emptied(
    llama: Any, contexts: Contexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, *others = contexts(9, 20)
    llama.engine.genlm_cache_prefix(Query(prompt))
    resize, layers = PoolLayer.resize, itertools.count()

    def refuse(layer: PoolLayer, rows: int, columns: int, kept: Sequence[int]) -> None:
        if rows > 4 and next(layers) % 2:  # the first layer has been moved already
            raise torch.OutOfMemoryError("out of memory")
        resize(layer, rows, columns, kept)

    monkeypatch.setattr(PoolLayer, "resize", refuse)
    with capture_logs() as events:
        llama.check(*others, (*prompt, 1))
    assert {
        "event": "kv.lost",
        "log_level": "warning",
        "rows": 1,
        "pinned": 1,
        "reason": "OutOfMemoryError: out of memory",
    } in events
    llama.check(prompt, (*prompt, 1, 2), *[(*other, 1) for other in others])


def test_one_that_cannot_fit_says_so(llama: Any, contexts: Contexts) -> None:
    with memory_for(llama, 45), pytest.raises(EngineError, match="50 tokens does not fit"):
        llama.ask(*contexts(1, 50))
    llama.check(*contexts(1, 50))


def test_one_that_fits_once_the_others_are_dropped(llama: Any, contexts: Contexts) -> None:
    *others, prompt = contexts(4, 20)
    llama.ask(*others)
    failures = iter([True])

    def refuse(module: torch.nn.Module, args: object) -> None:
        if next(failures, False):
            raise torch.OutOfMemoryError("out of memory")

    llama.engine.model.register_forward_pre_hook(refuse)
    llama.check(prompt)
    llama.forwards.clear()
    llama.check((*others[0], 1))
    assert llama.forwards == [21]


def test_rows_given_before_it_ran_out_are_not_asked_for_again(
    pair: Make, llama_config: Make
) -> None:
    model = pair(llama_config(), max_batch_tokens=32)
    context, continuation = tuple(range(10)), tuple(range(60))
    forwards = itertools.count()

    def refuse(module: torch.nn.Module, args: object) -> None:
        if next(forwards) == 1:
            raise torch.OutOfMemoryError("out of memory")

    model.engine.model.register_forward_pre_hook(refuse)
    (scores,) = model.engine.genlm_sequence_logprobs([Query(context)], [continuation])
    rows = model.expected(*[context + continuation[:n] for n in range(len(continuation))])
    torch.testing.assert_close(
        scores, rows.gather(1, torch.tensor(continuation)[:, None])[:, 0], atol=1e-4, rtol=0
    )
