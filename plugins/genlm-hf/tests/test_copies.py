"""How often a step copies between the host and the device, and how many kernels it launches;
counted without a device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma2Config,
    LlamaConfig,
    PretrainedConfig,
)

from genlm.core import Query
from genlm.hf import engine as engine_module
from genlm.hf import slabs
from genlm.hf.attention import SLOT_ATTENTION
from genlm.hf.costs import COSTS, Costs
from genlm.hf.engine import HFEngine
from genlm.hf.evaluator import Evaluator
from genlm.hf.options import HFOptions
from genlm.hf.pool import PoolLayer, SlotPool
from genlm.hf.reuse import Choice, ReuseMode
from genlm.hf.strategies import SHARING_COSTS, Computed
from genlm.hf.upload import Upload
from tests.engines import rows_of
from tools.launched import Launched
from tools.transfers import META, Counts, counted

from .models import build, proven
from .shapes import MAMBA, SHAPE, TOKENS

pytestmark = pytest.mark.any_version

ONE = Counts(up=1)

Make = Callable[..., HFEngine]


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes an engine whose model is on the device. Nothing can be read there: so the reuse mode
    is given, and no row is compared with a cold one."""

    def make(
        config: PretrainedConfig, reuse: ReuseMode = ReuseMode.SHARED, **options: Any
    ) -> HFEngine:
        def choose(model: Any, *rest: Any) -> Choice:
            if reuse in (ReuseMode.SHARED, ReuseMode.PACKED):
                model.set_attn_implementation(SLOT_ATTENTION)
            return Choice(reuse, 0.0, None, False)

        monkeypatch.setattr(engine_module, "choose_reuse", choose)
        monkeypatch.setattr(Computed, "broken", lambda self: set())
        monkeypatch.setattr(Evaluator, "FIRST_CHECK", 1 << 20)
        # Scores and nested contexts look at once for NaN, which has no answer on this device.
        monkeypatch.setattr(Evaluator, "_without_later", lambda self, result, *rest: result)
        with META:
            model = AutoModelForCausalLM.from_config(config)
        # Other tests reject weights that are on no device.
        refuse = staticmethod(lambda model: None)
        monkeypatch.setattr(HFEngine, "_refuse", refuse)
        engine = HFEngine(model, None, HFOptions.parse({"kv_cache_bytes": 1 << 30, **options}))
        if reuse is not ReuseMode.NONE:
            rows_of(engine, [Query((TOKENS - 1,))])  # the pool learns the shape of states
            engine.genlm_clear_kv_cache()
        return engine

    return make


def ask(engine: HFEngine, *contexts: Sequence[int]) -> Counts:
    """Answer contexts in one step, and count its copies."""
    queries = [Query(tuple(context)) for context in contexts]
    with counted() as counts:
        answers = engine.genlm_step(queries, [], TOKENS)
    assert [answer.request for answer in answers] == queries
    assert all(answer.result.shape == (TOKENS,) for answer in answers)
    return counts


def contexts_of(length: int, n: int = 3) -> list[list[int]]:
    return [[at, *range(1, length)] for at in range(n)]


LLAMA = LlamaConfig(**{**SHAPE, "max_position_embeddings": 4096})

#: Windows in every other layer, and capped logits.
GEMMA = Gemma2Config(
    **{**SHAPE, "num_hidden_layers": 4, "head_dim": 8, "max_position_embeddings": 4096},
    sliding_window=8,
)


@pytest.mark.parametrize(
    ("config", "reuse"),
    [(LLAMA, ReuseMode.PACKED), (GEMMA, ReuseMode.SHARED)],
    ids=["llama", "gemma2"],
)
def test_a_step_in_slots_copies_once(
    config: PretrainedConfig, reuse: ReuseMode, there: Make
) -> None:
    engine = there(config, reuse)
    new = contexts_of(20)
    assert ask(engine, *new) == ONE
    grown = [[*context, 5] for context in new]
    assert ask(engine, *grown) == ONE
    assert ask(engine, *[[*context, 6] for context in reversed(grown)]) == ONE
    apart = [[*context, 6, 7] for context in grown[::2]]
    assert ask(engine, *apart) == ONE
    ragged = [[*apart[0], *range(40)], [*apart[1], 8], contexts_of(9, 7)[-1]]
    assert ask(engine, *ragged) == ONE


@pytest.mark.parametrize("config", [LLAMA, GEMMA], ids=["llama", "gemma2"])
def test_a_step_over_trunks_copies_once(
    config: PretrainedConfig, there: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COSTS, META.type, Costs(plenty=0))
    engine = there(config)
    prompt, other = ([at, *range(1, 250)] * 6 for at in (0, 250))
    assert ask(engine, prompt) == ONE  # computed in a trunk
    assert ask(engine, other) == ONE
    particles = [[*prompt, at] for at in range(4)]
    assert ask(engine, *particles) == ONE
    assert ask(engine, *[[*other, at] for at in range(4)]) == ONE
    mixed = [
        [*prompt, 0, 5],
        [*other, 0, 5],
        *([*prompt, at, 5, 6, 7] for at in (1, 3)),
        [*other, 3, 5],
        [9, 9, 9],
    ]
    assert ask(engine, *mixed) == ONE
    # The slots are in another order, so the tokens over the first trunk are not neighbours.
    new_requests = [[*prompt, 7], [3, 4, 5], [*prompt, 1, 5, 6, 7, 8], [*other, 3, 5, 6]]
    assert ask(engine, *new_requests) == ONE


