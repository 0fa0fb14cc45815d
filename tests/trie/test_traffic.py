"""How many bytes the sums over a trie go through; ``docs/gpu.md`` has the figures."""

from __future__ import annotations

from tools.trie_traffic import Traffic, plan_of


def test_every_value_is_counted():
    """One item below two nodes: the least is to read it, and to write three values."""
    assert Traffic.of(plan_of([b"a"])) == Traffic(
        least=4 * 4,
        plain=4 * (2 + 1 + 6),  # the copy of the item, the padding, three values gathered
        plain_once=4 * (2 + 1 + 4),
        fused=4 * 6,
        fused_once=4 * 4,
    )


def test_fused_kernels_go_through_a_third_less_than_pytorchs_functions():
    words = [number.to_bytes(3, "big") for number in range(0, 1 << 24, 511)]
    assert len(words) > 1 << 15
    times = Traffic.of(plan_of(words)).times_least()
    assert times["fused_once"] <= 2.0
    assert times["fused"] <= 2.4
    assert times["fused"] < 0.65 * times["plain"]
