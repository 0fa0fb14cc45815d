"""The cost of launching kernels on a device, in units of the work that a further kernel can
save."""

from __future__ import annotations

import torch
from attrs import frozen


@frozen
class Costs:
    """How much extra work takes as long as launching more kernels on a device.

    Attributes:
        slot_by_slot: Whether launching costs so little that a fork copies slots one by one.
            Otherwise all slots are copied together, twice.
        products: How much padding, in tokens times columns, costs as much as a further call of
            attention over slots.
        plenty: See :class:`genlm.kit.kv.sharing.SharingCosts`. On an H200, launching the kernels of
            a trunk took as long as computing about this many positions in slots.
        forward: How many tokens take as long as one more forward.
    """

    slot_by_slot: bool = False
    products: int = 2**17
    plenty: int = 2**18
    forward: int = 1024


#: The costs by type of device. All devices that are not listed have the costs of a GPU.
COSTS = {"cpu": Costs(slot_by_slot=True, products=0, plenty=0, forward=16)}


def costs_of(device: torch.device) -> Costs:
    """The costs of launching kernels on a device."""
    return COSTS.get(device.type, Costs())
