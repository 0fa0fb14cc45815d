"""How much of the key/value cache contexts hold together."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from attrs import define

from genlm.vllm.request import VllmRequest


@define(eq=False)
class Block:
    """A full block.

    Attributes:
        key: Its contents, and those of the blocks before it.
        end: How many tokens these are.
        parent: The block before it.
        users: How many requests have it as their last full block, and blocks as their parent.
    """

    key: Hashable
    end: int
    parent: Block | None
    users: int = 0


class CacheUsage:
    """Counts the tokens of requests that vLLM has: those of full blocks that several share once.

    A request shares the blocks that are there when vLLM begins it, but for one that its last token
    fills: that token is computed. Blocks that it fills later are its own, whatever others have. Of
    requests that begin alike vLLM begins the longest first, so one that a last token fills is for
    others when it is computed.

    Args:
        block_size: Tokens in a block; ``None`` where requests share no blocks.

    Attributes:
        tokens: The most tokens of the key/value cache that all take together.
    """

    def __init__(self, block_size: int | None) -> None:
        self._size = block_size
        self.tokens = 0
        self._known: dict[Hashable, Block] = {}
        self._last: dict[str, Block | None] = {}  # of each request

    def add(self, request: VllmRequest) -> None:
        """A request begins."""
        there = (self._known.get(key) for key, _ in self._blocks(request, 0, request.shareable))
        shared = next((block for block in there if block is not None), None)
        self.tokens += request.tokens - (shared.end if shared else 0)
        self._fill(request, shared, request.length - 1)

    def complete(self, request: VllmRequest) -> None:
        """A request is computed, and stays."""
        self.extend(request, request)

    def extend(self, request: VllmRequest, longer: VllmRequest) -> None:
        """A request goes on as a longer one, under the same id."""
        last = self._last[request.request_id]
        self.tokens += longer.tokens - request.tokens
        if self._size is None or longer.length - (last.end if last else 0) < self._size:
            return  # it fills no block
        self._fill(longer, last, longer.length)
        if last is not None:
            last.users -= 1

    def remove(self, request: VllmRequest) -> None:
        """vLLM frees what no other request has."""
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

    def _fill(self, request: VllmRequest, last: Block | None, stop: int) -> None:
        """Give a request the full blocks of its first tokens after the last one that it has."""
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
        """The keys and ends of a request's full blocks between two places, the last first."""
        if self._size is None or not request.shareable:
            return
        context = request.prompt.context
        for end in range(stop - stop % self._size, start, -self._size):
            context = context.first(end)  # of the one before: it has the fewest to leave out
            yield (request.prompt.adapter, end, context.hash_value), end
