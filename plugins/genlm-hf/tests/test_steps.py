"""Long contexts are computed in chunks, and others are answered between two of them."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig

from genlm.core import Query

from .models import draw, llama_config, proven
from .shapes import LFM2, MAMBA, SHAPE

pytestmark = pytest.mark.any_version

CHUNK = 32


@pytest.fixture
def chunked() -> Any:
    """An engine whose chunks are short."""
    return proven(llama_config(), max_batch_tokens=CHUNK)


def test_hybrid_model_computes_long_contexts_in_chunks() -> None:
    model = proven(LFM2, max_batch_tokens=CHUNK)
    (prompt,), (short,) = draw(1, 100), draw(1, 5, seed=1)
    assert model.step(prompt) == set()
    assert model.step(short) == {short}
    assert [model.step() for _ in range(2)] == [set(), {prompt}]
    assert max(model.forwards) <= CHUNK
    assert sum(model.forwards) == 105, "nothing is computed twice"


def finish(model: Any, *contexts: Sequence[int]) -> list[set[tuple[int, ...]]]:
    """The contexts that each step answers, until all are answered."""
    left, answered = {tuple(one) for one in contexts}, [model.step(*contexts)]
    while left - set().union(*answered):
        assert len(answered) < 100, "a request is passed over for ever"
        answered.append(model.step())
    return answered


@pytest.mark.parametrize("length", [32, 33, 64, 65, 100])
def test_rows_around_the_ends_of_chunks(chunked: Any, length: int) -> None:
    (prompt,) = draw(1, length)
    steps = finish(chunked, prompt)
    assert len(steps) == -(-length // CHUNK)
    assert max(chunked.forwards) <= CHUNK
    assert sum(chunked.forwards) == length, "nothing is computed twice"
    grown = prompt
    for token in range(CHUNK + 1):  # rows that continue from chunks
        grown = (*grown, token)
        assert chunked.step(grown)
    chunked.step((*prompt[: length // 2], 7), (*prompt[: CHUNK - 1], 8), (*prompt, 9))


def test_a_short_context_is_answered_beside_a_chunk(chunked: Any) -> None:
    (prompt,), (short,) = draw(1, 100), draw(1, 5, seed=1)
    assert chunked.step(prompt) == set()
    assert chunked.step(short) == {short}
    assert chunked.forwards == [CHUNK, CHUNK], "in the forward of the second chunk"
    assert finish(chunked, (1, 2))[0] == {(1, 2)}


def test_step_limit_counts_whole_contexts_if_sharing_does_not_pay() -> None:
    """Four of 12 tokens save 33, which are not worth a forward: all are computed whole."""
    model = proven(llama_config(), max_batch_tokens=64)
    contexts = [(*ids, token) for ids in draw(12, 11) for token in range(4)]
    answered = model.step(*contexts)
    assert 0 < len(answered) < len(contexts)
    assert sum(model.forwards) <= 64
    while model.step():
        pass


def test_a_step_is_filled_to_its_last_token(chunked: Any) -> None:
    (short,), (one, other) = draw(1, CHUNK // 4), draw(2, CHUNK - CHUNK // 4, seed=1)
    assert chunked.step(short, one, other) == {short, one}
    assert chunked.forwards == [CHUNK]


def test_new_prompt_costs_growing_contexts_only_its_own_tokens(chunked: Any) -> None:
    (prompt,), growing = draw(1, 150), draw(4, 6, seed=1)
    chunked.step(*growing)
    chunked.forwards.clear()
    steps, answered, new_requests = 0, False, [prompt]
    while not answered:
        growing = [(*one, steps) for one in growing]
        rows = chunked.step(*new_requests, *growing)
        assert set(growing) <= rows, "all of them are answered in every step"
        new_requests, answered, steps = [], prompt in rows, steps + 1
    assert steps == -(-150 // (CHUNK - 4))
    assert len(chunked.forwards) == steps, "each step is one forward"
    assert sum(chunked.forwards) == 150 + 4 * steps, "nothing is computed twice"


def test_context_with_the_fewest_missing_tokens_is_answered_first(chunked: Any) -> None:
    (known,), (prompt,) = draw(1, 100), draw(1, 60, seed=1)
    finish(chunked, known)
    assert chunked.step(prompt, (*known, 1)) == {(*known, 1)}


def test_no_request_starves_while_others_keep_coming(chunked: Any) -> None:
    (prompt,), fresh = draw(1, 150), iter(draw(200, 8, seed=1))
    new_requests, answered, steps = [prompt], set[tuple[int, ...]](), 0
    while prompt not in answered:
        new_requests += [next(fresh) for _ in range(8)]  # twice as much as fits beside a chunk
        answered |= chunked.step(*new_requests)
        new_requests, steps = [], steps + 1
    assert steps <= 150 // (CHUNK // 2) + 1
    assert len(answered) > steps, "and others are answered meanwhile"


def test_long_prompts_are_finished_in_the_order_asked(chunked: Any) -> None:
    prompts = draw(3, 70)
    steps = finish(chunked, *prompts)
    assert [one for answered in steps for one in sorted(answered, key=prompts.index)] == prompts
    assert len(steps) <= 210 // CHUNK + 1


def test_a_prompt_that_is_dropped_is_not_computed_any_further(chunked: Any) -> None:
    (prompt,), (other,) = draw(1, 200), draw(1, 90, seed=1)
    chunked.step(prompt)
    assert chunked.step(dropped=[prompt]) == set()
    assert chunked.forwards == [CHUNK], "the step that drops it runs nothing"
    assert len(finish(chunked, other)) == 3
    chunked.forwards.clear()
    finish(chunked, prompt)
    assert sum(chunked.forwards) == 200 - CHUNK, "what was computed of it is known still"


def test_failing_chunk_leaves_the_engine_usable(chunked: Any) -> None:
    (prompt,), grown = draw(1, 150), draw(3, 6, seed=1)
    chunked.step(*grown)
    chunked.step(prompt)
    grown = [(*one, 1) for one in grown]
    head = chunked.engine.model.get_output_embeddings()

    def refuse(*given: object) -> None:
        raise RuntimeError("a kernel failed")

    hook = head.register_forward_pre_hook(refuse)  # by then, all layers have written their state
    with pytest.raises(RuntimeError, match="a kernel failed"):
        chunked.step(*grown)
    hook.remove()
    assert chunked.step((9, 9)) == {(9, 9)}, "nothing of the failed step is in flight"
    chunked.forwards.clear()
    assert set().union(*finish(chunked, prompt, *grown)) == {prompt, *grown}
    assert sum(chunked.forwards) == 150 - CHUNK + 3, "what was known before is known still"


@pytest.mark.parametrize("room", [0, 40, 120, 200])
def test_state_lost_for_lack_of_memory_is_computed_again(room: int) -> None:
    """With room for that many positions; every step brings a context that drives out others."""
    position = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, head size, bytes
    model = proven(llama_config(), max_batch_tokens=CHUNK, kv_cache_bytes=room * position)
    (prompt,), others = draw(1, 150), draw(20, 15, seed=1)
    answered = model.step(prompt)
    for other in others:
        answered |= model.step(other)
    assert answered == {prompt, *others}
    assert sum(model.forwards) <= 150 + CHUNK * 5 + 150 + 20 * 15, "it is computed twice at most"


def test_each_prompt_gets_its_own_step_if_state_cannot_be_continued() -> None:
    """A recurrent model takes many tokens as a beginning, whatever its state holds."""
    model = proven(MAMBA, max_batch_tokens=CHUNK)
    (one, other), (short,) = draw(2, 100), draw(1, 5, seed=1)
    assert model.step(one, other, short) == {short, one}
    assert model.step((*short, 1)) == {(*short, 1), other}
    growing = [(*one, 1), (*other, 2), (*short, 1, 3)]
    assert model.step(*growing) == {*growing}, "known contexts grow together"


def test_contexts_with_snapshots_are_counted_separately() -> None:
    """So each context with a common prefix counts with all of its tokens."""
    model = proven(MAMBA, max_batch_tokens=CHUNK)
    (prompt,) = draw(1, CHUNK - 12)
    one, other = (*prompt, 1), (*prompt, 2)
    assert model.step(one, other) == {one}
    assert model.step() == {other}


def test_stepwise_sequences_count_whole_behind_their_prefix() -> None:
    model = proven(MAMBA, max_batch_tokens=64)
    (text,) = draw(1, 60)
    assert model.step(text[:20], text[:40], text) == {text[:20], text[:40]}
    assert sum(model.forwards) <= 64
    assert model.step() == {text}


def test_request_dropped_beside_a_cold_context_is_not_answered(chunked: Any) -> None:
    """The core does this if a wrapper has failed in between."""
    (prompt,) = draw(1, 3 * CHUNK)
    assert chunked.step(prompt) == set()
    cold = Query((1, 2, 3), cold=True)
    (answer,) = chunked.engine.genlm_step([cold], [Query(prompt)], chunked.engine.vocab_size)
    assert answer.request is cold
    assert finish(chunked, (4, 5)) == [{(4, 5)}]
    assert [chunked.step() for _ in range(4)] == [set()] * 4


def test_output_layer_computes_only_wanted_rows_and_direct_calls_get_all(
    llama: Any,
) -> None:
    computed = []
    llama.engine.model.get_output_embeddings().register_forward_hook(
        lambda module, args, logits: computed.append(logits[..., 0].numel())
    )
    llama.check(*draw(1, 5))  # this tries the new hook first
    computed.clear()
    llama.check(*draw(3, 20))
    assert computed == [3]
    ids = torch.tensor(draw(2, 9), device=llama.engine.model.device)
    assert llama.engine.model(input_ids=ids).logits.shape[:2] == (2, 9)


@pytest.mark.parametrize("config", [LlamaConfig(**SHAPE), MAMBA], ids=["llama", "mamba"])
def test_a_model_whose_configuration_turns_its_cache_off_keeps_its_state(
    config: PretrainedConfig,
) -> None:
    config = deepcopy(config)
    config.use_cache = False
    model = proven(config)
    (prompt,) = draw(1, 20)
    model.check(prompt)
    model.forwards.clear()
    model.check((*prompt, 1))
    assert model.forwards == [1]
