"""Sums over a trie's nodes beside a copy on the device."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.trie import enlarged
from genlm.core.tokenization import Token, decode_vocab
from genlm.core.trie.bags import BagKernel
from genlm.core.trie.device import DeviceKernel
from genlm.core.trie.nodes import Nodes, SortedItems
from genlm.core.trie.weights import SUM
from tools.gpu.steps import WideTokenizer
from tools.gpu.timing import median
from tools.launched import Launched
from tools.smollm2 import default_folder


def trie_words(size: int) -> list[bytes]:
    """The bytes of a vocabulary: SmolLM2's if it is here, joined up to the size."""
    if not default_folder().exists():
        return enlarged(WideTokenizer().token_bytes(), size)
    from transformers import AutoTokenizer

    vocabulary, _ = decode_vocab(AutoTokenizer.from_pretrained(default_folder()))
    return enlarged([bytes(word) for word in vocabulary], size)


#: The two kernels that sum on a device. Tries use the first one.
WAYS: dict[str, type[DeviceKernel]] = {"rounds": DeviceKernel, "bags": BagKernel}


def trie_figures(
    words: list[bytes], device: str, rows: int, repeat: int, way: str
) -> dict[str, Any]:
    """Sums over the trie: what of a copy's speed they reach, their launches, and their relative
    error in float32."""
    items = SortedItems.of(Token.vocabulary(words))
    kernel = WAYS[way](items.order, Nodes.of(items), device)
    plan = kernel.plan
    width = plan.nodes + plan.items
    source = torch.rand(rows, width, device=device)
    target = torch.empty_like(source)
    copied = median(lambda: target.copy_(source), device, repeat)
    bandwidth = 2 * 4e-9 * source.numel() / copied
    weights = torch.rand(rows, plan.items, device=device)
    took = median(lambda: kernel.combine(SUM, weights), device, repeat)
    with Launched() as launched:  # type: ignore[no-untyped-call]
        kernel.combine(SUM, weights)
    sums, exact = kernel.combine(SUM, weights).double(), kernel.combine(SUM, weights.double())
    # Every sum must read its inputs once and write its results once.
    needed = 4e-9 * rows * (plan.items + width)
    return {
        "copy_GB_per_s": bandwidth,
        "ms": 1e3 * took,
        "GB_per_s": needed / took,
        "launches": launched.count,
        "share_of_copy": needed / took / bandwidth,
        "relative_error": float(((sums - exact) / exact).abs().nan_to_num().max()),
    }
