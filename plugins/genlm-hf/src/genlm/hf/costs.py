"""What a device takes to launch a kernel, in work that could be saved by one."""

from __future__ import annotations

import torch
from attrs import frozen


@frozen
class Costs:
    """What is done on a device instead of launching more kernels.

    Attributes:
        slot_by_slot: Whether nothing is: then a fork copies slot by slot. Elsewhere all slots are
            copied together, and twice.
        products: Attention over slots may be padded by so many tokens, times columns.
        plenty: See :class:`genlm.kit.kv.sharing.SharingCosts`. On an H200, launching the kernels of
            a trunk took as long as computing about so many positions in slots.
        forward: So many tokens more would take as long as a forward of their own.
    """

    slot_by_slot: bool = False
    products: int = 2**17
    plenty: int = 2**18
    forward: int = 1024


#: By the kind of device. All others launch kernels.
COSTS = {"cpu": Costs(slot_by_slot=True, products=0, plenty=0, forward=16)}


def costs_of(device: torch.device) -> Costs:
    """What launching a kernel costs on a device."""
    return COSTS.get(device.type, Costs())
