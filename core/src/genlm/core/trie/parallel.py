"""ParallelTokenCharacterTrie: the trie where there may be an accelerator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from genlm.core.trie.trie import TokenCharacterTrie


class ParallelTokenCharacterTrie(TokenCharacterTrie):
    """A :class:`TokenCharacterTrie` that computes on the machine's accelerator.

    :param decode: the vocabulary.
    :param device: a PyTorch device; ``None`` is CUDA or MPS where there is one, else the CPU.
    :raises InvalidOptionError: PyTorch knows no such device.
    """

    def __init__(self, decode: Iterable[Any], device: str | None = None) -> None:
        super().__init__(decode, device or best_device())


def best_device() -> str:
    """The accelerator that PyTorch sees, else ``"cpu"``."""
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
