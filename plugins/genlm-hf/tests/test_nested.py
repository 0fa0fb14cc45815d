"""Contexts that are prefixes of others in the same step. Their rows are read from the others'
forward, and cost no tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BloomConfig, DeepseekV3Config, LlamaConfig, MistralConfig, PretrainedConfig

from genlm.hf.costs import COSTS, Costs
from genlm.hf.strategies import Computed
from genlm.kit.kv.placement import Placement
from genlm.kit.kv.sequence import TokenSequence

from .models import draw, llama_config, proven, unproven
from .shapes import LATENT, SHAPE, TOKENS
from .test_families import RWKV

pytestmark = pytest.mark.any_version

#: Three modes: any chunks in one forward, with windows that end within a chunk; the same without
#: trunks; and forwards of equal lengths only.
CONFIGS = {
    "shared": LlamaConfig(**SHAPE),
    "windows": MistralConfig(**SHAPE, sliding_window=7),
    "packed": DeepseekV3Config(**LATENT),
    "uniform": BloomConfig(
        vocab_size=TOKENS, hidden_size=32, n_layer=2, n_head=4, bos_token_id=256, eos_token_id=256
    ),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("chunk", [16, 4096], ids=["in several forwards", "in one"])
def test_all_prefixes_of_a_text_cost_as_much_as_the_text(
    config: PretrainedConfig, chunk: int
) -> None:
    (text,) = draw(1, 40)
    prefixes = [text[:length] for length in range(1, len(text) + 1, 3)]
    model = proven(config, max_batch_tokens=chunk)
    model.check(*prefixes[::-1])
    assert sum(model.forwards) == len(text)
    model.forwards.clear()
    # These start from the state within the text.
    model.check(*[(*prefix, 7) for prefix in prefixes[:10:3]])
    assert sum(model.forwards) == 4


@pytest.mark.parametrize("costs", [COSTS["cpu"], Costs()], ids=["on a CPU", "elsewhere"])
def test_step_answers_as_many_requests_as_its_tokens_allow(
    costs: Costs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All prefixes of a text together are many times as long as that, and no more to compute."""
    monkeypatch.setitem(COSTS, "cpu", costs)
    (text,) = draw(1, 60)
    model = proven(LlamaConfig(**SHAPE), max_batch_tokens=64)
    assert len(model.step(*[text[:length] for length in range(1, 61)])) == 60
    assert model.forwards == [60]


def test_a_model_without_state_computes_the_longest_alone() -> None:
    (text,), (other,) = draw(1, 40), draw(1, 30, seed=1)
    model = proven(RWKV)
    model.check(*[text[:length] for length in range(1, 41)], other)
    assert model.forwards == [2 * 40]
    model.forwards.clear()
    model.check_scores(*[(text[:length], text[length : length + 3]) for length in (5, 9, 20)])
    assert model.forwards == [22]


def test_contexts_beyond_the_reuse_limit_are_computed_separately() -> None:
    """Beyond the limit, the logits at an earlier position are not the row of the context that ends
    there, so all tokens of each context count."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config = llama_config(max_position_embeddings=24, rope_parameters=rope)
    model = unproven(config, max_batch_tokens=128)
    (text,) = draw(1, 40)
    left = {text[:length] for length in range(20, 41, 2)}
    new = [*left]
    while left:
        left -= model.step(*new)
        assert sum(model.forwards) <= 128 + 24
        model.forwards.clear()
        new = []


def test_drafts_of_particles_cost_their_tokens() -> None:
    model = proven(LlamaConfig(**SHAPE))
    particles = draw(6, 20)
    model.check(*particles)
    for step in range(4):
        drafts = draw(6, 5, seed=step)
        model.forwards.clear()
        model.check(
            *[
                (*particle, *draft[:length])
                for particle, draft in zip(particles, drafts, strict=True)
                for length in range(6)
                if step or length  # their own rows are there at first
            ]
        )
        assert model.forwards == [6 * (5 + bool(step))]
        particles = [
            (*particle, *draft[:at], 9)
            for at, (particle, draft) in enumerate(zip(particles, drafts, strict=True))
        ]


def test_rows_inside_a_trunk_and_its_slots_are_right() -> None:
    model = proven(LlamaConfig(**SHAPE))
    (text,) = draw(1, 600)
    model.check(*draw(1, 640, seed=2))  # the length that is compared with a cold row
    model.forwards.clear()
    longer = [(*text, *tail) for tail in draw(4, 30, seed=1)]
    inside = [text[:length] for length in (1, 333, 599, 600)]
    model.check(*longer, *inside, longer[0][:601], longer[3][:617])
    assert sum(model.forwards) <= 600 + 4 * 30 + 20
    model.check(*[(*one, 5) for one in (*inside, *longer)])


def test_scores_inside_of_scores() -> None:
    model = proven(LlamaConfig(**SHAPE))
    (context,) = draw(1, 20)
    tails = [(1,), (1, 2, 3), (1, 2, 3, 4, 5), (9, 9)]
    model.check_scores(*[(context, tail) for tail in tails], ((*context, 1), (2, 8)))
    assert model.forwards == [24 + 21], "of two sequences, without their last tokens"


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_candidates_cost_the_tokens_of_their_prefix_tree(config: PretrainedConfig) -> None:
    model = proven(config)
    (context,), (common,) = draw(1, 20), draw(1, 30, seed=1)
    asked = [(context, (*common[: 30 - at], at, 7, 8)) for at in range(6)]
    asked += [(context, one[1][:-1]) for one in asked] + [((*context, *common[:4]), common[4:])]
    model.check_scores(*asked)
    # Each leaves the longest before its last tokens, one of which gives no row.
    assert sum(model.forwards) <= 20 + 32 + 5 * 3
    model.forwards.clear()
    model.check_scores(*[(context, (token, 3, 4)) for token in range(4)])
    assert sum(model.forwards) == 4 * 3, "too few in common to compute them apart"


def test_context_with_a_nan_row_inside_is_broken() -> None:
    """All state of the context is dropped then, though its own row is right."""
    whole, inside = (Placement(at, TokenSequence(range(n))) for at, n in ((2, 9), (0, 5)))
    whole.inside = [inside]
    sound = Placement(1, TokenSequence((7, 8)))
    done = Computed([whole, sound], [0, 1, 2], [torch.tensor([True, False, False])])
    assert done.broken() == {2}


def test_lack_of_memory_inside_a_text_keeps_rows_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answered positions are not computed again, and the others are computed in smaller parts."""
    model = proven(LlamaConfig(**SHAPE), max_batch_tokens=16)
    (text,) = draw(1, 40)
    packed, calls = model.engine._runner.packed, []

    def short(*args: Any) -> torch.Tensor:
        calls.append(args)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("out of memory")
        return packed(*args)

    monkeypatch.setattr(model.engine._runner, "packed", short)
    model.check(*[text[:length] for length in range(1, 41)])
    assert len(calls) > 2


def test_texts_that_differ_in_one_word_share_their_computation() -> None:
    """They are scored together, as a sampler of single words requests them."""
    model = proven(LlamaConfig(**SHAPE))
    (text,) = draw(1, 9)
    asked = [(text[:1], (*text[1:4], token, *text[5:])) for token in range(20)]
    model.check_scores(*asked)
    assert model.forwards == [8, 19 * 4], "without the last token, of which nothing is asked"
