"""State that cannot be cut: whole snapshots of it, for recurrent and hybrid models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from genlm.core import Adapter, Query
from genlm.hf.costs import COSTS, Costs
from genlm.hf.reuse import ReuseMode
from genlm.hf.runner import Runner
from tests.engines import add_lora, rows_of

from .families import small_family
from .models import draw, proven, sweep, unproven
from .shapes import LFM2, MAMBA, MAMBA_BYTES


@pytest.fixture(params=[MAMBA, LFM2], ids=["mamba", "lfm2"])
def model(request: pytest.FixtureRequest) -> Any:
    return proven(request.param)


def further(model: Any, contexts: int, tokens: int) -> list[int]:
    """The expected forwards if some contexts are extended by some tokens: one forward, or one for
    each token."""
    if model.engine.reuse is ReuseMode.SNAPSHOTS:
        return [contexts * tokens]
    return [contexts] * tokens


def test_an_extension_costs_its_tokens(model: Any) -> None:
    prompts = draw(3, 40)
    model.ask(*prompts)
    model.forwards.clear()
    for token in range(3):
        prompts = [(*prompt, token) for prompt in prompts]
        model.check(*prompts)
    assert model.forwards == [3, 3, 3]
    model.check((*prompts[1], 1, 2))
    assert model.forwards[3:] == further(model, 1, 2)
    model.forwards.clear()
    model.check((*prompts[1], *range(20)))
    assert model.forwards == ([63] if model.engine.reuse is ReuseMode.STEPWISE else [20])


def test_common_prefix_of_several_contexts_is_computed_once(model: Any) -> None:
    prompt, scored = draw(2, 40)
    (other,) = draw(1, 60, seed=1)
    model.check(*[(*prompt, token) for token in range(8)])
    assert model.forwards == [40, 8]
    model.check(*[(*prompt, token, 5) for token in range(20, 28)])
    # They start from the prompt, which was not itself requested.
    assert model.forwards[2:] == further(model, 8, 2)
    model.forwards.clear()
    model.check_scores(*((scored, (token, 2, 3)) for token in range(4)))
    # In each of them, the row of the prompt's last token is read.
    assert model.forwards == [39, *further(model, 4, 3)]
    model.forwards.clear()
    model.check(other, (*other, 1, 2, 3), (*other, 1, 2), (*other, 1), (*prompt, 20, 5, 7))
    # The prompt is itself requested; rows on the way to the longest context are read there.
    assert sorted(model.forwards) == sorted([1, 60, *further(model, 1, 3)])


def test_step_has_room_for_contexts_with_a_common_prefix() -> None:
    model = proven(LFM2, max_batch_tokens=100)
    (prompt,) = draw(1, 60)
    model.check(*[(*prompt, token) for token in range(30)])
    assert model.forwards == [60, 30]


def test_row_of_a_prefix_is_read_while_computing_the_longer_context(model: Any) -> None:
    (text,) = draw(1, 40)
    model.check(*[text[:length] for length in range(1, 41)])
    assert model.forwards == [40]
    model.forwards.clear()
    model.check((*text[:20], 5), (*text[:32], 5))  # these contexts have no snapshots
    model.check(*[(*text, 1, 2, 3, 4)[:length] for length in (40, 41, 43, 44)])


def test_long_route_is_divided_if_a_forward_is_cheaper(model: Any) -> None:
    (text,) = draw(1, 80)
    model.check(text, text[:40])
    if model.engine.reuse is ReuseMode.STEPWISE:  # then it is computed whole in any case
        assert model.forwards == [40, 80]
    else:
        assert model.forwards == [40, 40]
    model.forwards.clear()
    model.check((*text[:40], 5))
    assert model.forwards == [1]


@pytest.mark.parametrize("costs", [COSTS["cpu"], Costs()], ids=["on a CPU", "elsewhere"])
def test_drafts_of_particles_are_not_computed_again(
    costs: Costs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each goes on from another place of its draft. Nothing is computed again for ever."""
    monkeypatch.setitem(COSTS, "cpu", costs)
    model = proven(LFM2)
    particles = draw(16, 20)
    for step in range(8):
        drafts = draw(16, 4, seed=step)
        model.forwards.clear()
        (model.check if step > 5 else model.ask)(
            *[
                (*particle, *draft[:length])
                for particle, draft in zip(particles, drafts, strict=True)
                for length in range(5)
            ]
        )
        if step:
            ideal, place_by_place = 16 * 5, 16 * 5 + 5 * costs.forward
            assert ideal <= sum(model.forwards) <= 2 * place_by_place
        particles = [(*ids, *draft[:2], 9) for ids, draft in zip(particles, drafts, strict=True)]
    assert len(model.forwards) <= 2


