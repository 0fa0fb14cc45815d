"""How much blocks compute and keep: the tokens of each forward pass, and bytes."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx.utils import tree_map

from genlm.mlx.blocks import WORTHWHILE, Blocks

from .watched import Folders, Tried, engine_of, keys_of


@pytest.fixture
def llama(folders: Folders) -> Tried:
    return Tried(folders("llama"), Blocks)


def test_what_is_known_is_not_computed_again(llama: Tried) -> None:
    keys = keys_of(4, 20)
    llama.ask(*keys)
    assert llama.ask(*reversed(keys[1:])) == []


def test_contexts_may_go_on_one_by_one(llama: Tried) -> None:
    keys = keys_of(8, 20)
    llama.ask(*keys)
    whole = llama.kept.nbytes
    for key in keys:
        assert llama.ask((*key, 1)) == [1]
    assert len(llama.kept) == 8
    assert llama.ask(*[(*key, 1, 2) for key in keys]) == [8]
    assert llama.kept.nbytes < 3 * whole


def test_a_block_that_nearly_all_have_left_is_cut_down(llama: Tried) -> None:
    first, *others = keys_of(8, 20)
    llama.ask(first, *others)
    whole = llama.kept.nbytes
    llama.ask(*[(*key, 1) for key in others])
    assert llama.kept.nbytes < 1.5 * whole
    assert llama.ask((*first, 1)) == [1]


def test_ragged_growth_is_at_most_half_padding(llama: Tried) -> None:
    keys = keys_of(12, 20)
    llama.ask(*keys)
    grown = [(*key, *range(1 + at % 5), *range(40 * (at == 11))) for at, key in enumerate(keys)]
    forwards = llama.ask(*grown)
    assert sum(forwards) <= 2 * (sum(map(len, grown)) - sum(map(len, keys)))


def test_contexts_of_one_prompt_share_its_prefill(llama: Tried) -> None:
    (prompt,) = keys_of(1, 40)
    assert llama.ask(*[(*prompt, token) for token in range(8)]) == [39, 1, 8]


@pytest.mark.parametrize("family", ["gemma3", "mamba"])
def test_what_known_contexts_have_in_common_is_not_computed_again(
    folders: Folders, family: str
) -> None:
    tried = Tried(folders(family), Blocks)
    (prompt,), (tail,) = keys_of(1, 40), keys_of(1, 20, seed=1)
    known = [(*prompt, token) for token in range(2)]
    for token in tail:
        tried.compute(known)
        known = [(*key, token) for key in known]
    tried.compute(known)
    forked = [(*key, token) for key in known for token in (1, 2)]
    assert tried.ask(*forked) == [4]
    assert tried.ask(*[(*key, 3) for key in forked]) == [4]
    assert tried.ask(*[(*key, 3, *tail) for key in forked]) == [4 * 20, 4]


@pytest.mark.parametrize("family", ["gemma3", "mamba", "lfm2"])
def test_beginnings_of_a_text_cost_its_tokens(folders: Folders, family: str) -> None:
    tried, count = Tried(folders(family), Blocks), 8
    (text,) = keys_of(1, WORTHWHILE * count)
    beginnings = [text[: 1 + WORTHWHILE * at] for at in range(1, count + 1)]
    assert sum(tried.ask(*beginnings)) == WORTHWHILE * count


def test_a_prompt_shorter_than_a_window_is_not_computed_again(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window of those that went on from it has wrapped: they cannot be trimmed."""
    monkeypatch.setattr("genlm.mlx.blocks.WORTHWHILE", 4)
    tried, (prompt,) = Tried(folders("gemma3"), Blocks), keys_of(1, 10)
    known = [(*prompt, token) for token in range(4)]
    for token in range(10):
        tried.ask(*known)
        known = [(*key, token) for key in known]
    assert tried.ask(*[(*prompt, token) for token in range(4, 8)]) == [4]


def test_what_leaves_a_known_context_is_computed_once_more(folders: Folders) -> None:
    tried = Tried(folders("mamba"), Blocks)
    (prompt,) = keys_of(1, 60)
    forwards = [tried.ask((*prompt, token, 5)) for token in range(4)]
    assert forwards == [[61, 1], [59, 1, 1, 1], [1, 1], [1, 1]]


def test_many_short_rows_go_in_few_chunks(folders: Folders) -> None:
    """Of 2 to 4 tokens before the last, two at a time, in a rotating cache: three take a chunk of
    three, not of two and one, which mlx-lm refuses."""
    tried = Tried(folders("gemma3"), Blocks, step_size=62)
    keys = [key[: 4 + at % 3] for at, key in enumerate(keys_of(21, 6))]
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


def test_a_fork_evicts_no_block_that_it_needs(folders: Folders) -> None:
    groups = [keys_of(4, 20, seed) for seed in (1, 2, 3)]
    sized = Tried(folders("llama"), Blocks)
    sized.ask(*groups[0])
    tried = Tried(folders("llama"), Blocks, 2 * sized.kept.nbytes)
    for group in groups:
        tried.ask(*group)
    assert len(tried.kept) == 12
    forked = [(*key, token) for group in groups[:2] for key in group[:2] for token in (1, 2)]
    assert tried.ask(*forked) == [8]
    assert tried.kept.nbytes <= 4 * sized.kept.nbytes  # what was forked, and two blocks aside


@pytest.mark.parametrize("family", ["llama", "gemma3", "mamba", "lfm2"])
def test_what_contexts_start_from_is_in_use(folders: Folders, family: str) -> None:
    """A prompt before many contexts, asked one by one; few of them find room."""
    (prompt,) = keys_of(1, 60)
    tails = keys_of(12, 20)
    sized = Tried(folders(family), Blocks)
    sized.ask((*prompt, *tails[0]))
    tried = Tried(folders(family), Blocks, 4 * sized.kept.nbytes)
    tried.ask(prompt)
    assert sum(sum(tried.ask((*prompt, *tail))) for tail in tails) <= sum(map(len, tails))


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "mamba", "lfm2", "falcon_h1"])
def test_state_with_nan_is_not_kept(folders: Folders, family: str) -> None:
    tried = Tried(folders(family), Blocks)
    keys, (prompt, pinned) = keys_of(4, 20), keys_of(2, 40, seed=1)
    tried.ask(*keys)
    model = engine_of(folders(family)).model
    whole = model.parameters()
    model.update(tree_map(lambda one: one * float("nan"), whole))
    try:
        extended = [(*key, 1) for key in keys]
        behind = [(*prompt, token) for token in range(4)]
        assert mx.isnan(tried.compute([*extended, *behind])).all()
        tried.pin(pinned)
    finally:
        model.update(whole)
    tried.ask(*extended, *behind, pinned)
    tried.ask(*[(*key, 2) for key in (*extended, *behind, *keys, pinned)])
