"""How much of the key/value cache contexts hold together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator

from genlm.vllm.request import VllmRequest


class Held:
    """Counts the tokens of requests that vLLM has: those of full blocks that several begin with
    once.

    Args:
        block_size: Tokens in a block; ``None`` where requests share no blocks.

    Attributes:
        tokens: The most tokens of the key/value cache that all take together.
    """

    def __init__(self, block_size: int | None) -> None:
        self._size = block_size
        self.tokens = 0
        # By full blocks and all before them: how many requests end there, or blocks come after.
        self._users: Counter[Hashable] = Counter()

    def add(self, request: VllmRequest) -> None:
        self.tokens += request.tokens
        for last in self._blocks(request):
            self._users[last] += 1
            if self._users[last] > 1:
                self.tokens -= last[1]  # with those before it
                break

    def remove(self, request: VllmRequest) -> None:
        self.tokens -= request.tokens
        for last in self._blocks(request):
            self._users[last] -= 1
            if self._users[last]:
                self.tokens += last[1]
                break
            del self._users[last]

    def extend(self, request: VllmRequest, longer: VllmRequest) -> None:
        """A request goes on as a longer one."""
        if self._full_blocks(request) == self._full_blocks(longer):  # as in most steps
            self.tokens += longer.tokens - request.tokens
        else:
            self.add(longer)
            self.remove(request)

    def clear(self) -> None:
        self.tokens = 0
        self._users.clear()

    def _blocks(self, request: VllmRequest) -> Iterator[tuple[Hashable, int, int]]:
        """The full blocks of a request, the last first: the adapter, where one ends, and the hash
        of all tokens to there."""
        context, size = request.prompt.context, self._size or 1
        for end in range(self._full_blocks(request) * size, 0, -size):
            context = context.first(end)  # of the one before: it has the fewest to leave out
            yield request.prompt.adapter, end, context.hash_value

    def _full_blocks(self, request: VllmRequest) -> int:
        if self._size is None or not request.shares_blocks:
            return 0
        return request.prompt.length // self._size
