"""Attention in groups is that of each request alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from genlm.sgl import attention
from genlm.sgl.attention import groups

HEADS, KEY_HEADS, SIZE = 6, 2, 8
REQUESTS = st.tuples(st.one_of(st.integers(0, 40), st.just(300)), st.sampled_from((1, 1, 1, 2, 33)))


def alone(query, keys, values):
    """The outputs of one request's last positions; tensors are ``[positions, heads, size]``."""
    new, length = len(query), len(keys)
    seen = torch.ones(new, length, dtype=torch.bool).tril(length - new)
    query, keys, values = (each.transpose(0, 1) for each in (query, keys, values))
    return scaled_dot_product_attention(
        query, keys, values, attn_mask=seen, scale=0.3, enable_gqa=True
    ).transpose(0, 1)


@pytest.mark.parametrize("most", [attention.MAX_GROUP_POSITIONS, 100])
@given(batch=st.lists(REQUESTS, min_size=1, max_size=12), seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_groups_are_requests_alone(most, batch, seed):
    """Requests have any length before their new tokens, and any places in the pool. All other
    places of the pool are NaN."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "MAX_GROUP_POSITIONS", most)
        source = torch.Generator().manual_seed(seed)
        new = [count for _, count in batch]
        lengths = [before + count for before, count in batch]
        pool = torch.randperm(sum(lengths) + 5, generator=source)
        keys, values = torch.full((2, len(pool), KEY_HEADS, SIZE), torch.nan)
        query = torch.randn(sum(new), HEADS, SIZE, generator=source)
        tables = torch.full((len(batch), max(lengths)), int(pool[-1]))
        own = torch.split(pool[: sum(lengths)], lengths)
        for i, places in enumerate(own):
            tables[i, : len(places)] = places
            for each in (keys, values):
                each[places] = torch.randn(len(places), KEY_HEADS, SIZE, generator=source)
        output = torch.full_like(query, torch.nan)
        for group in groups(tables, lengths, new, torch.float32):
            output[group.tokens] = group.attend(query, keys, values, 0.3)
        parts = zip(torch.split(query, new), own, strict=True)
        expected = torch.cat([alone(part, keys[at], values[at]) for part, at in parts])
    torch.testing.assert_close(output, expected)


def test_requests_of_similar_length_form_one_group():
    tables, lengths = torch.arange(64 * 200).view(64, 200), [200 - i % 40 for i in range(64)]
    assert len(list(groups(tables, lengths, [1] * 64, torch.float32))) == 1