def test_every_forward_of_a_step_copies_once(there: Make) -> None:
    engine = there(LLAMA, ReuseMode.UNIFORM)  # one forward for each length
    assert ask(engine, [1, 2, 3], [4, 5], [6, 7], [8]) == Counts(up=3)


def test_state_in_uniform_slots_copies_once(there: Make) -> None:
    engine = there(LLAMA, ReuseMode.UNIFORM)
    assert ask(engine, *contexts_of(20)) == ONE
    assert ask(engine, *[[*one, 5] for one in contexts_of(20)[::2]]) == ONE


def test_score_additionally_copies_its_targets(there: Make) -> None:
    engine = there(LLAMA)
    with counted() as counts:
        queries = [Query((1, 2, 3)), Query((4,))]
        engine.genlm_sequence_logprobs(queries, [[5, 6], [7, 8, 9]], engine.vocab_size)
    assert counts == Counts(up=2)


@pytest.mark.parametrize("n", [2, 9])
def test_a_step_copies_the_same_for_any_number(n: int, there: Make) -> None:
    """Rows of growing, forked and new contexts, and scores."""
    engine, contexts = there(LLAMA), contexts_of(20, n)
    ask(engine, *contexts)
    mixed = (
        [[*one, 5] for one in contexts]
        + [[*one, 6] for one in contexts]
        + [[7, at, 8] for at in range(n)]
    )
    assert ask(engine, *mixed) == Counts(up=2)
    queries = [Query((9, at, 3)) for at in range(n)]
    with counted() as counts:
        engine.genlm_sequence_logprobs(queries, [[5, 6]] * n, engine.vocab_size)
    assert counts == Counts(up=2)


def test_fork_additionally_copies_its_slots(there: Make) -> None:
    engine = there(LLAMA)
    ask(engine, *contexts_of(20))
    forks = [[*one, at] for one in contexts_of(20) for at in (5, 6)]
    assert ask(engine, *forks) == Counts(up=2)  # whatever the number of layers


def test_snapshots_of_contexts_that_stay_together_are_copied_once(there: Make) -> None:
    engine = there(MAMBA, ReuseMode.STEPWISE)
    assert ask(engine, *contexts_of(20)) == ONE
    grown = [[*one, 5] for one in contexts_of(20)]
    assert ask(engine, *grown) == ONE
    assert ask(engine, *[[*one, 6] for one in grown[::-1]]) == Counts(up=2)


def test_the_whole_contexts_of_a_cold_row_are_copied_once(there: Make) -> None:
    assert ask(there(MAMBA, ReuseMode.NONE), *contexts_of(20), [1, 2]) == Counts(up=2)


def launched(engine: HFEngine, contexts: Sequence[Sequence[int]]) -> int:
    """How many kernels a step launches that answers these contexts, beyond transformers' own."""
    with Launched() as ours:
        queries = [Query(tuple(one)) for one in contexts]
        assert len(engine.genlm_step(queries, [], TOKENS)) == len(contexts)
    ids = torch.zeros(len(contexts), 1, dtype=torch.long, device=META)
    with torch.inference_mode(), Launched() as raw:
        cache = DynamicCache(config=engine.model.config)
        engine.model.set_attn_implementation("sdpa")
        engine.model(ids, past_key_values=cache).logits[:, -1].float().log_softmax(-1)
        engine.model.set_attn_implementation(SLOT_ATTENTION)
    return ours.count - raw.count


@pytest.mark.parametrize(
    ("length", "n"), [(20, 1), (20, 64), (SHARING_COSTS.trunk + 8, 1), (600, 3)]
)
def test_a_step_launches_ten_kernels_more_than_transformers(
    length: int, n: int, there: Make
) -> None:
    """Also behind different prompts, however long."""
    engine = there(LLAMA)
    contexts = contexts_of(length, n)
    for token in range(2):  # by then, the table is large enough
        launched(engine, contexts)
        contexts = [[*one, token] for one in contexts]
    assert launched(engine, contexts) <= 10