def test_fork_of_a_known_context_computes_the_prefix_once_more(model: Any) -> None:
    (prompt,) = draw(1, 60)
    for token in range(4):
        model.check((*prompt, token, 5))
    assert model.forwards == [62, 60, *further(model, 1, 2) * 3]
    model.forwards.clear()
    model.check((*prompt[:50], 5))  # return to an earlier context
    assert model.forwards == [50, 1]


def test_scoring_continuations_one_by_one_reuses_the_context(model: Any) -> None:
    (prompt,) = draw(1, 80)
    for token in range(3):
        model.check_scores((prompt, (token, 2, 3)))
    assert model.forwards == [79, *further(model, 1, 3) * 3]


def test_nested_common_prefixes_are_computed_once(model: Any) -> None:
    first, *questions = draw(4, 40)
    model.check(*[(*first, *one, *end) for one in questions for end in draw(3, 2)])
    assert sum(model.forwards) <= 40 + 3 * 80 + 9 * 2


def test_known_prompt_with_several_questions_is_reused(model: Any) -> None:
    """One question after another behind one prompt, with several answers each."""
    (prompt,), questions = draw(1, 200), draw(4, 5, seed=1)
    for question in questions:
        model.check(*[(*prompt, *question, token) for token in range(6)])
    own = [*further(model, 1, 5), 6]
    assert model.forwards == [205, 6, 200, *own, *own, *own]


def test_short_common_prefix_gets_no_forward_of_its_own(model: Any) -> None:
    first, *others = draw(3, 5)
    model.check(*[(*first, *one, *one) for one in others])
    assert model.forwards == [30]


def test_contexts_are_computed_whole_if_forwards_are_expensive(monkeypatch: Any) -> None:
    monkeypatch.setitem(COSTS, "cpu", Costs())
    model = proven(MAMBA)
    (prompt,) = draw(1, 40)
    model.check(*[(*prompt, token) for token in range(8)])
    model.check(*[(*prompt, token, 5) for token in range(8)])
    model.check(*[(*prompt, token, 5, 6, 7) for token in range(8)])
    assert model.forwards == [328, 8, 352]


def test_prefix_too_large_to_keep_leaves_rows_right(model: Any) -> None:
    model = proven(model.engine.model.config, kv_cache_bytes=1)
    (prompt,) = draw(1, 40)
    for _ in range(2):
        model.check(prompt, *[(*prompt, token) for token in range(8)])


def test_requested_prefix_is_not_computed_twice() -> None:
    model = proven(LFM2)
    first, known, asked = draw(3, 50)
    model.ask((*first, *known))
    model.forwards.clear()
    model.check((*first, *asked), (*first, *asked, 1, 2, 3))
    assert model.forwards == [50, 50, 3]


def test_chunks_do_not_evict_snapshots_that_others_extend() -> None:
    model = proven(LFM2, max_batch_tokens=100, kv_cache_bytes=1 << 18)
    (long,) = draw(1, 800, seed=1)
    others = draw(8, 20)
    for other in others:
        model.ask(other)
    model.ask(long)
    model.forwards.clear()
    model.check(*[(*other, 1) for other in others])
    assert model.forwards == [8]


def test_fork_leaves_its_parent_unchanged(model: Any) -> None:
    parent, other = draw(2, 20)
    model.ask(parent, other)
    model.forwards.clear()
    for token in range(0, 9, 3):
        model.check((*parent, token), (*other, token), (*parent, token + 1), (*parent, token + 2))
    assert model.forwards == [4] * 3


def test_contexts_of_unequal_length_are_extended_together(model: Any) -> None:
    """Contexts also come, leave, fork, and remain alone after the longest has left."""
    contexts = [one[: 20 + 7 * at] for at, one in enumerate(draw(5, 60))]
    model.ask(*contexts)
    for step, some in enumerate([range(5), (4, 0, 2), (1, 3), (0,), (0, 0, 4)]):
        model.forwards.clear()
        contexts = [(*one, step) if at in some else one for at, one in enumerate(contexts)]
        forks = [(*contexts[at][:-1], 50 + n) for n, at in enumerate(some[:2])]
        model.check(*{contexts[at]: None for at in some}, *forks)
        assert model.forwards == [len({*some}) + len(forks)]
    model.forwards.clear()
    model.check(*[(*contexts[at], 1, 2) for at in (4, 1, 2)])
    if model.engine.reuse is ReuseMode.SNAPSHOTS:
        assert model.forwards == [6]


def test_much_longer_context_runs_separately(model: Any) -> None:
    (first, second), (long,) = draw(2, 20), draw(1, 250)
    model.ask(first, second[:10], long)
    model.forwards.clear()
    model.check((*first, 1), (*second[:10], 1), (*long, 1))
    assert model.forwards == [2, 1]


