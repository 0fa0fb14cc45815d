"""How many bytes the sums over a trie read and write, beside the fewest possible.

    python -m tools.trie_traffic

The fewest: every weight is read once and every result is written once. What PyTorch's own functions
go through is counted as they are called. What the fused kernels go through follows from the plan.
Indices are not counted: they are the same for all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.trie import enlarged
from genlm.core.tokenization import Token, decode_vocab
from genlm.core.trie.kernels.torch_reducer import TorchReducer
from genlm.core.trie.nodes import Nodes, SortedItems
from genlm.core.trie.plan import Plan
from genlm.core.trie.weights import SUM
from tools.smollm2 import default_folder

#: SmolLM2's vocabulary, and one as large as that of Qwen 2.5.
SIZES = (49_152, 151_665)

#: A weight in float32.
BYTES = 4


@frozen
class Traffic:
    """Bytes for each row of weights in float32.

    Attributes:
        least: Weights read once, results written once.
        plain: What PyTorch's own functions read and write.
        plain_once: The same, if what a function reads again comes from the GPU's cache.
        fused: What the fused kernels read and write.
        fused_once: The same, if what a launch reads again comes from the GPU's cache.
    """

    least: int
    plain: int
    plain_once: int
    fused: int
    fused_once: int

    @classmethod
    def of(cls, plan: Plan) -> Traffic:
        plain, weights = TorchReducer(plan, "cpu"), torch.zeros(1, plan.items)
        with _Counter() as counter:
            plain.reduce(SUM, weights)
        reads = [
            *(np.append(_new(plan, number), step.other) for number, step in enumerate(plan.rounds)),
            plan.rest.values,
            np.append(plan.place, np.arange(plan.items)),
        ]
        written = plan.width + plan.nodes  # results of rounds and rest, then nodes and items
        return cls(
            least=BYTES * (2 * plan.items + plan.nodes),
            plain=BYTES * counter.elements,
            plain_once=BYTES * (counter.elements - counter.again),
            fused=BYTES * (sum(map(len, reads)) + written),
            fused_once=BYTES * (sum(len(np.unique(read)) for read in reads) + written),
        )

    def times_least(self) -> dict[str, float]:
        """How often the least each way takes."""
        ways = ("plain", "plain_once", "fused", "fused_once")
        return {way: round(getattr(self, way) / self.least, 2) for way in ways}


def _new(plan: Plan, number: int) -> np.ndarray[Any, Any]:
    """The indices of the new values of a round."""
    new = plan.rounds[number].new
    return plan.first if number == 0 else np.arange(new.start, new.stop)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the floats that PyTorch's functions read and write.

    Attributes:
        elements: How many.
        again: How many of these were read before by the same function.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = self.again = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [arg.numel() for arg in args if isinstance(arg, torch.Tensor)]
        match func.overloadpacket.__name__:
            case "new_empty" | "select" | "slice" | "view":
                return result
            case "fill_":
                read = 0
            case "copy_":
                read = inputs[1]
            case "index_select":
                read = result.numel()
                self.again += read - args[2].unique().numel()
            case "add" | "sum":
                read = sum(inputs)
            case name:
                raise NotImplementedError(f"say here what {name} reads and writes")
        self.elements += read + result.numel()
        return result


def plan_of(words: Sequence[bytes]) -> Plan:
    """The plan of a trie over tokens with these bytes."""
    items = SortedItems.of([Token(token_id, word) for token_id, word in enumerate(words)])
    return Plan.of(items.order, Nodes.of(items))


def real_words() -> list[bytes]:
    """The bytes of SmolLM2's tokens."""
    from transformers import AutoTokenizer

    return [
        bytes(word) for word in decode_vocab(AutoTokenizer.from_pretrained(default_folder()))[0]
    ]


def main() -> None:
    words = real_words()
    for size in SIZES:
        traffic = Traffic.of(plan_of(enlarged(words, size)))
        print(f"{size:,} tokens:", traffic, *traffic.times_least().items())


if __name__ == "__main__":
    main()
