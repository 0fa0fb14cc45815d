"""How much is computed and kept: the tokens of each forward pass, positions and bytes."""

from __future__ import annotations

import gc
import random
from typing import Any

import mlx.core as mx
import pytest
import torch
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import gpt_oss
from structlog.testing import capture_logs

from genlm.core import EngineError, Query
from genlm.kit.kv import Blank, Command
from genlm.mlx import AsyncMlxLM
from genlm.mlx.adapters import Adapters
from genlm.mlx.blocks import Blocks
from genlm.mlx.engine import MAX_ROWS, MAX_TOKENS_SCORED_TOGETHER
from genlm.mlx.loading import load
from genlm.mlx.probe import store_of
from genlm.mlx.runner import Runner
from genlm.mlx.store import Store
from genlm.mlx.table import Table

from .watched import Folders, Tried, Watched, engine_of, keys_of, logprobs_of, tokens_of

#: Windows in every other layer, and a sink in each.
GPT_OSS = {
    **{"num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 256},
    **{"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "sliding_window": 12},
}


@pytest.fixture(params=["llama", "gemma3"])
def shared(folders: Folders, request: pytest.FixtureRequest) -> Tried:
    return Tried(folders(request.param), Store)


@pytest.fixture(params=[Blocks, Store])
def either(folders: Folders, request: pytest.FixtureRequest) -> Tried:
    return Tried(folders("llama"), request.param)


@pytest.mark.parametrize(
    ("families", "kind"),
    [
        (["llama", "gpt2", "gemma3", "mistral", "qwen2", "phi"], Store),
        (["gemma2", "mamba", "lfm2", "falcon_h1"], Blocks),
    ],
)
def test_attention_models_share_prefixes_and_others_do_not(
    folders: Folders, families: list[str], kind: type
) -> None:
    for family in families:
        assert type(engine_of(folders(family)).store) is kind, family


def test_sinks_and_windows_match_rows_computed_alone() -> None:
    """mlx-lm cannot load a small gpt-oss as transformers writes it."""
    mx.random.seed(0)
    model = gpt_oss.Model(gpt_oss.ModelArgs(**GPT_OSS))
    model.update(tree_map(lambda one: mx.random.normal(one.shape) * 0.3, model.parameters()))
    runner = Runner(model, Adapters(model), 2048)
    store = store_of(runner, None)
    assert isinstance(store, Store)
    source, contexts = random.Random(0), [tokens_of(length, length) for length in range(1, 90, 9)]
    for _ in range(12):
        rows = logprobs_of(store.logits([Query(one) for one in contexts]))
        alone = logprobs_of(mx.concatenate([runner.cold((0, *one)) for one in contexts]))
        assert mx.abs(rows - alone).max().item() < 5e-4
        begun = [source.choice(contexts) for _ in contexts]
        contexts = [
            (*one, at, *tokens_of(source.choice([0, 0, 7]), at)) for at, one in enumerate(begun)
        ]


def test_growing_context_costs_one_token_and_a_new_request_its_own_tokens(either: Tried) -> None:
    *keys, new_request = keys_of(7, 20)
    assert either.ask(*keys) == [6 * 19, 6]
    for token in range(3):
        keys = [(*key, token) for key in keys]
        assert either.ask(*keys) == [6]
    assert sum(either.ask(*[(*key, 1) for key in keys], new_request)) == 20 + 6


@pytest.mark.parametrize("step_size", [16, 2048])
def test_all_prefixes_of_a_text_cost_as_much_as_the_text(folders: Folders, step_size: int) -> None:
    llama = Tried(folders("llama"), Store, step_size=step_size)
    text, other = keys_of(2, 300)
    prefixes = [text[: 1 + length] for length in range(1, 301)]
    forwards = llama.ask(*prefixes, other[:20])
    assert sum(forwards) == 300 + 19
    assert max(forwards) <= 128
    assert sum(llama.ask(*[(*prefix, 7) for prefix in prefixes[:250:50]])) == 5


def test_drafts_cost_their_tokens(shared: Tried) -> None:
    particles = keys_of(4, 20)
    shared.ask(*particles)
    for step in range(3):
        drafts = [tokens_of(4, seed=10 * step + at) for at in range(4)]
        places = [
            (*particle, *draft[:length])
            for particle, draft in zip(particles, drafts, strict=True)
            for length in range(5)
            if step or length
        ]
        assert shared.ask(*places) == [4 * (4 + bool(step))]
        particles = [
            (*particle, *draft[:at], 9)
            for at, (particle, draft) in enumerate(zip(particles, drafts, strict=True))
        ]


def test_long_text_shares_its_computation_with_few_prefixes(shared: Tried) -> None:
    (text,) = keys_of(1, 500)
    assert sum(shared.ask(text, text[:401], text[:403], text[:31])) == 500


def test_forks_continue_from_their_parent_and_the_others_stay_known(either: Tried) -> None:
    keys = keys_of(8, 20)
    either.ask(*keys)
    for token in range(3):
        forked = [(*key, token + branch) for key in keys[:4] for branch in (0, 100)]
        assert either.ask(*forked) == [8]
        assert either.ask(*[(*key, token) for key in keys[4:]]) == [4]
        keys = forked


def test_alternating_groups_keep_their_state(
    either: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genlm.mlx.cache_limit.MIN_KEPT_BYTES", 0)
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
    monkeypatch.setattr("genlm.mlx.cache_limit.MIN_KEPT_BYTES", 0)
    keys, lone = keys_of(8, 70), keys_of(3, 5, seed=1)
    either.ask(*keys)
    for token, other in enumerate(lone):
        either.ask(other)
        keys = [(*key, token) for key in keys]
        assert either.ask(*keys) == [8]


@pytest.mark.parametrize("family", ["llama", "gemma3", "mamba"])
def test_pinned_contexts_do_not_reduce_the_room_of_others(folders: Folders, family: str) -> None:
    kind = Store if family == "llama" else Blocks  # Blocks can hold windows too
    groups, pinned = [keys_of(2, 20, seed) for seed in (1, 2)], keys_of(12, 60)
    sized = Tried(folders(family), kind)
    sized.ask(*keys_of(2, 60))
    tried = Tried(folders(family), kind, 2 * sized.kept.nbytes)
    for key in pinned:
        tried.pin(key)
    for group in groups:
        tried.ask(*group)
    for group in groups:
        assert tried.ask(*[(*key, 1) for key in group]) == [2]


@pytest.mark.parametrize("kind", [Blocks, Store])
def test_rows_are_right_and_bytes_bounded_under_any_budget(folders: Folders, kind: type) -> None:
    for states in (0, 2, 5):
        tried = Tried(folders("llama"), kind, states * 20_000)
        keys = keys_of(6, 20)
        for token in range(6):
            tried.ask(*keys, *keys_of(1, 20, seed=token + 1))
            state = tried.kept.nbytes / len(tried.kept)  # all contexts have about the same length
            factor = 1.5 if kind is Blocks else 2
            assert tried.kept.nbytes <= factor * 7 * state + states * 20_000
            keys = [(*keys[token], 99), *[(*key, token) for key in keys[:-1]]]


def test_full_table_keeps_its_size_if_batches_differ_little(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resizing the table copies all of it."""
    resized: list[int] = []
    resize = Table._resize

    def seen(table: Table, slots: int, *how: Any) -> None:
        resized.append(slots)
        resize(table, slots, *how)

    tried = Tried(folders("llama"), Store, 1_000_000)
    tried.ask(*keys_of(300, 20))
    monkeypatch.setattr(Table, "_resize", seen)
    for step in range(20):
        tried.ask(*keys_of(2 + step % 3, 20, seed=1 + step))
    assert len(tried.kept) < 300
    assert len(resized) <= 3


def test_known_context_costs_its_last_token(shared: Tried) -> None:
    keys = keys_of(4, 20)
    shared.ask(*keys)
    assert shared.ask(*reversed(keys[1:])) == [3]
    assert shared.ask(keys[0][:11], (*keys[0], 7), keys[0]) == [3]
    assert shared.ask((*keys[0], 7, 8)) == [1]


def test_waiting_contexts_evict_no_other_context(
    folders: Folders,
) -> None:
    tried = Tried(folders("llama"), Store, 0)
    keys = keys_of(6, 20)
    keys.append((*keys[0][:18], 1, 2, 3))
    tried.ask(*keys)
    assert tried.ask(*[(*key, 7) for key in keys]) == [7]


def test_some_of_many_contexts_can_be_extended(shared: Tried) -> None:
    """The extended contexts may lie far apart in the table."""
    keys = keys_of(20, 20)
    shared.ask(*keys)
    for few in (keys[3:9:2], [keys[1], keys[18]], keys[::-2]):
        assert shared.ask(*[(*key, 1) for key in few]) == [len(few)]


@pytest.mark.parametrize(
    ("family", "length"),
    [*(("llama", n) for n in (16, 31, 32, 33, 64, 65, 150)), ("gpt2", 33), ("qwen2", 65)],
)
def test_contexts_of_one_prompt_share_its_prefill(
    folders: Folders, family: str, length: int
) -> None:
    tried = Tried(folders(family), Store, step_size=128)
    (prompt,) = keys_of(1, length)
    contexts = [(*prompt, token) for token in range(40)]
    assert sum(tried.ask(*contexts)) == length + 40
    for token in range(3):
        contexts = [(*key, token) for key in contexts]
        assert tried.ask(*contexts) == [40]
    ragged = [(*key, *range(1 + at % 4)) for at, key in enumerate(contexts)]
    assert tried.ask(*ragged) == [40 + 10 * 6]


def test_a_context_far_behind_a_prompt_takes_several_forward_passes(
    shared: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So far that a pass has fewer tokens than the context lacks."""
    monkeypatch.setattr("genlm.mlx.store.MAX_PRODUCTS", 1 << 12)
    monkeypatch.setattr("genlm.mlx.store.MIN_FED_TOKENS", 16)
    (prompt,), (tail,) = keys_of(1, 200), keys_of(1, 40, seed=1)
    shared.pin(prompt)
    forwards = shared.ask((*prompt, *tail[1:]), (*prompt, 5))
    assert len(forwards) > 2
    assert sum(forwards) == 41


def test_common_beginning_of_prompts_is_computed_once(shared: Tried) -> None:
    (system,), users = keys_of(1, 120), keys_of(3, 100, seed=1)
    prompts = [(*system, *user[1:]) for user in users]
    contexts = [(*prompt, token) for prompt in prompts for token in range(8)]
    contexts += [(*system, 5, 6), *keys_of(3, 30, seed=2)]
    assert sum(shared.ask(*contexts)) == 120 + 3 * 100 + 24 + 2 + 90
    assert shared.ask(*[(*key, 1) for key in contexts]) == [28]
    shared.ask((*system[:70], 3), (*system[:10], 4))


def test_trunk_made_of_a_slot_keeps_only_its_own_memory(shared: Tried) -> None:
    keys = keys_of(40, 100)
    shared.compute(keys)
    shared.compute([(*keys[3], token) for token in range(20)])
    more = mx.get_active_memory() - shared.kept.nbytes
    shared.kept.clear()
    assert more - mx.get_active_memory() < 100_000


def test_a_failed_forward_pass_leaves_the_rest_sound(either: Tried) -> None:
    keys = keys_of(6, 20)
    (prompt,) = keys_of(1, 100, seed=1)
    either.ask(*keys)
    either.model.failing = True
    behind = [(*prompt, token) for token in range(20)]
    for some in (keys, keys[:3], behind, [prompt], [(*key, *key[1:]) for key in keys * 2]):
        with pytest.raises(RuntimeError, match="failed"):
            either.compute(list(dict.fromkeys((*key, 1) for key in some)))
    either.model.failing = False
    either.ask(*[(*key, 1) for key in keys], (0, 1, 2, 3))
    assert either.ask(*[(*key, 1, 2) for key in keys]) == [6]
    either.ask(*behind)


def test_irreparable_state_is_dropped_and_logged(
    shared: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    carry_out = Table.do

    def refuse(table: Table, command: Command) -> None:
        if isinstance(command, Blank):
            raise RuntimeError("out of memory")
        carry_out(table, command)

    keys = keys_of(6, 20)
    shared.ask(*keys)
    shared.pin(keys[0])
    shared.model.failing = True
    with monkeypatch.context() as patch, capture_logs() as events:
        patch.setattr(Table, "do", refuse)
        with pytest.raises(RuntimeError, match="failed"):
            shared.compute([(*key, 1) for key in keys])
    shared.model.failing = False
    lost = {"slots": 6, "pinned": 1, "reason": "RuntimeError: out of memory"}
    assert {"event": "kv.lost", "log_level": "warning", **lost} in events
    assert shared.ask(*keys) == [6 * 19, 6]


def test_score_is_one_pass_over_new_tokens(folders: Folders) -> None:
    engine = load(str(folders("llama")), {})
    engine._runner.model = watched = Watched(engine.model)
    context, drawn = tokens_of(40, 0), tokens_of(60, 1)
    engine.logprobs([Query(context)])
    watched.forwards.clear()
    engine.genlm_sequence_logprobs([Query((*context, 5))], [drawn], engine.vocab_size)
    assert watched.forwards == [60], "the context's last token, and the continuation but one"
    engine.logprobs([Query((*context, 6))])
    assert watched.forwards == [60, 1], "the context is still known"


@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mamba"])
def test_a_context_is_computed_once_for_all_its_scores(
    folders: Folders, family: str, budget: int | None
) -> None:
    engine = load(str(folders(family)), {"kv_cache_bytes": budget})
    engine._runner.model = watched = Watched(engine.model)
    context, continuations = tokens_of(100, 0), [tokens_of(6, seed) for seed in range(1, 9)]
    scores = engine.genlm_sequence_logprobs([Query(context)] * 8, continuations, engine.vocab_size)
    # Two contexts may have a common beginning.
    assert 99 + 7 * 6 < sum(watched.forwards) <= 99 + 8 * 6
    if family == "llama":
        assert len(watched.forwards) == 3, "the context, the longest, and the others together"
    for score, tokens in zip(scores, continuations, strict=True):
        for at in (0, 5):
            (row,) = engine.logprobs([Query((*context, *tokens[:at]), cold=True)])
            assert abs(score[at] - row[tokens[at]]) < 1e-3
    watched.forwards.clear()
    engine.genlm_sequence_logprobs(
        [Query((*context, *continuations[-1]))], [tokens_of(6, 9)], engine.vocab_size
    )
    assert sum(watched.forwards) <= 12


def test_candidates_cost_the_tokens_of_their_prefix_tree(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(str(folders("llama")), {})
    engine._runner.model = watched = Watched(engine.model)
    context, common = tokens_of(20, 0), tokens_of(130, 1)
    engine.logprobs([Query(context)])
    # One continuation is too long to be scored together with others.
    asked = [(*common[: 30 - at], at, 7, 8) for at in range(6)] + [common[:29], common]
    for rows in (MAX_ROWS, 16):  # the most rows in memory at once
        monkeypatch.setattr("genlm.mlx.engine.MAX_ROWS", rows)
        engine.genlm_clear_kv_cache()
        watched.forwards.clear()
        scores = engine.genlm_sequence_logprobs(
            [Query(context)] * len(asked), asked, engine.vocab_size
        )
        assert sum(watched.forwards) <= 20 + 32 + 5 * 3 + 20 + 130
        for score, tokens in zip(scores, asked, strict=True):
            assert len(score) == len(tokens)
            for at in range(0, len(tokens), 7):
                (row,) = engine.logprobs([Query((*context, *tokens[:at]), cold=True)])
                assert abs(score[at] - row[tokens[at]]) < 1e-3


@pytest.mark.parametrize("family", ["llama", "gemma3", "mamba"])
@pytest.mark.parametrize("size", [3, MAX_TOKENS_SCORED_TOGETHER + 1])
def test_scores_have_mass_on_the_first_tokens_only(
    folders: Folders, family: str, size: int
) -> None:
    engine = load(str(folders(family)), {})
    context, tokens, width = tokens_of(40, 0), [token % 200 for token in tokens_of(size, 1)], 200
    engine.logprobs([Query(context[:30])])  # these tokens are then known, and exceed a window
    (scores,) = engine.genlm_sequence_logprobs([Query(context)], [tokens], width)
    for at in (0, size - 1):
        (row,) = engine.logprobs([Query((*context, *tokens[:at]), cold=True)])
        right = row[:width].log_softmax(-1)[tokens[at]]
        assert abs(scores[at] - right) < 1e-3 < abs(scores[at] - row[tokens[at]])


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_scores_are_right_with_any_default_dtype(folders: Folders, default: torch.dtype) -> None:
    engine = load(str(folders("llama")), {})
    torch.set_default_dtype(default)
    try:
        (scores,) = engine.genlm_sequence_logprobs([Query((1, 2))], [(3, 4)], engine.vocab_size)
    finally:
        torch.set_default_dtype(torch.float32)
    assert scores.dtype == torch.float32


def test_the_probe_leaves_nothing_behind(folders: Folders) -> None:
    gc.collect()
    mx.clear_cache()  # otherwise it would put arrays into larger freed buffers
    gc.disable()
    try:
        before = mx.get_active_memory()
        model = load(str(folders("llama")), {}).model
        more = mx.get_active_memory() - before
    finally:
        gc.enable()
    weights = sum(one.nbytes for _, one in tree_flatten(model.parameters()))
    assert more < 5 / 4 * weights


def test_clearing_frees_all_state(folders: Folders) -> None:
    tried = Tried(folders("llama"), Store)
    gc.collect()  # garbage of other tests
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


def test_nan_of_a_longer_context_reaches_no_other_row_or_score(
    folders: Folders,
) -> None:
    """A context inside the longer one, and one beside it, in the same batch."""
    engine = load(str(folders("llama")), {})
    embedding = engine.model.model.embed_tokens
    embedding.weight = embedding.weight.at[99].add(mx.array(float("nan")))
    inside, beside, longer = (5, 6, 7), (9, 8), (5, 6, 7, 99, 8)
    rows = engine.logprobs([Query(inside), Query(longer), Query(beside)])
    assert rows[1].isnan().any()
    for ids, row in ((inside, rows[0]), (beside, rows[2])):
        torch.testing.assert_close(row, engine.logprobs([Query(ids, cold=True)])[0])
    grown = engine.logprobs([Query((*inside, 4)), Query((*beside, 4))])
    for ids, row in (((*inside, 4), grown[0]), ((*beside, 4), grown[1])):
        torch.testing.assert_close(
            row, engine.logprobs([Query(ids, cold=True)])[0], atol=1e-4, rtol=0
        )
    asked = [Query(inside), Query(inside), Query(beside)]
    scores = engine.genlm_sequence_logprobs(asked, [(4,), (99, 3), (1, 2)], engine.vocab_size)
    alone = [engine.logprobs([Query(ids, cold=True)])[0] for ids in (inside, beside, (*beside, 1))]
    torch.testing.assert_close(scores[0], alone[0][[4]], atol=1e-4, rtol=0)
    right = torch.stack([alone[1][1], alone[2][2]])
    torch.testing.assert_close(scores[2], right, atol=1e-4, rtol=0)


def test_a_nan_row_or_score_is_an_error_however_many_rows_were_right_before(
    folders: Folders,
) -> None:
    with AsyncMlxLM.from_name(str(folders("llama"))) as lm:
        for token in range(8):
            lm.next_token_logprobs_sync([token])
        embedding = lm.underlying_model.model.embed_tokens
        embedding.weight = embedding.weight.at[99].add(mx.array(float("nan")))
        mx.eval(embedding.weight)  # in this thread, where it was made
        of_row, of_score = (
            r"the context \[5, 99\]",
            r"position 1, or of a later one, of \[5, 99, 3\]",
        )
        for ask, whose in (
            (lambda: lm.next_token_logprobs_sync([5, 99]), of_row),
            (lambda: lm.sequence_logprobs_sync([5], [99, 3]), of_score),
            (lambda: lm.sample_sync([5, 99], 2), of_row),
            (lambda: lm.cache_kv([5, 99]), of_row),
        ):
            said = rf"row is NaN in float32 for .*{whose}.* among its weights"
            with pytest.raises(EngineError, match=said):
                ask()
        lm.cache_kv([5, 6])
        assert lm.next_token_logprobs_sync([5, 6]).exp().sum() == pytest.approx(1.0)


@pytest.mark.parametrize("family", ["mamba", "lfm2"])
def test_a_prompt_with_a_nan_row_is_not_pinned_in_blocks(folders: Folders, family: str) -> None:
    engine = load(str(folders(family)), {})
    assert isinstance(engine.store, Blocks)
    inner = engine.model.backbone if family == "mamba" else engine.model.model
    embedding = inner.embeddings if family == "mamba" else inner.embed_tokens
    right = embedding.weight
    embedding.weight = right.at[99].add(mx.array(float("nan")))
    with pytest.raises(EngineError, match="row is NaN"):
        engine.genlm_cache_prefix(Query((5, 99, 6)))
    embedding.weight = right
    assert engine.genlm_cache_prefix(Query((5, 99, 6)))
    assert not engine.logprobs([Query((5, 99, 6, 7))]).isnan().any()


def test_weights_of_another_thread_must_be_evaluated_there(folders: Folders) -> None:
    with AsyncMlxLM.from_name(str(folders("llama"))) as lm:
        embedding = lm.underlying_model.model.embed_tokens
        embedding.weight = embedding.weight.at[99].add(mx.array(1.0))
        for ask in (
            lambda: lm.next_token_logprobs_sync([5, 99]),
            lambda: lm.sequence_logprobs_sync([5], [99, 3]),
            lambda: lm.cache_kv([5, 99]),
        ):
            with pytest.raises(EngineError, match=r"another thread.*mx\.eval\(model\.parameters"):
                ask()
        mx.eval(lm.underlying_model.parameters())
        assert lm.next_token_logprobs_sync([5, 99]).exp().sum() == pytest.approx(1.0)
