"""Models whose numbers change at some length: rows, warm and cold, and scores say the same on both
sides of it, and what transformers says."""

from __future__ import annotations

import random

import pytest
import torch
from structlog.testing import capture_logs

from genlm.core.types import Query
from tests.adapter_outcomes import reference_rows

CHANGE, LONGEST = 40, 80  # tokens
IDS = tuple(random.Random(1).choices(range(1000, 40000), k=LONGEST))
ATOL = 5e-4

LONGROPE = {
    "original_max_position_embeddings": CHANGE,
    "max_position_embeddings": 256,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.1 * i for i in range(16)],
        "long_factor": [2.0 + 0.5 * i for i in range(16)],
        "original_max_position_embeddings": CHANGE,
    },
}
DYNAMIC = {
    "max_position_embeddings": CHANGE,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
}
MIXED = {
    "head_dim": 32,
    "sliding_window": CHANGE,
    "layer_types": ["sliding_attention", "full_attention"],
}


@pytest.mark.parametrize(
    ("family", "config", "longest", "as_transformers"),
    [
        ("Mistral", {"sliding_window": CHANGE}, LONGEST, range(10, LONGEST)),
        ("Gemma3Text", MIXED, LONGEST, range(10, LONGEST)),
        ("Phi3", LONGROPE, CHANGE - 1, range(10, CHANGE)),
        ("Llama", DYNAMIC, CHANGE, range(10, CHANGE + 1)),
    ],
    ids=["window", "windows in some layers", "longrope", "dynamic"],
)
def test_scores_and_rows_agree_across_a_change(
    make_tiny, load_briefly, family, config, longest, as_transformers
):
    path = make_tiny(family, **config)
    engine = load_briefly(path, max_model_len=LONGEST + 1)
    assert engine.max_context == longest
    lengths = range(10, longest + 1)
    (scores,) = engine.score([Query(IDS[:10])], [IDS[10:longest]])
    cold = {n: engine.ask(Query(IDS[:n], cold=True))[0] for n in lengths}
    at_cold = torch.stack([cold[n][IDS[n]] for n in lengths[:-1]])
    torch.testing.assert_close(scores, at_cold, atol=ATOL, rtol=0)
    for n in lengths:
        (warm,) = engine.ask(Query(IDS[:n]))
        torch.testing.assert_close(warm, cold[n], atol=ATOL, rtol=0)
    # Each by a forward of its own: the embeddings of some models depend on its length.
    expected = reference_rows(path, None, [IDS[:n] for n in as_transformers])
    for n, row in zip(as_transformers, expected, strict=True):
        torch.testing.assert_close(cold[n], row, atol=ATOL, rtol=0)


def test_contexts_end_where_dynamic_embeddings_do(make_tiny, load_briefly):
    """vLLM would take four times as many tokens, and read beyond the table of embeddings."""
    with capture_logs() as logs:
        engine = load_briefly(make_tiny("Llama", **DYNAMIC), max_model_len=4 * CHANGE)
    assert engine.max_context == CHANGE
    assert [each["tokens"] for each in logs if each["event"] == "vllm.context_limited"] == [CHANGE]
