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

from genlm.core.engines.kv import Blank, Command, Worth
from genlm.mlx.adapters import Adapters
from genlm.mlx.loading import load
from genlm.mlx.runner import Runner
from genlm.mlx.store import WORTH, Store
from genlm.mlx.table import Table

from .watched import Key, Watched, keys_of

Folders = Callable[[str], Path]

#: Rows are those of cold contexts up to this much.
CLOSE = 1e-4


class Tried:
    """A store over a tiny model."""

    def __init__(
        self,
        folder: Path,
        max_bytes: int | None = None,
        step_size: int = 2048,
        worth: Worth = WORTH,
    ) -> None:
        model = load(str(folder), {}).model
        self.model = Watched(model)
        self._runner = Runner(model, Adapters(model), step_size)
        watched = Runner(self.model, Adapters(model), step_size)
        self.store = Store(watched, max_bytes, worth)
        self.model.forwards.clear()

    def ask(self, *keys: Key) -> list[int]:
        """The tokens of each forward pass that the rows of ``keys`` took; they are those of the
        keys alone."""
        self.model.forwards.clear()
        logits = self.store.logits(keys)
        alone = mx.concatenate([self._runner.cold(key) for key in keys])
        assert mx.abs(_rows(logits) - _rows(alone)).max().item() < CLOSE
        return list(self.model.forwards)


def _rows(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


@pytest.fixture
def llama(folders: Folders) -> Tried:
    return Tried(folders("llama"))


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3", "yarn", "mistral", "qwen2"])
def test_plain_attention_shares_and_other_families_do_not(folders: Folders, family: str) -> None:
    assert isinstance(load(str(folders(family)), {}).pool, Store)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "mamba", "lfm2", "falcon_h1"])
def test_families_with_other_attention_or_state_do_not(folders: Folders, family: str) -> None:
    assert not isinstance(load(str(folders(family)), {}).pool, Store)


def test_a_step_costs_one_token_per_context(llama: Tried) -> None:
    keys = keys_of(6, 20)
    assert llama.ask(*keys) == [6 * 19, 6]
    for token in range(5):
        keys = [(*key, token) for key in keys]
        assert llama.ask(*keys) == [6]


def test_what_is_known_costs_its_last_token(llama: Tried) -> None:
    keys = keys_of(4, 20)
    llama.ask(*keys)
    assert llama.ask(*reversed(keys[1:])) == [3]
    assert llama.ask(keys[0][:11], (*keys[0], 7), keys[0]) == [3]
    assert llama.ask((*keys[0], 7, 8)) == [1]


def test_forks_continue_from_their_parent_and_the_others_stay_known(llama: Tried) -> None:
    keys = keys_of(8, 20)
    llama.ask(*keys)
    for token in range(3):
        forked = [(*key, token + branch) for key in keys[:4] for branch in (0, 100)]
        assert llama.ask(*forked) == [8]
        assert llama.ask(*[(*key, token) for key in keys[4:]]) == [4]
        keys = forked


def test_ragged_growth_is_one_forward_pass_without_padding(llama: Tried) -> None:
    keys = keys_of(12, 20)
    llama.ask(*keys)
    grown = [(*key, *range(1 + at % 5)) for at, key in enumerate(keys)]
    assert llama.ask(*grown) == [sum(map(len, grown)) - sum(map(len, keys))]


def test_a_newcomer_costs_its_own_tokens(llama: Tried) -> None:
    *keys, newcomer = keys_of(5, 20)
    llama.ask(*keys)
    assert sum(llama.ask(*[(*key, 1) for key in keys], newcomer)) == 20 + 4


