"""Errors of mlx-lm 0.32 and MLX 0.32 themselves. When upstream corrects one, its test fails, and
the workaround can be removed."""

from __future__ import annotations

import random
import signal
import sys

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from transformers import AutoModelForCausalLM

from genlm.mlx.repairs import repair

from .late import ended
from .watched import Folders, by_mlx_lm

FIXED = "fixed upstream: drop {} and this test"

#: A thread that has drawn numbers, and ends late.
DRAWS = """
import mlx.core as mx

drawn = threading.Event()

def work():
    mx.eval(mx.random.normal((3,)))
    if sys.argv[1] == "clear":
        mx.clear_streams()
    drawn.set()
    wait()

threads = [threading.Thread(target=work, daemon=True)]
threads[0].start()
drawn.wait()
"""


def test_mlx_lm_ignores_rotary_settings_of_transformers_5(folders: Folders) -> None:
    model, _ = load_model(folders("llama"))
    assert model.args.rope_theta != 500.0, FIXED.format("`amended` in loading.py")


def test_gpt2_of_mlx_lm_needs_a_setting_absent_in_transformers_5(folders: Folders) -> None:
    # Once this passes, `amended` in loading.py need not add the setting.
    with pytest.raises(TypeError, match="n_ctx"):
        load_model(folders("gpt2"))


def test_rotating_caches_padded_on_the_left_are_masked_wrongly_after_a_single_token(
    folders: Folders,
) -> None:
    """``Block.settle`` avoids this case: sequences of 3 and 15 tokens, then one token each, then
    several."""
    model = by_mlx_lm(folders("gemma3"))
    rng = random.Random(0)
    texts = [[rng.randrange(256) for _ in range(length)] for length in (3 + 1 + 4, 15 + 1 + 4)]
    cache = [layer.merge([layer, layer]) for layer in make_prompt_cache(model)]
    for layer in cache:
        layer.prepare(lengths=[3, 15], right_padding=[12, 0])
    model(mx.array([texts[0][:3] + [0] * 12, texts[1][:15]]), cache=cache)
    for layer in cache:
        layer.finalize()
    model(mx.array([texts[0][3:4], texts[1][15:16]]), cache=cache)
    batched = model(mx.array([texts[0][4:], texts[1][16:]]), cache=cache)[0, -1]
    alone = model(mx.array(texts[:1]), cache=make_prompt_cache(model))[0, -1]
    assert mx.abs(batched - alone).max().item() > 1e-2, FIXED.format("`settle` in block.py")


def test_rotating_caches_reject_a_ragged_block_of_one_token(folders: Folders) -> None:
    model = by_mlx_lm(folders("gemma3"))
    cache = [layer.merge([layer, layer]) for layer in make_prompt_cache(model)]
    for layer in cache:
        layer.prepare(lengths=[1, 2], right_padding=[1, 0])
    # Fed in twos, the third column comes alone.
    model(mx.array([[5, 6], [7, 8]]), cache=cache)
    # If it no longer raises, `Runner.feed` may divide chunks at any length.
    with pytest.raises(RuntimeError, match="finalize"):
        model(mx.array([[0], [9]]), cache=cache)


def test_the_sum_over_a_large_vocabulary_is_inexact_on_the_cpu() -> None:
    logits = np.random.default_rng(0).normal(0, 3, size=200_000).astype(np.float32)
    exact = np.log(np.exp(logits.astype(np.float64)).sum())
    found = mx.logsumexp(mx.array(logits), stream=mx.cpu).item()
    assert abs(found - exact) > 1e-4, FIXED.format("PyTorch's log_softmax in `_rows` of engine.py")


@pytest.mark.skipif(
    sys.platform != "linux", reason="how the thread is seen to end needs Linux's /proc"
)
@pytest.mark.skipif(
    sys.version_info >= (3, 14), reason="Python 3.14 no longer unwinds threads that come too late"
)
def test_a_thread_that_ends_late_aborts_the_process_unless_it_clears_its_streams() -> None:
    assert ended(DRAWS, "clear").returncode == 0
    assert ended(DRAWS, "leave").returncode == -signal.SIGABRT, FIXED.format(
        "`mx.clear_streams` in `MlxEngine.genlm_close`"
    )


@pytest.mark.parametrize(
    ("family", "off", "workaround"),
    [
        ("falcon_h1", 1e-2, "`_left_out`"),  # multipliers of keys and values
        ("gemma3", 3e-4, "`Gemma3Embedding`"),  # rounds what it multiplies embeddings with
    ],
)
def test_mlx_lm_leaves_out_or_rounds_these_numbers(
    folders: Folders, family: str, off: float, workaround: str
) -> None:
    model = by_mlx_lm(folders(family))
    reference = AutoModelForCausalLM.from_pretrained(folders(family))
    with torch.no_grad():
        logits = reference(torch.tensor([[5, 6, 7]])).logits[0, -1]

    def distance() -> float:
        found = torch.tensor(model(mx.array([[5, 6, 7]]))[0, -1].tolist())
        return (found - logits).abs().max().item()

    assert distance() > off, FIXED.format(f"{workaround} in repairs.py")
    repair(model)
    assert distance() < 1e-4
