"""How much blocks compute and keep: the tokens of each forward pass, and bytes."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx.utils import tree_map

from genlm.kit.kv import TokenSequence
from genlm.mlx.blocks import MIN_SHARED_TOKENS, Blocks
from genlm.mlx.runner import in_order

from .watched import Folders, Tried, engine_of, keys_of, logprobs_of


@pytest.fixture
def llama(folders: Folders) -> Tried:
    return Tried(folders("llama"), Blocks)


def test_known_contexts_are_not_computed_again(llama: Tried) -> None:
    keys = keys_of(4, 20)
    llama.ask(*keys)
    assert llama.ask(*reversed(keys[1:])) == []


def test_contexts_can_be_extended_one_by_one(llama: Tried) -> None:
    keys = keys_of(8, 20)
    llama.ask(*keys)
    whole = llama.kept.nbytes
    for key in keys:
        assert llama.ask((*key, 1)) == [1]
    assert len(llama.kept) == 8
    assert llama.ask(*[(*key, 1, 2) for key in keys]) == [8]
    assert llama.kept.nbytes < 3 * whole


def test_block_that_most_sequences_left_shrinks(llama: Tried) -> None:
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
    assert llama.ask(*[(*prompt, token) for token in range(8)]) == [40, 8]


@pytest.mark.parametrize("family", ["gemma3", "mamba"])
def test_common_prefix_of_known_contexts_is_not_computed_again(
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
def test_prefixes_of_a_text_cost_its_tokens(folders: Folders, family: str) -> None:
    tried, count = Tried(folders(family), Blocks), 8
    (text,) = keys_of(1, MIN_SHARED_TOKENS * count)
    beginnings = [text[: 1 + MIN_SHARED_TOKENS * at] for at in range(1, count + 1)]
    assert sum(tried.ask(*beginnings)) == MIN_SHARED_TOKENS * count


def test_a_prompt_shorter_than_a_window_is_not_computed_again(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The windows of its continuations have wrapped, so these cannot be trimmed back to it."""
    monkeypatch.setattr("genlm.mlx.blocks.MIN_SHARED_TOKENS", 4)
    tried, (prompt,) = Tried(folders("gemma3"), Blocks), keys_of(1, 10)
    known = [(*prompt, token) for token in range(4)]
    for token in range(10):
        tried.ask(*known)
        known = [(*key, token) for key in known]
    assert tried.ask(*[(*prompt, token) for token in range(4, 8)]) == [4]


def test_fork_of_a_known_context_computes_the_prefix_once_more(folders: Folders) -> None:
    tried = Tried(folders("mamba"), Blocks)
    (prompt,) = keys_of(1, 60)
    forwards = [tried.ask((*prompt, token, 5)) for token in range(4)]
    assert forwards == [[62], [60, 2], [2], [2]]


@pytest.mark.parametrize("count", [6, 24])
@pytest.mark.parametrize("family", ["gemma3", "mamba", "lfm2", "falcon_h1"])
def test_the_places_of_drafts_cost_the_drafts(folders: Folders, family: str, count: int) -> None:
    """Each particle continues from another position of its draft, whose state is not kept."""
    tried = Tried(folders(family), Blocks, None, family != "mamba")
    particles = keys_of(count, 20)
    tried.compute(particles)
    tokens = 0
    for step in range(10):
        drafts = [
            [(*key, *draft[:size]) for size in range(5)]
            for key, draft in zip(particles, keys_of(count, 4, seed=step), strict=True)
        ]
        tokens += sum(tried.ask(*(one for draft in drafts for one in draft)))
        particles = [(*draft[at % 5], 7) for at, draft in enumerate(drafts)]
    assert tokens <= 10 * count * 9  # five of these are the drafts


