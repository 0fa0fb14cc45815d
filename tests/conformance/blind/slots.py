"""A continuous engine for all kinds of requests: sixteen slots, prompts in chunks of 64 tokens, key
and value of each position in blocks of 16, which are found by the hash of all tokens up to their
ends. Where blocks run out, the newest request is set back."""

from __future__ import annotations

from collections import Counter, deque

import numpy as np
import torch
from attrs import evolve

from genlm.core import Answer, hookimpl
from genlm.core.mock import ByteTokenizer
from genlm.core.types import SampleRequest, ScoreRequest, query_of

from .hashing import MASK, WIDTH, mix, numbers_of, weights_of
from .registry import breaks
from .sampler import Sampler

BLOCK, CHUNK = 16, 64


class Task:
    """A request, and how far it is computed."""

    def __init__(self, engine, request):
        query = query_of(request)
        self.request, self.query, self.tokens = request, query, list(query.token_ids)
        self.version = query.adapter.version if query.adapter else 0
        self.is_score = isinstance(request, ScoreRequest)
        self.is_draw = isinstance(request, SampleRequest)
        self.prompt = len(self.tokens)
        self.drawn, self.scores = [], []
        if self.is_score:
            self.tokens += request.continuation[:-1]
        if self.is_draw:
            self.sampler = engine.sampler(request.params)
        self.done, self.blocks = 0, []

    def answers(self, request):
        return self.request is request or (not self.is_draw and self.request == request)


class Slots:
    """The sound engine.

    Attributes:
        slots: How many requests run at once.
        total: How many blocks there are.
    """

    tokenizer, vocab_size, max_context = ByteTokenizer(), WIDTH, 2048
    device, model = "cpu", None
    sampler = Sampler
    slots, total = 16, 900

    def __init__(self):
        self.weights = {0: 777}
        self.waiting, self.running = deque(), []
        self.values = np.zeros((self.total, BLOCK), np.uint64)  # of each position
        self.states = np.zeros((self.total, BLOCK), np.uint64)  # behind each position
        self.users, self.free = Counter(), deque(range(self.total))
        self.block_of, self.hash_of, self.pinned = {}, {}, {}

    # --- blocks -----------------------------------------------------------------------------------

    def root(self, task):
        return task.version

    def hash_at(self, task, end):
        return hash((self.root(task), tuple(task.tokens[:end])))

    def take(self):
        if not self.free:
            return None
        block = self.free.popleft()
        self.forget([block])
        self.users[block] = 1
        return block

    def forget(self, blocks):
        for block in blocks:
            if (key := self.hash_of.pop(block, None)) is not None:
                self.block_of.pop(key, None)

    def release(self, blocks):
        for block in reversed(blocks):
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block)

    def begin(self, task):
        """Take over the full blocks that are known, but no position that is read."""
        last = task.prompt - 1 if task.is_score else len(task.tokens) - 1
        for end in () if task.query.cold else range(BLOCK, last + 1, BLOCK):
            block = self.block_of.get(self.hash_at(task, end))
            if block is None:
                break
            if not self.users[block]:
                self.free.remove(block)
            self.users[block] += 1
            task.blocks.append(block)
            task.done = end

    def compute(self, task, end):
        """Compute up to a position; ``False`` where blocks run out."""
        while task.done < end:
            at, place = divmod(task.done, BLOCK)
            if at == len(task.blocks):
                block = self.take()
                if block is None:
                    return False
                task.blocks.append(block)
            state = self.weights[task.version]
            if task.done:
                before, last = divmod(task.done - 1, BLOCK)
                state = int(self.states[task.blocks[before], last])
            block, state = task.blocks[at], mix(state, task.tokens[task.done])
            self.states[block, place], self.values[block, place] = state, mix(state, task.done)
            task.done += 1
            if task.done % BLOCK == 0 and not task.query.cold:
                key = self.hash_at(task, task.done)
                if key not in self.block_of and block not in self.hash_of:
                    self.block_of[key], self.hash_of[block] = block, key
            self.after(task)
        return True

    def row(self, task, end):
        total = 0
        for at, block in enumerate(task.blocks):
            total += int(self.values[block, : max(0, end - at * BLOCK)].sum(dtype=np.uint64))
        return torch.from_numpy(numbers_of(total & MASK))

    def after(self, task):
        """A score reads a row at each position from the end of its prompt on."""
        at = task.done - task.prompt
        if task.is_score and at == len(task.scores) and at < len(task.request.continuation):
            task.scores.append(float(self.row(task, task.done)[task.request.continuation[at]]))

    # --- steps ------------------------------------------------------------------------------------

    def admit(self, request):
        self.waiting.append(Task(self, request))

    def pick(self):
        return self.waiting.popleft()

    def room(self):
        return self.slots

    def finish(self, task):
        self.running.remove(task)
        self.release(task.blocks)
        task.done, task.blocks = 0, []

    def preempt(self, task):
        self.finish(task)
        task.scores = []
        self.waiting.appendleft(task)

    def drop(self, request):
        for task in [task for task in self.running if task.answers(request)]:
            self.finish(task)
        self.waiting = deque(task for task in self.waiting if not task.answers(request))

    @hookimpl
    def genlm_step(self, queries, samples, scores, dropped):
        for request in dropped:
            self.drop(request)
        for request in (*queries, *samples, *scores):
            self.admit(request)
        while self.waiting and len(self.running) < self.room():
            task = self.pick()
            self.begin(task)
            self.running.append(task)
        try:
            return [*self.answers()]
        except BaseException:
            self.running, self.waiting = [], deque()
            self.users = Counter(block for blocks in self.pinned.values() for block in blocks)
            self.free = deque(block for block in range(self.total) if not self.users[block])
            raise

    def answers(self):
        for task in list(self.running):
            if task not in self.running:  # It has been preempted.
                continue
            while not self.compute(task, min(task.done + CHUNK, len(task.tokens))):
                others = [other for other in self.running if other is not task]
                if not others:
                    yield from self.refused(task)
                    break
                self.preempt(others[-1])
            else:
                result = self.result(task) if task.done == len(task.tokens) else None
                if result is not None:
                    self.finish(task)
                    yield Answer(task.request, result)

    def refused(self, task):
        self.finish(task)
        yield Answer(task.request, RuntimeError("the context does not fit beside what is pinned"))

    def result(self, task):
        if task.is_score:
            return torch.tensor(task.scores)
        row = self.row(task, task.done)
        return self.draw(task, row, task.request.params) if task.is_draw else row

    def draw(self, task, row, how):
        token = task.sampler.draw(row)
        if token in how.stop_token_ids:
            return task.drawn
        task.drawn.append(token)
        task.tokens.append(token)
        return task.drawn if len(task.drawn) == how.max_tokens else None

    # --- state and adapters -----------------------------------------------------------------------

    @hookimpl
    def genlm_cache_prefix(self, query):
        if query in self.pinned:
            return True
        task = Task(self, query)
        self.begin(task)
        if not self.compute(task, len(task.tokens)):
            self.release(task.blocks)
            raise RuntimeError("there is no room to pin the prefix")
        full = len(task.tokens) // BLOCK
        self.release(task.blocks[full:])
        self.pinned[query] = task.blocks[:full]
        return True

    @hookimpl
    def genlm_clear_kv_cache(self):
        for blocks in self.pinned.values():
            self.release(blocks)
        self.pinned.clear()
        self.block_of.clear()
        self.hash_of.clear()

    @hookimpl
    def genlm_add_lora(self, adapter):
        self.weights[adapter.version] = weights_of(adapter)
        return True

    @hookimpl
    def genlm_remove_lora(self, adapter):
        del self.weights[adapter.version]
        for query in [query for query in self.pinned if query.adapter == adapter]:
            self.release(self.pinned.pop(query))
        return True


