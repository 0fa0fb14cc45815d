"""Attention over segments, beside plain attention over whole contexts."""

from __future__ import annotations

import torch

from genlm.core.context import Context
from genlm.hf.attention import slot_attention
from genlm.hf.layout import Chunks, PackedLayout, additive
from genlm.hf.partial import attend
from genlm.hf.patterns import Pattern
from genlm.hf.upload import Upload
from genlm.kit.segments import Slot, Trunk

from .shapes import DEVICE

HEADS, KV_HEADS, KEYS, VALUES = 4, 2, 8, 12


def test_values_may_have_another_width_than_keys() -> None:
    """Three contexts of 20 tokens over two trunks of 18, the last of them over 9 of its own."""
    torch.manual_seed(0)
    states = [
        (torch.randn(1, KV_HEADS, 20, KEYS), torch.randn(1, KV_HEADS, 20, VALUES)) for _ in range(3)
    ]
    trunks = [
        Trunk(Context(range(at, at + 18)), layers=[tuple(part[:, :, :18] for part in states[at])])
        for at in range(2)
    ]
    starts = [18, 18, 9]
    slots = [Slot(Context(range(at, at + 20)), index=at) for at in range(3)]
    width = 20 - min(starts)
    key, value = torch.zeros(3, KV_HEADS, width, KEYS), torch.zeros(3, KV_HEADS, width, VALUES)
    for slot, start, trunk in zip(slots, starts, [*trunks, trunks[1]], strict=True):
        slot.stand_on(trunk, start)
    states[2] = tuple(
        torch.cat([shared[:, :, :9], own[:, :, 9:]], dim=2)
        for shared, own in zip(states[1], states[2], strict=True)
    )
    for at, start in enumerate(starts):
        key[at, :, : 20 - start], value[at, :, : 20 - start] = (
            part[0, :, start:] for part in states[at]
        )
    query = torch.randn(3, HEADS, 1, KEYS)
    layout = PackedLayout(Chunks([(slot, 19, 20) for slot in slots]), [Pattern()], Upload(), DEVICE)
    module = torch.nn.Module()
    module.layer_idx, module.num_key_value_groups = 0, HEADS // KV_HEADS
    given, _ = slot_attention(module, query, key, value, None, genlm_layout=layout)
    for at, (keys, values) in enumerate(states):
        right = torch.nn.functional.scaled_dot_product_attention(
            query[at : at + 1], keys, values, enable_gqa=True
        )
        torch.testing.assert_close(given[at : at + 1], right.transpose(1, 2))


def test_half_precision_attention_over_a_fully_masked_trunk_is_finite() -> None:
    """Below the lowest float16 is only minus infinity; a softmax over nothing else is NaN."""
    query = torch.full((1, 1, 2, KEYS), 3.0, dtype=torch.float16)
    mask = additive(torch.tensor([[True], [False]]).expand(2, 5)[None, None], torch.float16)
    states = query[:, :, :1].expand(1, 1, 5, KEYS)
    output, log_sum_exp = attend(query, -states, states, mask, 1.0, False, softcap=50.0)
    assert output.isfinite().all()
    assert log_sum_exp.diff() < -(2**15)