@pytest.mark.parametrize("family", ["gemma3", "lfm2"])
def test_drafts_at_all_positions_of_a_text_share_passes(folders: Folders, family: str) -> None:
    tried, places, size = Tried(folders(family), Blocks), 12, 3
    (text,) = keys_of(1, 20 + 8 * places)
    tried.compute([text[:20]])
    passes = 0
    for start in range(20, len(text), places):
        drafts = keys_of(places, size, seed=start)
        asked = [
            (*text[: start + at], *draft[1 : 1 + length])
            for at, draft in enumerate(drafts)
            for length in range(size + 1)
        ]
        passes += len(tried.ask(*asked))
    assert passes <= 8 * places / 2


@pytest.mark.parametrize("family", ["gemma3", "mamba", "lfm2", "falcon_h1"])
def test_candidates_share_forwards_and_rows_are_read_on_the_way(
    folders: Folders, family: str
) -> None:
    tried, (prompt,) = Tried(folders(family), Blocks), keys_of(1, 40)
    tails = [tail[1:] for tail in keys_of(8, 6)]
    wholes = [TokenSequence((*prompt[1:], *tail), keep=7) for tail in tails]
    tried.model.forwards.clear()
    parts = [*tried.kept.results(wholes)]
    assert tried.model.forwards[:1] == [39]
    assert sum(tried.model.forwards) == 39 + 8 * 7
    assert len(tried.model.forwards) == 2
    keys = [(*prompt, *tail[:size]) for tail in tails for size in range(7)]
    expected = logprobs_of(Tried(folders(family), Blocks).compute([*dict.fromkeys(keys)]))
    places = [[*dict.fromkeys(keys)].index(key) for key in keys]
    found = logprobs_of(in_order(parts))
    assert mx.abs(found - expected[mx.array(places)]).max().item() < 1e-4
    # These continue from the states at the ends of the candidates.
    tried.ask(*[(*prompt, *tail, 3) for tail in tails])
    assert tried.model.forwards == [8]


@pytest.mark.parametrize("family", ["mamba", "lfm2"])
def test_returning_to_an_earlier_context_starts_from_a_near_state(
    folders: Folders, family: str
) -> None:
    tried, (prompt,), (tail,) = Tried(folders(family), Blocks), keys_of(1, 40), keys_of(1, 60)
    for size in range(1, 60):
        tried.compute([(*prompt, *tail[1:size])])
    assert sum(tried.ask((*prompt, *tail[1:50], 7))) <= 2 * MIN_SHARED_TOKENS


def test_grown_states_are_evicted_before_a_prompt(folders: Folders) -> None:
    sized = Tried(folders("lfm2"), Blocks)
    particles = keys_of(4, 100)
    sized.ask(*particles)
    tried = Tried(folders("lfm2"), Blocks, 2 * sized.kept.nbytes)
    (prompt,) = keys_of(1, 40, seed=1)
    particles = [(*prompt, token) for token in range(4)]
    for token in range(60):
        tried.compute(particles)
        particles = [(*key, token) for key in particles]
    assert tried.ask((*prompt, 9)) == [1]


def test_score_that_ends_like_a_context_leaves_its_state_usable(folders: Folders) -> None:
    tried, (text,) = Tried(folders("lfm2"), Blocks), keys_of(1, 40)
    for _ in range(2):
        assert len([*tried.kept.results([TokenSequence(text[1:], keep=8)])]) > 0
        tried.ask(text, (*text, 1))
    assert tried.ask((*text, 1, 2)) == [1]
    tried.kept.clear()
    assert len(tried.kept) == 0


def test_many_short_contexts_run_in_few_chunks(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 2 to 4 tokens before the last, two at a time, in a rotating cache: three take a chunk of
    three, not of two and one, which mlx-lm refuses."""
    monkeypatch.setattr("genlm.mlx.blocks.MAX_TOKENS_BEFORE_READ", 0)
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
    # The forked states, and two blocks of reserve.
    assert tried.kept.nbytes <= 4 * sized.kept.nbytes


@pytest.mark.parametrize("family", ["llama", "gemma3", "mamba", "lfm2"])
def test_prompt_that_contexts_start_from_is_not_evicted(folders: Folders, family: str) -> None:
    """Many contexts share a prompt and are requested one by one; only few of them fit into
    memory."""
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