def test_contexts_run_by_equal_length_if_ragged_rows_are_wrong(monkeypatch: Any) -> None:
    def shifted(self: Runner, cache: Any, start: int, *given: Any) -> Any:
        *given, empty = given if len(given) == 4 else (*given, ())
        return stateful(self, cache, start, *given, [each // 2 for each in empty])

    stateful = Runner.stateful
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "stateful", shifted)
        model = unproven(LFM2)
    first, second = draw(2, 20)
    model.ask(first, second[:15])
    model.forwards.clear()
    model.check((*first, 1), (*second[:15], 1))
    assert model.forwards == [1, 1]


@pytest.mark.any_version
def test_model_with_windows_and_convolutions_keeps_snapshots() -> None:
    found = sweep("inkling_text")  # the cache of each window holds its length, which has no rows
    assert (found.outcome, found.reuse, found.why) == ("right", "snapshots", "")


def test_window_snapshot_holds_only_its_own_memory() -> None:
    # Each snapshot has 50,944 bytes.
    pair = unproven(small_family("inkling_text", 20), kv_cache_bytes=160_000)
    prompts = [tuple(token % 50 for token in prompt) for prompt in draw(3, 300)]
    for prompt in prompts:
        pair.check(prompt)
    pair.forwards.clear()
    pair.check(*[(*prompt, 1) for prompt in prompts])
    assert pair.forwards == [3]


def test_rows_of_different_forwards_are_extended_together(model: Any) -> None:
    first, second, third = draw(3, 20)
    model.ask(first)
    model.ask(second[:19])
    model.ask(second, third)
    model.forwards.clear()
    model.check((*third, 1), (*first, 1), (*second, 1))
    assert model.forwards == [3]


def test_scores_of_continuations(model: Any) -> None:
    (context,) = draw(1, 40)
    model.ask(context[:-1])
    model.forwards.clear()
    model.check_scores(*((context, tail) for tail in ((1, 2), (1, 3), (4,), range(9))))
    at_once = [2, 9]  # one continuation begins with two of the others
    stepwise = [1, 1, 48]  # two tokens one at a time; a whole
    expected = stepwise if model.engine.reuse is ReuseMode.STEPWISE else at_once
    assert sorted(model.forwards) == expected


def test_scores_of_candidates_with_a_common_prefix_share_it(model: Any) -> None:
    (context,), (common,) = draw(1, 40), draw(1, 30, seed=1)
    model.ask(context[:-1])
    model.forwards.clear()
    model.check_scores(*((context, (*common[: 30 - at], at, 7)) for at in range(6)))
    # the start from which each would be computed
    start = 0 if model.engine.reuse is ReuseMode.STEPWISE else 39
    assert sum(model.forwards) < 0.6 * sum(71 - at - start for at in range(6))


def test_least_recently_used_is_evicted_first() -> None:
    model = proven(MAMBA, kv_cache_bytes=3 * MAMBA_BYTES)
    first, second, third = draw(3, 20)
    for prompt in (first, second, third):
        model.ask(prompt)
    model.ask((*first, 1))  # this evicts the second context
    model.forwards.clear()
    model.check((*first, 2))  # this evicts the third context
    model.check((*second, 1))
    assert model.forwards == [1, 21]


def test_lack_of_memory_shrinks_forwards(model: Any) -> None:
    pinned, *prompts = draw(5, 20)
    model.engine.genlm_cache_prefix(Query(pinned))
    model.ask(*prompts)

    def refuse(module: torch.nn.Module, args: object, kwargs: dict[str, torch.Tensor]) -> None:
        if len(kwargs["input_ids"]) > 2:
            raise torch.OutOfMemoryError("out of memory")

    hook = model.engine.model.register_forward_pre_hook(refuse, with_kwargs=True)
    model.forwards.clear()
    # State is dropped, and rows are computed again in halves.
    model.check(*[(*prompt, 1) for prompt in prompts])
    assert model.forwards[-2:] == [42, 42]
    hook.remove()
    model.forwards.clear()
    model.check((*pinned, 1), *[(*prompt, 1, 2) for prompt in prompts])
    assert model.forwards == [5]


def test_adapters_do_not_share_snapshots(model: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="LoRA needs peft")
    prompt = draw(1, 20)[0]
    adapted = peft.get_peft_model(model.reference, peft.LoraConfig(r=4, target_modules=["in_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, 0, 0.3)
    adapted.eval().save_pretrained(tmp_path)
    adapter = Adapter("a", str(tmp_path), 1)
    add_lora(model.engine, adapter)
    grown = prompt
    for token in range(3):
        given = rows_of(model.engine, [Query(grown, adapter), Query(grown)])
        torch.testing.assert_close(given[:1], model.expected(grown), atol=1e-4, rtol=0)
        with adapted.disable_adapter():
            torch.testing.assert_close(given[1:], model.expected(grown), atol=1e-4, rtol=0)
        grown = (*grown, token)
    assert model.forwards[-2:] == [2, 2]
    model.forwards.clear()
    model.engine.genlm_remove_lora(adapter)
    with adapted.disable_adapter():
        model.check(grown)
    # Only the states that shared a forward with the base model are forgotten.
    assert model.forwards == [1]
