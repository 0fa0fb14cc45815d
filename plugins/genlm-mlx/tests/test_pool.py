"""How much the pool computes and keeps: the positions of each forward pass, and bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from genlm.mlx.adapters import Adapters
from genlm.mlx.loading import load
from genlm.mlx.pool import Pool
from genlm.mlx.runner import Runner

from .watched import Key, Watched, keys_of


class Tried:
    """A pool over a tiny model."""

    def __init__(self, folder: Path, max_bytes: int | None = None) -> None:
        model = load(str(folder), {}).model
        self.model = Watched(model)
        self._runner = Runner(model, Adapters(model), 2048)
        self.pool = Pool(Runner(self.model, Adapters(model), 2048), max_bytes)

    def ask(self, *keys: Key) -> list[int]:
        """The positions of each forward pass that the rows of ``keys`` took; they are those of the
        keys alone."""
        self.model.forwards.clear()
        logits = self.pool.logits(keys)
        alone = mx.concatenate([self._runner.cold(key) for key in keys])
        assert mx.abs(logits - alone).max().item() < 1e-3
        return list(self.model.forwards)


@pytest.fixture
def llama(folders: Callable[[str], Path]) -> Tried:
    return Tried(folders("llama"))


def test_a_step_costs_one_token_per_context(llama: Tried) -> None:
    keys = keys_of(6, 20)
    assert llama.ask(*keys) == [6 * 19, 6]
    for token in range(5):
        keys = [(*key, token) for key in keys]
        assert llama.ask(*keys) == [6]


def test_what_is_known_is_not_computed_again(llama: Tried) -> None:
    keys = keys_of(4, 20)
    llama.ask(*keys)
    assert llama.ask(*reversed(keys[1:])) == []


def test_forks_continue_from_their_parent_and_the_others_stay_known(llama: Tried) -> None:
    keys = keys_of(8, 20)
    llama.ask(*keys)
    for token in range(3):
        forked = [(*key, token + branch) for key in keys[:4] for branch in (0, 100)]
        assert llama.ask(*forked) == [8]
        assert llama.ask(*[(*key, token) for key in keys[4:]]) == [4]
        keys = forked


def test_contexts_may_go_on_one_by_one(llama: Tried) -> None:
    keys = keys_of(8, 20)
    llama.ask(*keys)
    whole = llama.pool.nbytes
    for key in keys:
        assert llama.ask((*key, 1)) == [1]
    assert len(llama.pool) == 8
    assert llama.ask(*[(*key, 1, 2) for key in keys]) == [8]
    assert llama.pool.nbytes < 3 * whole


def test_a_block_that_nearly_all_have_left_is_cut_down(llama: Tried) -> None:
    first, *others = keys_of(8, 20)
    llama.ask(first, *others)
    whole = llama.pool.nbytes
    llama.ask(*[(*key, 1) for key in others])
    assert llama.pool.nbytes < 1.5 * whole
    assert llama.ask((*first, 1)) == [1]


def test_ragged_growth_is_at_most_half_padding(llama: Tried) -> None:
    keys = keys_of(12, 20)
    llama.ask(*keys)
    grown = [(*key, *range(1 + at % 5), *range(40 * (at == 11))) for at, key in enumerate(keys)]
    forwards = llama.ask(*grown)
    assert sum(forwards) <= 2 * (sum(map(len, grown)) - sum(map(len, keys)))


def test_a_newcomer_costs_its_own_tokens(llama: Tried) -> None:
    *keys, newcomer = keys_of(5, 20)
    llama.ask(*keys)
    assert llama.ask(*[(*key, 1) for key in keys], newcomer) == [19, 5]


def test_alternating_groups_keep_their_state(llama: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genlm.mlx.aside.LEAST_ASIDE", 0)
    groups = [keys_of(4, length, seed=length) for length in (70, 100)]
    for group in groups:
        llama.ask(*group)
    for token in range(3):
        groups = [[(*key, token) for key in group] for group in groups]
        for group in groups:
            assert llama.ask(*group) == [4]


def test_a_lone_context_takes_the_place_of_no_group(
    llama: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genlm.mlx.aside.LEAST_ASIDE", 0)
    keys, lone = keys_of(8, 70), keys_of(3, 5, seed=1)
    llama.ask(*keys)
    for token, other in enumerate(lone):
        llama.ask(other)
        keys = [(*key, token) for key in keys]
        assert llama.ask(*keys) == [8]


def test_contexts_of_one_prompt_share_its_prefill(llama: Tried) -> None:
    (prompt,) = keys_of(1, 40)
    assert llama.ask(*[(*prompt, token) for token in range(8)]) == [39, 1, 8]


def test_many_short_rows_go_in_few_chunks(folders: Callable[[str], Path]) -> None:
    """700 rows of 2 to 4 tokens before the last, in a rotating cache: three take a chunk of
    three, not of two and one, which mlx-lm refuses."""
    tried = Tried(folders("gemma3"))
    keys = list(dict.fromkeys(key[: 4 + at % 3] for at, key in enumerate(keys_of(700, 6))))
    assert len(tried.ask(*keys)) == 3
    assert len(tried.ask(*[(*key, 1, 2, 3, *range(at % 2)) for at, key in enumerate(keys)])) <= 3


def test_a_long_prompt_is_shared_within_a_longer_one(llama: Tried) -> None:
    (prompt,), branches = keys_of(1, 40), keys_of(2, 30, seed=5)
    contexts = [(*prompt, *branch[1:], token) for branch in branches for token in (1, 2)]
    assert sum(llama.ask(*contexts)) == 40 + 2 * 30 + 4


def test_a_shorter_context_is_trimmed_from_a_longer_one(llama: Tried) -> None:
    (prompt,) = keys_of(1, 40)
    llama.ask(prompt)
    assert llama.ask(prompt[:30]) == [1]
    assert llama.ask((*prompt[:25], 7)) == [1]
    assert llama.ask((*prompt, 1)) == [1]


def test_rows_are_right_and_bytes_bounded_under_any_budget(folders: Callable[[str], Path]) -> None:
    for rows in (0, 2, 5):
        tried = Tried(folders("llama"), max_bytes=rows * 20_000)
        keys = keys_of(6, 20)
        for token in range(6):
            tried.ask(*keys, *keys_of(1, 20, seed=token + 1))
            row = tried.pool.nbytes / len(tried.pool)  # they have about one length
            assert tried.pool.nbytes <= 1.5 * 7 * row + rows * 20_000
            keys = [(*keys[token], 99), *[(*key, token) for key in keys[:-1]]]


def test_a_fork_evicts_no_block_that_it_needs(folders: Callable[[str], Path]) -> None:
    groups = [keys_of(4, 20, seed) for seed in (1, 2, 3)]
    sized = Tried(folders("llama"))
    sized.ask(*groups[0])
    tried = Tried(folders("llama"), max_bytes=2 * sized.pool.nbytes)
    for group in groups:
        tried.ask(*group)
    assert len(tried.pool) == 12
    forked = [(*key, token) for group in groups[:2] for key in group[:2] for token in (1, 2)]
    assert tried.ask(*forked) == [8]
    assert tried.pool.nbytes <= 4 * sized.pool.nbytes  # what was forked, and two blocks aside


def test_a_failed_forward_pass_leaves_the_pool_sound(llama: Tried) -> None:
    keys = keys_of(6, 20)
    llama.ask(*keys)
    llama.model.failing = True
    for some in (keys, keys[:3]):
        with pytest.raises(RuntimeError, match="failed"):
            llama.pool.logits([(*key, 1) for key in some])
    llama.model.failing = False
    llama.ask(*[(*key, 1) for key in keys], (0, 1, 2, 3))
    assert llama.ask(*[(*key, 1, 2) for key in keys]) == [6]
