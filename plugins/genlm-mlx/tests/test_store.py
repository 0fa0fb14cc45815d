"""How much the store computes and keeps: the tokens of each forward pass, positions and bytes."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from structlog.testing import capture_logs

from genlm.kit.kv import Blank, Command, Worth
from genlm.mlx.blocks import Blocks
from genlm.mlx.loading import load
from genlm.mlx.store import Store
from genlm.mlx.table import Table

from .watched import Key, Tried, keys_of

Folders = Callable[[str], Path]


@pytest.fixture
def llama(folders: Folders) -> Tried:
    return Tried(folders("llama"), Store)


@pytest.fixture(params=[Blocks, Store])
def either(folders: Folders, request: pytest.FixtureRequest) -> Tried:
    return Tried(folders("llama"), request.param)


@pytest.mark.parametrize(
    ("families", "kind"),
    [
        (["llama", "gpt2", "phi3", "yarn", "mistral", "qwen2"], Store),
        (["gemma2", "gemma3", "mamba", "lfm2", "falcon_h1"], Blocks),
    ],
)
def test_plain_attention_shares_and_other_families_do_not(
    folders: Folders, families: list[str], kind: type
) -> None:
    assert [type(load(str(folders(family)), {}).store) for family in families] == [kind] * len(
        families
    )


def test_a_step_costs_one_token_per_context(either: Tried) -> None:
    keys = keys_of(6, 20)
    assert either.ask(*keys) == [6 * 19, 6]
    for token in range(5):
        keys = [(*key, token) for key in keys]
        assert either.ask(*keys) == [6]


def test_forks_continue_from_their_parent_and_the_others_stay_known(either: Tried) -> None:
    keys = keys_of(8, 20)
    either.ask(*keys)
    for token in range(3):
        forked = [(*key, token + branch) for key in keys[:4] for branch in (0, 100)]
        assert either.ask(*forked) == [8]
        assert either.ask(*[(*key, token) for key in keys[4:]]) == [4]
        keys = forked


def test_a_newcomer_costs_its_own_tokens(either: Tried) -> None:
    *keys, newcomer = keys_of(5, 20)
    either.ask(*keys)
    assert sum(either.ask(*[(*key, 1) for key in keys], newcomer)) == 20 + 4


def test_alternating_groups_keep_their_state(
    either: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genlm.mlx.aside.LEAST_ASIDE", 0)
    groups = [keys_of(4, length, seed=length) for length in (70, 80)]
    for group in groups:
        either.ask(*group)
    for token in range(3):
        groups = [[(*key, token) for key in group] for group in groups]
        for group in groups:
            assert either.ask(*group) == [4]


def test_a_lone_context_takes_the_place_of_no_group(
    either: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genlm.mlx.aside.LEAST_ASIDE", 0)
    keys, lone = keys_of(8, 70), keys_of(3, 5, seed=1)
    either.ask(*keys)
    for token, other in enumerate(lone):
        either.ask(other)
        keys = [(*key, token) for key in keys]
        assert either.ask(*keys) == [8]


@pytest.mark.parametrize("kind", [Blocks, Store])
def test_rows_are_right_and_bytes_bounded_under_any_budget(folders: Folders, kind: type) -> None:
    for rows in (0, 2, 5):
        tried = Tried(folders("llama"), kind, rows * 20_000)
        keys = keys_of(6, 20)
        for token in range(6):
            tried.ask(*keys, *keys_of(1, 20, seed=token + 1))
            row = tried.kept.nbytes / len(tried.kept)  # they have about one length
            assert tried.kept.nbytes <= (1.5 if kind is Blocks else 2) * 7 * row + rows * 20_000
            keys = [(*keys[token], 99), *[(*key, token) for key in keys[:-1]]]


def test_what_is_known_costs_its_last_token(llama: Tried) -> None:
    keys = keys_of(4, 20)
    llama.ask(*keys)
    assert llama.ask(*reversed(keys[1:])) == [3]
    assert llama.ask(keys[0][:11], (*keys[0], 7), keys[0]) == [3]
    assert llama.ask((*keys[0], 7, 8)) == [1]


def test_ragged_growth_is_one_forward_pass_without_padding(llama: Tried) -> None:
    keys = keys_of(12, 20)
    llama.ask(*keys)
    grown = [(*key, *range(1 + at % 5)) for at, key in enumerate(keys)]
    assert llama.ask(*grown) == [sum(map(len, grown)) - sum(map(len, keys))]


def test_contexts_that_wait_for_one_of_their_batch_take_the_place_of_no_other(
    llama: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genlm.mlx.aside.LEAST_ASIDE", 0)
    keys = keys_of(6, 20)
    keys.append((*keys[0][:18], 1, 2, 3))
    llama.ask(*keys)
    assert llama.ask(*[(*key, 7) for key in keys]) == [7]


def test_some_rows_of_many_go_on(llama: Tried) -> None:
    """Also those that lie far apart in the table."""
    keys = keys_of(20, 20)
    llama.ask(*keys)
    for few in (keys[3:9:2], [keys[1], keys[18]], keys[::-2]):
        assert llama.ask(*[(*key, 1) for key in few]) == [len(few)]


@pytest.mark.parametrize(
    ("family", "length"),
    [
        ("llama", 600),
        *((family, n) for family in ("llama", "gpt2", "qwen2") for n in (16, 31, 32, 33, 64, 65)),
    ],
)
def test_contexts_of_one_prompt_share_its_prefill(
    folders: Folders, family: str, length: int
) -> None:
    tried = Tried(folders(family), Store, step_size=256)
    (prompt,) = keys_of(1, length)
    contexts = [(*prompt, token) for token in range(40)]
    assert sum(tried.ask(*contexts)) == length + 40
    for token in range(3):
        contexts = [(*key, token) for key in contexts]
        assert tried.ask(*contexts) == [40]
    ragged = [(*key, *range(1 + at % 4)) for at, key in enumerate(contexts)]
    assert tried.ask(*ragged) == [40 + 10 * 6]


def test_a_prompt_is_kept_once(llama: Tried) -> None:
    (prompt,) = keys_of(1, 1000)
    llama.ask(prompt)
    alone = llama.kept.nbytes
    llama.ask(*[(*prompt, token) for token in range(64)])
    assert llama.kept.nbytes < alone + 64 * 64 * alone / 1000


def test_a_row_far_behind_a_prompt_takes_several_forward_passes(llama: Tried) -> None:
    """So far that a pass has fewer tokens than the row lacks."""
    (prompt,), (tail,) = keys_of(1, 3000), keys_of(1, 480, seed=1)
    llama.pin(prompt)
    forwards = llama.ask((*prompt, *tail[1:]), (*prompt, 5))
    assert len(forwards) > 2
    assert sum(forwards) == 481


def test_prompts_with_a_common_beginning_and_contexts_without(llama: Tried) -> None:
    (system,), users = keys_of(1, 300), keys_of(3, 200, seed=1)
    prompts = [(*system, *user[1:]) for user in users]
    contexts = [(*prompt, token) for prompt in prompts for token in range(8)]
    contexts += [(*system, 5, 6), *keys_of(3, 30, seed=2)]
    assert sum(llama.ask(*contexts)) == 300 + 3 * 200 + 24 + 2 + 90
    assert llama.ask(*[(*key, 1) for key in contexts]) == [28]
    llama.ask((*system[:150], 3), (*system[:10], 4))


def test_a_trunk_made_of_a_row_keeps_no_more_than_itself(llama: Tried) -> None:
    keys = keys_of(40, 100)
    llama.compute(keys)
    llama.compute([(*keys[3], token) for token in range(20)])
    more = mx.get_active_memory() - llama.kept.nbytes
    llama.kept.clear()
    assert more - mx.get_active_memory() < 100_000


def test_resampling_keeps_memory_near_what_is_distinct(folders: Folders) -> None:
    tried = Tried(folders("llama"), Store, 0)
    rng = random.Random(0)
    (prompt,) = keys_of(1, 300)
    tried.ask(prompt)
    position = tried.kept.nbytes / 320  # allotted in 32s
    contexts = [(*prompt, token) for token in range(16)]
    tried.ask(*contexts)
    for step in range(120):
        contexts = [(*key, rng.randrange(256)) for key in rng.choices(contexts, k=16)]
        contexts = list(dict.fromkeys(contexts))
        if step % 20 == 0:
            assert tried.ask(*contexts) == [len(contexts)]
        else:
            tried.compute(contexts)
        distinct = len({key[:end] for key in contexts for end in range(2, len(key) + 1)})
        assert tried.kept.nbytes <= position * (2 * distinct + 128 * 16)


@pytest.mark.parametrize(
    ("family", "max_bytes"), [("llama", 0), ("gpt2", 100_000), ("mistral", 0), ("qwen2", 100_000)]
)
def test_whatever_a_program_does_rows_are_right(
    folders: Folders, family: str, max_bytes: int
) -> None:
    tried = Tried(folders(family), Store, max_bytes, Worth(8, 4, 8, 2, 16), step_size=40)
    rng = random.Random(3)

    def tokens(n: int) -> Key:
        return tuple(rng.randrange(256) for _ in range(n))

    contexts = [(0, *tokens(20))]
    for step in range(60):
        parents = rng.choices(contexts, k=rng.randrange(1, 9))
        contexts = [(*key, *tokens(rng.choice([1, 1, 1, 2, 12]))) for key in parents]
        contexts += [key[: rng.randrange(2, len(key) + 1)] for key in contexts[:2]]
        contexts += [(*contexts[0][: rng.randrange(1, len(contexts[0]))], *tokens(1))]
        contexts = [key for key in dict.fromkeys(contexts) if len(key) < 240] or [(0, 1)]
        tried.ask(*contexts)
        if step % 17 == 5:
            tried.pin(contexts[0])


def test_a_failed_forward_pass_leaves_the_store_sound(llama: Tried) -> None:
    keys = keys_of(6, 20)
    (prompt,) = keys_of(1, 100, seed=1)
    llama.ask(*keys)
    llama.model.failing = True
    behind = [(*prompt, token) for token in range(20)]
    for some in (keys, keys[:3], behind, [prompt], [(*key, *key[1:]) for key in keys * 2]):
        with pytest.raises(RuntimeError, match="failed"):
            llama.compute(list(dict.fromkeys((*key, 1) for key in some)))
    llama.model.failing = False
    llama.ask(*[(*key, 1) for key in keys], (0, 1, 2, 3))
    assert llama.ask(*[(*key, 1, 2) for key in keys]) == [6]
    llama.ask(*behind)


def test_state_that_cannot_be_made_sound_is_dropped_and_logged(
    llama: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    carry_out = Table.do

    def refuse(table: Table, command: Command) -> None:
        if isinstance(command, Blank):
            raise RuntimeError("out of memory")
        carry_out(table, command)

    keys = keys_of(6, 20)
    llama.ask(*keys)
    llama.pin(keys[0])
    llama.model.failing = True
    with monkeypatch.context() as patch, capture_logs() as events:
        patch.setattr(Table, "do", refuse)
        with pytest.raises(RuntimeError, match="failed"):
            llama.compute([(*key, 1) for key in keys])
    llama.model.failing = False
    lost = {"rows": 6, "pinned": 1, "reason": "RuntimeError: out of memory"}
    assert {"event": "kv.lost", "log_level": "warning", **lost} in events
    assert llama.ask(*keys) == [6 * 19, 6]


def test_the_probe_leaves_nothing_behind(folders: Folders) -> None:
    gc.collect()
    gc.disable()
    try:
        before = mx.get_active_memory()
        model = load(str(folders("llama")), {}).model
        more = mx.get_active_memory() - before
    finally:
        gc.enable()
    weights = sum(one.nbytes for _, one in tree_flatten(model.parameters()))
    assert more < 5 / 4 * weights  # MLX may put an array into a freed buffer that is larger


def test_clearing_frees_all(folders: Folders) -> None:
    tried = Tried(folders("llama"), Store)
    gc.collect()  # what other tests left
    tried.compute(keys_of(1, 10))
    tried.kept.clear()
    before = mx.get_active_memory()
    (prompt,) = keys_of(1, 700)
    tried.pin(prompt)
    tried.compute([*[(*prompt, token) for token in range(20)], *keys_of(5, 30, seed=1)])
    assert mx.get_active_memory() > before
    tried.kept.clear()
    assert (len(tried.kept), tried.kept.nbytes) == (0, 0)
    assert mx.get_active_memory() <= before