def test_shared_prompts_stay_in_slots_while_memory_is_plentiful(there: Make) -> None:
    """On an H200 trunks took twice as long as slots."""
    engine = there(LLAMA)
    prompts = [one * 4 for one in contexts_of(SHARING_COSTS.trunk // 4, 8)]
    contexts = [[*prompt, at] for prompt in prompts for at in range(4)]
    for token in range(2):
        rows_of(engine, [Query(tuple(one)) for one in contexts])
        contexts = [[*one, token] for one in contexts]
    assert launched(engine, contexts) <= 10


def test_a_ragged_step_launches_two_kernels_a_layer_besides(there: Make) -> None:
    """Whatever the number of contexts: on a GPU their attention is computed together."""
    engine = there(LLAMA)
    contexts = contexts_of(20, 100)
    for _ in range(2):  # by then, the table is large enough
        launched(engine, contexts)
        contexts = [[*one, *range(1 + at % 5)] for at, one in enumerate(contexts)]
    assert launched(engine, contexts) <= 10 + 2 * LLAMA.num_hidden_layers


@pytest.mark.parametrize("n", [2, 64])
def test_a_fork_launches_ten_kernels_besides(n: int, there: Make) -> None:
    engine = there(LlamaConfig.from_dict({**LLAMA.to_dict(), "num_hidden_layers": 10}))
    contexts = contexts_of(20, n)
    for _ in range(3):
        launched(engine, contexts)
        contexts = [[*one, at] for one in contexts[: n // 2] for at in (5, 6)]
    assert launched(engine, contexts) <= 10


@pytest.mark.parametrize("shared", [2, 3])
def test_further_trunk_launches_one_kernel_per_layer(shared: int) -> None:
    """Long prompts, each with several continuations."""
    # Another model, because models on the device change their configuration.
    model = build(LlamaConfig.from_dict(LLAMA.to_dict()))
    counts = []
    for n in (4, 12):
        engine = proven(copy.deepcopy(model)).engine
        prompts = [one * 4 for one in contexts_of(SHARING_COSTS.trunk // 4, n)]
        for prompt in prompts:
            ask(engine, prompt)
        contexts = [[*prompt, at] for at in range(shared) for prompt in prompts]
        for token in range(3):  # by then, the table is large enough
            with Launched() as launched:
                engine.genlm_step([Query(tuple(one)) for one in contexts], [], TOKENS)
            contexts = [[*one, token] for one in contexts]
        counts.append(launched.count)
    assert counts[1] - counts[0] == (12 - 4) * LLAMA.num_hidden_layers


def test_forks_from_the_middle_of_a_trunk_are_copied_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(COSTS, "cpu", Costs(plenty=0))
    model = build(LlamaConfig.from_dict(LLAMA.to_dict()))
    counts = []
    for n in (2, 64):
        engine = proven(copy.deepcopy(model)).engine
        (prompt,) = [one * 4 for one in contexts_of(SHARING_COSTS.trunk // 4, 1)]
        for contexts in ([prompt], [[*prompt, at] for at in range(3)], contexts_of(20, n)):
            ask(engine, *contexts)
        with Launched() as launched:
            asked = [[*prompt[:20], at] for at in range(n)]
            engine.genlm_step([Query(tuple(one)) for one in asked], [], TOKENS)
        counts.append(launched.count)
    # Slots that are not neighbours are gathered.
    assert counts[1] <= counts[0] + 4 * LLAMA.num_hidden_layers


@pytest.mark.parametrize("slot_by_slot", [True, False])
@pytest.mark.parametrize("copied", [1, 1 << 28])
def test_a_fork_copies_the_same_in_either_way(
    slot_by_slot: bool, copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COSTS, "cpu", Costs(slot_by_slot))
    monkeypatch.setattr(slabs, "COPIED_BYTES", copied)
    pool = SlotPool()
    pool.resize(6, 8)
    pool.layers.extend(PoolLayer(pool, at) for at in range(2))
    for at, layer in enumerate(pool.layers):
        layer.lazy_initialization(torch.empty(6, 3, 1, 4), torch.empty(6, 3, 1, 5))
        layer.keys.copy_(torch.arange(6)[:, None, None, None] + 10 * at)
        layer.values.copy_(layer.keys[..., :1] + 100)
    pool.resize(6, 8, range(6))
    pool.fork([4, 1, 4], [0, 3, 5], 6)
    for at, layer in enumerate(pool.layers):
        for number, kept in ((10 * at, layer.keys), (10 * at + 100, layer.values)):
            assert (
                kept[:, :, :6, :] == torch.tensor([4, 1, 2, 1, 4, 4])[:, None, None, None] + number
            ).all()
            assert (kept[:, :, 6:, :] == torch.arange(6)[:, None, None, None] + number).all()


def test_upload_rejects_indices_after_the_copy() -> None:
    upload = Upload()
    one = upload.add([3, 1, 2])
    assert one.on(torch.device("cpu")).tolist() == [3, 1, 2]
    with pytest.raises(RuntimeError, match="add all of them before"):
        upload.add([4])


def test_every_copy_to_the_device_is_counted() -> None:
    there = torch.empty(3, device=META)
    with counted() as counts:
        torch.add(there, 1)  # this needs no copy
        torch.tensor([1], device=META)
        torch.tensor([1]).to(META)
        there[torch.tensor([1])]
        there[[0, 1]]
    assert counts == Counts(up=4)


@pytest.mark.parametrize(
    "what",
    [
        lambda there: there.tolist(),
        lambda there: there[0].item(),
        lambda there: there.nonzero(),
        lambda there: there[there > 0],
    ],
)
def test_waiting_for_the_meta_device_raises(what: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        what(torch.empty(3, device=META))
