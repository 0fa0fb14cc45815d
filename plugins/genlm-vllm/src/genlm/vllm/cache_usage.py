"""How much of the KV cache contexts hold together."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from attrs import define

from genlm.vllm.request import VllmRequest


@define(eq=False)
class Block:
    """A full block.

    Attributes:
        key: The contents of the block and of the blocks before it.
        end: How many tokens these blocks have together.
        parent: The block before it.
        users: How many requests have the block as their last full one, plus how many blocks have it
            as their parent.
    """

    key: Hashable
    end: int
    parent: Block | None
    users: int = 0


class CacheUsage:
    """Counts the tokens of the requests that vLLM has. The tokens of a full block that several
    requests share count once.

    A request shares the blocks that exist when vLLM begins it. It does not share the block that its
    last token fills, because that token is computed. The blocks that it fills later are its own,
    even if others have equal ones. Of requests with a common prefix, vLLM begins the longest first;
    a block that its last token fills can be shared once it is computed.

    Args:
        block_size: Tokens in a block; ``None`` if requests share no blocks.

    Attributes:
        tokens: The most tokens of the KV cache that all requests take together.
    """

    def __init__(self, block_size: int | None) -> None:
        self._size = block_size
        self.tokens = 0
        self._known: dict[Hashable, Block] = {}
        self._last: dict[str, Block | None] = {}  # the last full block of each request

    def add(self, request: VllmRequest) -> None:
        """Count a request that begins."""
        there = (self._known.get(key) for key, _ in self._blocks(request, 0, request.shareable))
        shared = next((block for block in there if block is not None), None)
        self.tokens += request.tokens - (shared.end if shared else 0)
        self._fill(request, shared, request.length - 1)

    def complete(self, request: VllmRequest) -> None:
        """Note that a request is computed, and stays."""
        if self._size is not None and request.length % self._size == 0:
            self._go_on(request)

    def extend(self, request: VllmRequest, longer: VllmRequest) -> None:
        """Note that a request continues as a longer one, under the same id."""
        self.tokens += longer.tokens - request.tokens
        size = self._size
        if size is not None and longer.length // size > request.length // size:
            self._go_on(longer)

    def remove(self, request: VllmRequest) -> None:
        """Note that a request ends. vLLM frees the blocks that no other request has."""
        block = self._last.pop(request.request_id)
        if block is not None:
            block.users -= 1
        while block is not None and not block.users:
            if self._known.get(block.key) is block:
                del self._known[block.key]
            block = block.parent
            if block is not None:
                block.users -= 1
        self.tokens -= request.tokens - (block.end if block else 0)

    def clear(self) -> None:
        self.tokens = 0
        self._known.clear()
        self._last.clear()

    def _go_on(self, request: VllmRequest) -> None:
        """Give a request the full blocks behind those that it has."""
        last = self._last[request.request_id]
        self._fill(request, last, request.length)
        if last is not None:
            last.users -= 1

    def _fill(self, request: VllmRequest, last: Block | None, stop: int) -> None:
        """Add to a request the full blocks of its first ``stop`` tokens that come after its block
        ``last``."""
        filled = [*self._blocks(request, last.end if last else 0, stop)]
        for key, end in reversed(filled):
            if last is not None:
                last.users += 1
            last = Block(key, end, last)
            self._known.setdefault(key, last)
        if last is not None:
            last.users += 1
        self._last[request.request_id] = last

    def _blocks(
        self, request: VllmRequest, start: int, stop: int
    ) -> Iterator[tuple[Hashable, int]]:
        """The keys and ends of a request's full blocks between two positions, the last block
        first."""
        if self._size is None or not request.shareable:
            return
        context = request.prompt.context
        for end in range(stop - stop % self._size, start, -self._size):
            # A prefix of the previous one, which has the fewest tokens to leave out.
            context = context.first(end)
            yield (request.prompt.adapter, end, context.hash_value), end
