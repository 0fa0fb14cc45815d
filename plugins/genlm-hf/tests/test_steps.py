"""Long contexts are computed in chunks, and others are answered between two of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from attrs import evolve
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
)

from genlm.core import Adapter, EngineError, Query
from genlm.hf import AsyncTransformer
from genlm.hf.engine import HFEngine
from genlm.hf.options import HFOptions
from tests.engines import add_lora

from .shapes import MAMBA, SHAPE, TOKENS

CHUNK = 32

Pair = Any
Contexts = Callable[..., list[tuple[int, ...]]]


@pytest.fixture
def chunked(pair: Callable[..., Pair], llama_config: Callable[..., LlamaConfig]) -> Pair:
    """An engine whose chunks are short."""
    return pair(llama_config(), max_batch_tokens=CHUNK)


def step(
    model: Pair, *contexts: Sequence[int], dropped: Sequence[Sequence[int]] = ()
) -> dict[tuple[int, ...], torch.Tensor]:
    """One step; the answered contexts, whose rows are compared with transformers'."""
    answers = model.engine.genlm_step(
        [Query(tuple(one)) for one in contexts], [Query(tuple(one)) for one in dropped]
    )
    rows = {answer.request.token_ids: answer.result for answer in answers}
    if rows:
        expected = model.expected(*rows)
        torch.testing.assert_close(torch.stack([*rows.values()]), expected, atol=1e-4, rtol=0)
    return rows


def finish(model: Pair, *contexts: Sequence[int]) -> list[set[tuple[int, ...]]]:
    """What each step answers, until all contexts are."""
    left, answered = {tuple(one) for one in contexts}, [set(step(model, *contexts))]
    while left - set().union(*answered):
        assert len(answered) < 100, "a request is passed over for ever"
        answered.append(set(step(model)))
    return answered