def test_alternating_groups_keep_their_state(llama: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genlm.mlx.aside.LEAST_ASIDE", 0)
    groups = [keys_of(4, length, seed=length) for length in (70, 80)]
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


@pytest.mark.parametrize("length", [16, 31, 32, 33, 63, 64, 65, 600])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_contexts_of_one_prompt_share_its_prefill(
    folders: Folders, family: str, length: int
) -> None:
    if family == "gpt2":
        length = min(length, 200)  # it has 256 positions
    tried = Tried(folders(family), step_size=256)
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
    alone = llama.store.nbytes
    llama.ask(*[(*prompt, token) for token in range(64)])
    assert llama.store.nbytes < alone + 64 * 64 * alone / 1000


def test_a_row_far_behind_a_prompt_takes_several_forward_passes(llama: Tried) -> None:
    """So far that a pass has fewer tokens than the row lacks."""
    (prompt,), (tail,) = keys_of(1, 3000), keys_of(1, 480, seed=1)
    llama.store.pin(prompt)
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
    llama.store.logits(keys)
    llama.store.logits([(*keys[3], token) for token in range(20)])
    more = mx.get_active_memory() - llama.store.nbytes
    llama.store.clear()
    assert more - mx.get_active_memory() < 100_000


def test_resampling_keeps_memory_near_what_is_distinct(folders: Folders) -> None:
    tried = Tried(folders("llama"), max_bytes=0)
    rng = random.Random(0)
    (prompt,) = keys_of(1, 300)
    tried.ask(prompt)
    position = tried.store.nbytes / 320  # allotted in 32s
    contexts = [(*prompt, token) for token in range(16)]
    tried.ask(*contexts)
    for step in range(120):
        contexts = [(*key, rng.randrange(256)) for key in rng.choices(contexts, k=16)]
        contexts = list(dict.fromkeys(contexts))
        if step % 20 == 0:
            assert tried.ask(*contexts) == [len(contexts)]
        else:
            tried.store.logits(contexts)
        distinct = len({key[:end] for key in contexts for end in range(2, len(key) + 1)})
        assert tried.store.nbytes <= position * (2 * distinct + 128 * 16)


def test_rows_are_right_and_bytes_bounded_under_any_budget(folders: Folders) -> None:
    for rows in (0, 2, 5):
        tried = Tried(folders("llama"), max_bytes=rows * 20_000)
        keys = keys_of(6, 20)
        for token in range(6):
            tried.ask(*keys, *keys_of(1, 20, seed=token + 1))
            row = tried.store.nbytes / len(tried.store)  # they have about one length
            assert tried.store.nbytes <= 2 * 7 * row + rows * 20_000
            keys = [(*keys[token], 99), *[(*key, token) for key in keys[:-1]]]


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "qwen2"])
@pytest.mark.parametrize("max_bytes", [None, 0, 100_000])
def test_whatever_a_program_does_rows_are_right(
    folders: Folders, family: str, max_bytes: int | None
) -> None:
    tried = Tried(folders(family), max_bytes, 40, Worth(8, 4, 8, 2, 16))
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
            tried.store.pin(contexts[0])


def test_a_failed_forward_pass_leaves_the_store_sound(llama: Tried) -> None:
    keys = keys_of(6, 20)
    (prompt,) = keys_of(1, 100, seed=1)
    llama.ask(*keys)
    llama.model.failing = True
    behind = [(*prompt, token) for token in range(20)]
    for some in (keys, keys[:3], behind, [prompt], [(*key, *key[1:]) for key in keys * 2]):
        with pytest.raises(RuntimeError, match="failed"):
            llama.store.logits(list(dict.fromkeys((*key, 1) for key in some)))
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
    llama.store.pin(keys[0])
    llama.model.failing = True
    with monkeypatch.context() as patch, capture_logs() as events:
        patch.setattr(Table, "do", refuse)
        with pytest.raises(RuntimeError, match="failed"):
            llama.store.logits([(*key, 1) for key in keys])
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
    tried = Tried(folders("llama"))
    gc.collect()  # what other tests left
    tried.store.logits(keys_of(1, 10))
    tried.store.clear()
    before = mx.get_active_memory()
    (prompt,) = keys_of(1, 700)
    tried.store.pin(prompt)
    tried.store.logits([*[(*prompt, token) for token in range(20)], *keys_of(5, 30, seed=1)])
    assert mx.get_active_memory() > before
    tried.store.clear()
    assert (len(tried.store), tried.store.nbytes) == (0, 0)
    assert mx.get_active_memory() <= before
