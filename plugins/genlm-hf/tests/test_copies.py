"""How often a forward copies from the host to the device; counted without a device."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from genlm.core.segments import Row
from genlm.hf.layout import Chunk, PackedLayout
from genlm.hf.sequence import TokenSequence


class Copies(TorchDispatchMode):
    """Counts copies to another device."""

    count = 0

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += call is torch.ops.aten._to_copy.default
        return call(*args, **(kwargs or {}))


def test_indices_go_to_the_device_once_in_a_forward() -> None:
    # Rows that are not neighbours, so that reading them needs indices too.
    chunks = [Chunk(Row(TokenSequence([1]).key, 0, slot=slot), 5, 7) for slot in (0, 2)]
    layout = PackedLayout(chunks, [])
    states = torch.empty(4, 1, 8, 4, device="meta")
    new = torch.empty(4, 1, 1, 4, device="meta")
    with Copies() as copies:
        for layer in range(30):
            for which in (0, 1):
                layout.write(states, new, layer, which)
                assert layout.read(states).shape == (2, 1, 7, 4)
    assert copies.count == 3