@pytest.mark.parametrize("length", [31, 32, 33, 63, 64, 65, 96, 97, 200])
def test_rows_around_the_ends_of_chunks(chunked: Pair, contexts: Contexts, length: int) -> None:
    (prompt,) = contexts(1, length)
    steps = finish(chunked, prompt)
    assert len(steps) == -(-length // CHUNK)
    assert max(chunked.forwards) <= CHUNK
    assert sum(chunked.forwards) == length, "nothing is computed twice"
    grown = prompt
    for token in range(40):  # rows that go on from chunks
        grown = (*grown, token)
        assert step(chunked, grown)
    step(chunked, (*prompt[: length // 2], 7), (*prompt[: CHUNK - 1], 8), (*prompt, 9))


def test_a_short_context_is_answered_beside_a_chunk(chunked: Pair, contexts: Contexts) -> None:
    (prompt,), (short,) = contexts(1, 100), contexts(1, 5, seed=1)
    assert step(chunked, prompt) == {}
    assert [*step(chunked, short)] == [short]
    assert chunked.forwards == [CHUNK, CHUNK], "in the forward of the second chunk"
    assert finish(chunked, (1, 2))[0] == {(1, 2)}


def test_a_step_is_filled_to_its_last_token(chunked: Pair, contexts: Contexts) -> None:
    (short,), (one, other) = contexts(1, CHUNK // 4), contexts(2, CHUNK - CHUNK // 4, seed=1)
    assert set(step(chunked, short, one, other)) == {short, one}
    assert chunked.forwards == [CHUNK]


def test_a_prompt_costs_those_that_grow_no_more_than_its_own_tokens(
    chunked: Pair, contexts: Contexts
) -> None:
    (prompt,), growing = contexts(1, 150), contexts(4, 6, seed=1)
    step(chunked, *growing)
    chunked.forwards.clear()
    steps, answered, newcomers = 0, False, [prompt]
    while not answered:
        growing = [(*one, steps) for one in growing]
        rows = step(chunked, *newcomers, *growing)
        assert set(growing) <= set(rows), "all of them are answered in every step"
        newcomers, answered, steps = [], prompt in rows, steps + 1
    assert steps == -(-150 // (CHUNK - 4))
    assert len(chunked.forwards) == steps, "each step is one forward"
    assert sum(chunked.forwards) == 150 + 4 * steps, "nothing is computed twice"


def test_what_lacks_least_is_answered_first_however_long_it_is(
    chunked: Pair, contexts: Contexts
) -> None:
    (known,), (prompt,) = contexts(1, 100), contexts(1, 60, seed=1)
    finish(chunked, known)
    assert [*step(chunked, prompt, (*known, 1))] == [(*known, 1)]


def test_nothing_is_passed_over_while_others_keep_coming(chunked: Pair, contexts: Contexts) -> None:
    (prompt,), fresh = contexts(1, 150), iter(contexts(200, 8, seed=1))
    newcomers, answered, steps = [prompt], set[tuple[int, ...]](), 0
    while prompt not in answered:
        newcomers += [next(fresh) for _ in range(8)]  # twice as much as fits beside a chunk
        answered |= set(step(chunked, *newcomers))
        newcomers, steps = [], steps + 1
    assert steps <= 150 // (CHUNK // 2) + 1
    assert len(answered) > steps, "and others are answered meanwhile"


def test_contexts_behind_one_long_prompt_compute_it_once(chunked: Pair, contexts: Contexts) -> None:
    (prompt,) = contexts(1, 120)
    finish(chunked, *[(*prompt, at, at) for at in range(10)])
    assert sum(chunked.forwards) == 120 + 2 * 10


def test_long_prompts_are_finished_in_the_order_asked(chunked: Pair, contexts: Contexts) -> None:
    prompts = contexts(3, 70)
    steps = finish(chunked, *prompts)
    assert [one for answered in steps for one in sorted(answered, key=prompts.index)] == prompts
    assert len(steps) <= 210 // CHUNK + 1


def test_a_prompt_that_is_dropped_is_not_computed_any_further(
    chunked: Pair, contexts: Contexts
) -> None:
    (prompt,), (other,) = contexts(1, 200), contexts(1, 90, seed=1)
    step(chunked, prompt)
    assert step(chunked, dropped=[prompt]) == {}
    assert chunked.forwards == [CHUNK], "the step that drops it runs nothing"
    assert len(finish(chunked, other)) == 3
    chunked.forwards.clear()
    finish(chunked, prompt)
    assert sum(chunked.forwards) == 200 - CHUNK, "what was computed of it is known still"


def test_a_chunk_that_fails_leaves_the_engine_sound(
    chunked: Pair, contexts: Contexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    (prompt,), grown = contexts(1, 150), contexts(3, 6, seed=1)
    step(chunked, *grown)
    step(chunked, prompt)
    head = chunked.engine.model.get_output_embeddings()

    def refuse(*given: object) -> None:
        raise RuntimeError("a kernel failed")

    hook = head.register_forward_pre_hook(refuse)  # all layers have written their state by then
    with pytest.raises(RuntimeError, match="a kernel failed"):
        step(chunked, *[(*one, 1) for one in grown])
    hook.remove()
    assert step(chunked, (9, 9)), "nothing of the failed step is in flight"
    assert set().union(*finish(chunked, prompt, *[(*one, 1) for one in grown])) == {
        prompt,
        *[(*one, 1) for one in grown],
    }


@pytest.mark.parametrize("room", [0, 1, 40, 80, 120, 160, 200])
def test_what_is_lost_for_lack_of_memory_is_computed_again(
    pair: Callable[..., Pair],
    llama_config: Callable[..., LlamaConfig],
    contexts: Contexts,
    room: int,
) -> None:
    """With room for that many positions; every step brings a context that drives out others."""
    position = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, their size, bytes
    model = pair(llama_config(), max_batch_tokens=CHUNK, kv_cache_bytes=room * position)
    (prompt,), others = contexts(1, 150), contexts(20, 15, seed=1)
    answered = set(step(model, prompt))
    for other in others:
        answered |= set(step(model, other))
    assert answered == {prompt, *others}
    assert sum(model.forwards) <= 150 + CHUNK * 5 + 150 + 20 * 15, "it is computed twice at most"


FAMILIES = {
    "llama": LlamaConfig(**SHAPE),
    "window": MistralConfig(**SHAPE, sliding_window=20),
    "uniform": BloomConfig(vocab_size=TOKENS, hidden_size=32, n_head=4, n_layer=2),
}


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("chunk", [1, 7, 32, 64])
def test_random_programs_get_right_rows(
    pair: Callable[..., Pair], config: PretrainedConfig, chunk: int
) -> None:
    """Contexts of any length come, grow, fork and are dropped, in any step."""
    model = pair(config, max_batch_tokens=chunk)
    source = random.Random(f"{config.model_type} {chunk}")
    known, flying = [(5, 6, 7)], set()
    for _ in range(25):
        newcomers = set()
        for _ in range(source.randrange(4)):
            context = source.choice(known)
            cut = source.choice([len(context), source.randint(1, len(context))])
            grown = source.choices(range(TOKENS), k=source.choice([0, 1, 1, 1, 5, 30, 90]))
            newcomers.add((*context[:cut], *grown)[:200])
        newcomers -= flying
        dropped = {one for one in flying if source.random() < 0.1}
        known.extend(sorted(newcomers))
        rows = step(model, *sorted(newcomers), dropped=sorted(dropped))
        flying = (flying | newcomers) - dropped - set(rows)
    for _ in range(sum(map(len, flying)) + 1):
        flying -= set(step(model))
    assert not flying


def test_adapters_keep_their_own_beginnings(
    tiny: str, lora_folders: dict[str, str], contexts: Contexts
) -> None:
    engine = HFEngine(
        AutoModelForCausalLM.from_pretrained(tiny), None, HFOptions(max_batch_tokens=CHUNK)
    )
    (prompt,) = contexts(1, 100)
    adapters = [None, Adapter("a", lora_folders["a"], 1), Adapter("b", lora_folders["b"], 2)]
    for adapter in adapters[1:]:
        add_lora(engine, adapter)
    queries = [Query(prompt, adapter) for adapter in adapters]
    queries += [Query((5, at), adapter) for at, adapter in enumerate(adapters)]
    answers, newcomers = {}, queries
    while len(answers) < len(queries):
        steps = engine.genlm_step(newcomers, [])
        answers.update({answer.request: answer.result for answer in steps})
        newcomers = []
    for query in queries:
        cold = engine.genlm_step([evolve(query, cold=True)], [])[0].result
        torch.testing.assert_close(answers[query], cold, atol=1e-4, rtol=0)


def test_a_pinned_prompt_is_gone_on_from_in_chunks(chunked: Pair, contexts: Contexts) -> None:
    (prompt,) = contexts(1, 100)
    assert chunked.engine.genlm_cache_prefix(Query(prompt))
    chunked.forwards.clear()
    longer = (*prompt, *range(70))
    assert len(finish(chunked, longer, (*prompt, 1))) == 3
    assert sum(chunked.forwards) == 70 + 1, "the pinned prompt is known"
    chunked.engine.genlm_clear_kv_cache()
    assert len(finish(chunked, longer)) == 6


def test_where_no_state_can_be_continued_each_prompt_has_a_step_of_its_own(
    pair: Callable[..., Pair], contexts: Contexts
) -> None:
    """A recurrent model takes many tokens as a beginning, whatever its state holds."""
    model = pair(MAMBA, max_batch_tokens=CHUNK)
    (one, other), (short,) = contexts(2, 100), contexts(1, 5, seed=1)
    assert [*step(model, one, other, short)] == [short, one]
    assert [*step(model, (*short, 1))] == [(*short, 1), other]
    growing = [(*one, 1), (*other, 2), (*short, 1, 3)]
    assert set(step(model, *growing)) == {*growing}, "known contexts grow together"


def test_contexts_in_snapshots_are_not_computed_from_one_another(
    pair: Callable[..., Pair], contexts: Contexts
) -> None:
    """So each of those that begin alike takes all of its tokens of a step."""
    model = pair(MAMBA, max_batch_tokens=CHUNK)
    (prompt,) = contexts(1, CHUNK - 12)
    one, other = (*prompt, 1), (*prompt, 2)
    assert [*step(model, one, other)] == [one]
    assert [*step(model)] == [other]


def test_a_prompt_that_fails_in_the_middle_fails_alone(tiny: str, contexts: Contexts) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    armed = False

    def refuse(module: Any, args: Any, kwargs: dict[str, torch.Tensor]) -> None:
        if armed and (kwargs["input_ids"] == 200).any():
            raise RuntimeError("a kernel failed")

    model.register_forward_pre_hook(refuse, with_kwargs=True)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    (prompt,) = contexts(1, 150)
    prompt = tuple(token % 200 for token in prompt)
    culprit = (*prompt[:100], 200, *prompt[100:])
    others = [prompt, prompt[50:], (1, 2, 3), (4, 5)]
    with AsyncTransformer(model, tokenizer, max_batch_tokens=CHUNK, cache_size=0) as lm:

        async def rows(*asked: Sequence[int]) -> list[Any]:
            return await asyncio.gather(*map(lm.next_token_logprobs, asked), return_exceptions=True)

        expected = asyncio.run(rows(*others))
        lm.clear_kv_cache()
        armed = True
        error, *given = asyncio.run(rows(culprit, *others))
        assert isinstance(error, EngineError)
        assert "of 151 tokens" in str(error)
        for row, right in zip(given, expected, strict=True):
            torch.testing.assert_close(row, right, atol=1e-4, rtol=0)
        armed = False
        (row,) = asyncio.run(rows(culprit))
        lm.clear_kv_cache()
        torch.testing.assert_close(row, asyncio.run(rows(culprit))[0], atol=1e-4, rtol=0)


def test_tasks_and_scores_beside_a_long_prompt(tiny: str, contexts: Contexts) -> None:
    (prompt,) = contexts(1, 150)

    async def ask(lm: AsyncTransformer) -> None:
        row, score, _, _, again = await asyncio.gather(
            lm.next_token_logprobs(prompt),
            lm.sequence_logprobs(prompt[:140], prompt[140:]),
            asyncio.to_thread(lm.cache_kv, prompt[:90]),
            asyncio.to_thread(lm.clear_kv_cache),
            lm.next_token_logprobs((*prompt, 1)),
        )
        rows = await asyncio.gather(
            *(lm.next_token_logprobs(prompt[:at]) for at in range(140, 150))
        )
        picked = torch.stack([one[token] for one, token in zip(rows, prompt[140:], strict=True)])
        torch.testing.assert_close(score, picked, atol=1e-4, rtol=0)
        for context, given in ((prompt, row), ((*prompt, 1), again)):
            lm.clear_kv_cache()
            torch.testing.assert_close(
                given, await lm.next_token_logprobs(context), atol=1e-4, rtol=0
            )

    options = {"max_batch_tokens": CHUNK, "cache_size": 0}
    with AsyncTransformer.from_name(tiny, **options) as lm:
        asyncio.run(ask(lm))


def test_what_is_dropped_beside_a_cold_context_is_not_answered(
    chunked: Pair, contexts: Contexts
) -> None:
    """The core does so where a wrapper failed in between."""
    (prompt,) = contexts(1, 3 * CHUNK)
    assert step(chunked, prompt) == {}
    cold = Query((1, 2, 3), cold=True)
    (answer,) = chunked.engine.genlm_step([cold], [Query(prompt)])
    assert answer.request is cold
    assert finish(chunked, (4, 5)) == [{(4, 5)}]
    assert [step(chunked) for _ in range(4)] == [{}] * 4


def test_the_output_layer_computes_the_rows_that_are_asked_and_whoever_calls_the_model_gets_all(
    llama: Any, contexts: Contexts
) -> None:
    computed = []
    llama.engine.model.get_output_embeddings().register_forward_hook(
        lambda module, args, logits: computed.append(logits[..., 0].numel())
    )
    llama.check(*contexts(3, 20))
    assert computed == [3]
    assert llama.engine.model(input_ids=torch.tensor(contexts(2, 9))).logits.shape[:2] == (2, 9)


@pytest.mark.parametrize("config", [LlamaConfig(**SHAPE), MAMBA], ids=["llama", "mamba"])
def test_a_model_whose_configuration_turns_its_cache_off_keeps_its_state(
    config: PretrainedConfig, pair: Callable[..., Pair], contexts: Contexts
) -> None:
    config = deepcopy(config)
    config.use_cache = False
    model = pair(config)
    (prompt,) = contexts(1, 20)
    model.check(prompt)
    model.forwards.clear()
    model.check((*prompt, 1))
    assert model.forwards == [1]
