"""A batch engine whose rows depend on the last 48 tokens and the length. It draws and scores
nothing itself, and takes no adapters."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict

import torch

from genlm.core import hookimpl
from genlm.core.mock import ByteTokenizer

from .hashing import WIDTH, hashed, mix, numbers_of
from .registry import breaks


class Window:
    """The sound engine.

    Attributes:
        limit: How many rings are kept beside pins.
    """

    tokenizer, vocab_size, max_context = ByteTokenizer(), WIDTH, 4096
    device, model = "cpu", None
    window, limit = 48, 300

    def __init__(self):
        self.rings, self.pins = OrderedDict(), {}

    def known(self, query):
        """How many tokens are known, and the ring behind them."""
        for length in (query.length, query.length - 1) if not query.cold else ():
            for store in (self.rings, self.pins):
                if length and query.token_ids[:length] in store:
                    return length, store[query.token_ids[:length]]
        return max(0, query.length - self.window), []

    def width_at(self, position):
        return self.window

    def ring(self, query):
        start, ring = self.known(query)
        ring = self.owned(ring)
        for i in range(start, query.length):
            ring.append(mix(query.token_ids[i], 99))
            del ring[: -self.width_at(i)]
        self.rings[query.token_ids] = ring
        while len(self.rings) > self.limit:
            self.rings.popitem(last=False)
        return ring

    def owned(self, ring):
        return list(ring)

    def position(self, query):
        return query.length

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        rows = [mix(hashed(5, self.ring(query)), self.position(query)) for query in queries]
        return torch.stack([torch.from_numpy(numbers_of(row)) for row in rows])

    @hookimpl
    def genlm_cache_prefix(self, query):
        self.pins[query.token_ids] = list(self.ring(query))
        return True

    @hookimpl
    def genlm_clear_kv_cache(self):
        self.rings.clear()
        self.pins.clear()

    @hookimpl
    def genlm_close(self):
        self.rings.clear()


@breaks("rows_at_every_length")
class WiderFarOut(Window):
    """Beyond a thousand tokens what goes on from a known context sees a token more."""

    def width_at(self, position):
        return self.window + (position > 1000)


@breaks("contexts_grow_across_every_length")
class ForksShareARing(Window):
    """An extension of a long context writes into that context's ring."""

    def owned(self, ring):
        return ring if len(ring) == self.window else list(ring)


@breaks("bytes_of_text")
class ATokenOfOtherBytes(Window):
    """The tokenizer says other bytes of one token."""

    def __init__(self):
        super().__init__()
        self.tokenizer = type("Other", (ByteTokenizer,), {"token_bytes": self.token_bytes})()

    @staticmethod
    def token_bytes(tokenizer):
        found = list(ByteTokenizer.token_bytes(tokenizer))
        found[0x7E] = b"-"
        return found


@breaks("contexts_twice_as_long_each_time")
class PositionsEndAt2048(Window):
    """Longer contexts have the position of the 2,048th token, but cold ones."""

    def position(self, query):
        return query.length if query.cold else min(query.length, 2048)


@breaks("many_short_prompts_are_pinned")
class TwentiethPinIsTheLast(Window):
    """A further pin takes the place of the first, under the first's tokens."""

    @hookimpl
    def genlm_cache_prefix(self, query):
        tokens = query.token_ids if len(self.pins) < 20 else next(iter(self.pins))
        self.pins[tokens] = list(self.ring(query))
        return True


@breaks("nothing_is_left_after_close")
class AThreadStays(Window):
    """A closed engine leaves a thread (which ends with the process, for the tests after it)."""

    def __init__(self):
        super().__init__()
        wait = threading.Event().wait
        threading.Thread(target=wait, name="window-worker", daemon=True).start()


class Setting(Window):
    """Changes something of the process when it is loaded, and puts it back when it is closed, for
    the tests after it."""

    def __init__(self):
        super().__init__()
        self.back = self.changed()

    @hookimpl
    def genlm_close(self):
        super().genlm_close()
        self.back()


@breaks("process_is_as_it_was")
class AnotherFolder(Setting):
    """Loading changes the working directory."""

    def changed(self):
        before = os.getcwd()
        os.chdir("/")
        return lambda: os.chdir(before)


@breaks("process_is_as_it_was")
class MoreThreads(Setting):
    """Loading sets the number of PyTorch's threads."""

    def changed(self):
        before = torch.get_num_threads()
        torch.set_num_threads(before + 1)
        return lambda: torch.set_num_threads(before)


@breaks("process_is_as_it_was")
class DeterministicForAll(Setting):
    """Loading makes PyTorch raise where an operation has no deterministic form."""

    def changed(self):
        torch.use_deterministic_algorithms(True)
        return lambda: torch.use_deterministic_algorithms(False)