# --- scheduling -----------------------------------------------------------------------------------


@breaks("cancelled_requests_leave_nothing", hangs=True)
class DroppedBeforeItRuns(Slots):
    """Requests dropped before they have a slot are computed and answered."""

    def drop(self, request):
        for task in [task for task in self.running if task.answers(request)]:
            self.finish(task)


@breaks("cancelled_requests_give_their_places_back")
class SlotsLeakWithDrops(Slots):
    """Every fourth request that is dropped while it runs takes a slot with it, but the last."""

    lost = 0

    def drop(self, request):
        before = len(self.running)
        super().drop(request)
        self.lost += before - len(self.running)

    def room(self):
        return max(1, self.slots - self.lost // 4)


@breaks("nobody_waits_behind_a_crowd")
class NewestFirst(Slots):
    """The newest of those that wait runs first."""

    slots = 4

    def pick(self):
        return self.waiting.pop()


@breaks("contexts_beside_as_many_pins_as_fit")
class SetBackByAToken(Slots):
    """A sample that is set back takes its last token again."""

    def preempt(self, task):
        super().preempt(task)
        if len(task.drawn) > 1:
            task.drawn.pop()
            task.tokens.pop()


@breaks("contexts_beside_as_many_pins_as_fit")
class SetBackWithStaleScores(Slots):
    """A score that is set back keeps what it had, a little off."""

    def preempt(self, task):
        kept = [score - 0.01 for score in task.scores]
        super().preempt(task)
        task.scores = kept


@breaks("draws_are_separate")
class EqualDrawsAreOne(Slots):
    """Unseeded samples of one context with equal parameters, admitted together, are one."""

    def admit(self, request):
        super().admit(request)
        task = self.waiting[-1]
        for other in [*self.running, *self.waiting]:
            new = other is not task and other.is_draw and not other.drawn
            if (
                task.is_draw
                and new
                and (other.query, other.request.params)
                == (
                    task.query,
                    request.params,
                )
            ):
                generator = other.sampler.random.bit_generator
                task.sampler.random.bit_generator.state = generator.state


@breaks("requests_on_a_schedule")
class NinthHasAnothersAdapter(Slots):
    """Beside eight others the ninth begins with the adapter of another."""

    def compute(self, task, end):
        own = task.version
        others = [one.version for one in self.running if one.version not in (0, own)]
        ninth = self.running[8:9] == [task] and not task.done
        if ninth and own and others and not task.query.cold:
            task.version = others[0]
        try:
            return super().compute(task, end)
        finally:
            task.version = own


# --- blocks ---------------------------------------------------------------------------------------


def by_hash(name, clause, hash_at):
    """An engine whose blocks are found by another hash."""
    return breaks(clause)(type(name, (Slots,), {"hash_at": hash_at, "__doc__": hash_at.__doc__}))


def _without_adapter(self, task, end):
    """From the third block on the hash does not know the adapter."""
    return Slots.hash_at(self, task, end) if end <= 2 * BLOCK else hash(tuple(task.tokens[:end]))


def _without_parents(self, task, end):
    """A block is found by its own tokens and its place."""
    return hash((self.root(task), end, tuple(task.tokens[end - BLOCK : end])))


def _sorted_chunks(self, task, end):
    """The order of the tokens in whole chunks does not count."""
    whole = end // CHUNK * CHUNK
    return hash((self.root(task), *sorted(task.tokens[:whole]), *task.tokens[whole:end]))


by_hash("BlocksForgetTheAdapter", "requests_on_a_schedule", _without_adapter)
by_hash("BlocksForgetTheirParents", "all_lengths_in_one_batch", _without_parents)
by_hash("ChunksAreSets", "contexts_that_differ_in_one_token", _sorted_chunks)


@breaks("requests_on_a_schedule")
class VersionsOfFourBits(Slots):
    """Blocks know the version of an adapter modulo 16."""

    def root(self, task):
        return task.version % 16


@breaks("rows_at_every_length")
class EndOfAChunk(Slots):
    """A context that ends with a chunk, of which a part was known, gets the row before its own."""

    def begin(self, task):
        super().begin(task)
        task.known = task.done

    def row(self, task, end):
        resumed = not (task.is_draw or task.is_score or task.query.cold) and task.known % CHUNK
        wrong = resumed == CHUNK - BLOCK and end % CHUNK == 0 and end == len(task.tokens)
        return super().row(task, end - 1 if wrong else end)


@breaks("scores_at_every_length")
class ScoresRepeatAtChunks(Slots):
    """At the beginning of a chunk, from the third on, a score is the one before it."""

    def after(self, task):
        begins = task.done > 3 * CHUNK and task.done % CHUNK == 1
        if task.scores and begins and len(task.scores) == task.done - task.prompt:
            task.scores.append(task.scores[-1])
        super().after(task)


# --- pins -----------------------------------------------------------------------------------------


@breaks("adapters_are_bound_and_pinned_again_and_again")
class PinsOutliveTheirAdapter(Slots):
    """Pins under a removed adapter keep their blocks for ever."""

    @hookimpl
    def genlm_remove_lora(self, adapter):
        del self.weights[adapter.version]
        self.pinned = {query: b for query, b in self.pinned.items() if query.adapter != adapter}
        return True


@breaks("contexts_beside_as_many_pins_as_fit")
class PinnedAgainTakesMore(Slots):
    """A prompt that is pinned again takes its blocks again."""

    @hookimpl
    def genlm_cache_prefix(self, query):
        self.pinned.pop(query, None)
        return super().genlm_cache_prefix(query)


@breaks("contexts_beside_as_many_pins_as_fit", hangs=True)
class NoRoomIsWaitedFor(Slots):
    """Requests that do not fit beside pins wait for ever."""

    def refused(self, task):
        self.preempt(task)
        yield from ()


@breaks("contexts_beside_as_many_pins_as_fit")
class PinsAreWrittenOver(Slots):
    """If blocks run out, the last block of the first pin is taken."""

    def take(self):
        first = next(iter(self.pinned.values()), None)
        return first[-1] if first and not self.free else super().take()


@breaks("pins_end_with_their_adapter")
class SharedPinsAreFreedTwice(Slots):
    """Clearing gives blocks that several pins share back twice."""

    @hookimpl
    def genlm_clear_kv_cache(self):
        shared = [block for block, users in self.users.items() if users > 1]
        super().genlm_clear_kv_cache()
        self.free.extend(block for block in shared if not self.users[block])


# --- the rest -------------------------------------------------------------------------------------


@breaks("nothing_grows")
class DrawsLeaveMemory(Slots):
    """Each sample leaves 256 kB behind."""

    def finish(self, task):
        super().finish(task)
        if task.is_draw:
            self.left = [*getattr(self, "left", ()), np.ones(1 << 15)]


@breaks("long_continuations")
class LastTokenNeverStops(Slots):
    """The last token that ``max_tokens`` allows is not looked at as a stop token."""

    def draw(self, task, row, how):
        if len(task.drawn) == how.max_tokens - 1 > 0:
            how = evolve(how, stop_token_ids=frozenset())
        return super().draw(task, row, how)
