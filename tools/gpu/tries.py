"""Sums over a trie's nodes beside a copy on the device."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.trie import enlarged
from genlm.core.tokenization import Token, decode_vocab
from genlm.core.trie.device import proven_reducer
from genlm.core.trie.nodes import Nodes, SortedItems
from genlm.core.trie.plan import Plan
from genlm.core.trie.reducer import TorchReducer
from genlm.core.trie.weights import SUM
from tools.gpu.steps import WideTokenizer
from tools.gpu.timing import median, on_cuda
from tools.smollm2 import default_folder


def trie_words(size: int) -> list[bytes]:
    """The bytes of a vocabulary: SmolLM2's if it is here, joined up to the size."""
    if not default_folder().exists():
        return enlarged(WideTokenizer().token_bytes(), size)
    from transformers import AutoTokenizer

    vocabulary, _ = decode_vocab(AutoTokenizer.from_pretrained(default_folder()))
    return enlarged([bytes(word) for word in vocabulary], size)


def trie_figures(words: list[bytes], device: str, rows: int, repeat: int) -> dict[str, Any]:
    """Sums over the trie, in PyTorch's own functions and, on CUDA, in the fused kernel: what of a
    copy's speed they reach, and their relative error in float32."""
    items = SortedItems.of(Token.vocabulary(words))
    plan = Plan.of(items.order, Nodes.of(items))
    ways: dict[str, Any] = {"plain": TorchReducer(plan, device)}
    if on_cuda(device):
        fused = proven_reducer(plan, device, ways["plain"])
        ways |= {"fused": fused} if fused else {}
    width = plan.nodes + plan.items
    source = torch.rand(rows, width, device=device)
    target = torch.empty_like(source)
    copied = median(lambda: target.copy_(source), device, repeat)
    bandwidth = 2 * 4e-9 * source.numel() / copied
    weights = torch.rand(rows, plan.items, device=device)
    exact = ways["plain"].reduce(SUM, weights.double())
    # Read once and written once, which no sum can do without.
    needed = 4e-9 * rows * (plan.items + width)
    figures: dict[str, Any] = {"copy_GB_per_s": bandwidth, "ways": list(ways)}
    for name, way in ways.items():
        took = median(lambda way=way: way.reduce(SUM, weights), device, repeat)  # type: ignore[misc]
        sums = way.reduce(SUM, weights).double()
        figures |= {
            f"{name}_ms": 1e3 * took,
            f"{name}_GB_per_s": needed / took,
            f"{name}_share_of_copy": needed / took / bandwidth,
            f"{name}_relative_error": float(((sums - exact) / exact).abs().nan_to_num().max()),
        }
    return figures
