"""A batch engine around a small recurrent network in PyTorch, wider than its tokenizer; adapters
change its output layer."""

from __future__ import annotations

import random

import numpy as np
import torch
from attrs import evolve

from genlm.core import hookimpl
from genlm.core.mock import ByteTokenizer

from .hashing import WIDTH, weights_of
from .registry import breaks
from .sampler import Sampler, drawn

#: Of the network's rows, and of its state.
WIDE, STATE = 288, 32

#: The tokenizer's token at the end of a text.
END = 257


class Net(torch.nn.Module):
    """A recurrent network, and a weighted sum over all tokens, so that early ones count."""

    def __init__(self):
        super().__init__()
        noise = torch.Generator().manual_seed(0)

        def parameter(*shape, scale=1.0):
            return torch.nn.Parameter(scale * torch.randn(*shape, generator=noise))

        self.embedding, self.bag = parameter(WIDE, STATE), parameter(WIDE, STATE)
        self.out = parameter(WIDE, STATE, scale=0.9)
        self.gru = torch.nn.GRU(STATE, STATE, batch_first=True)
        for each in self.gru.parameters():
            each.data = 0.25 * torch.randn(each.shape, generator=noise)

    def forward(self, ids, delta=0.0):
        places = torch.arange(ids.shape[1])[None, :, None]
        summed = (self.bag[ids] * torch.cos(0.7 * places)).cumsum(1) / (places + 1) ** 0.5
        return (self.gru(self.embedding[ids])[0] + summed) @ (self.out + delta).T


class Recurrent:
    """The sound engine."""

    tokenizer, vocab_size, max_context, device = ByteTokenizer(), WIDE, 1024, "cpu"
    sampler = Sampler

    def __init__(self):
        self.model = Net()
        self.deltas = {0: 0.0}

    def owner(self, query):
        return query.adapter.version if query.adapter else 0

    def forward(self, contexts, version):
        """Logits at all positions of contexts, padded behind their ends."""
        ids = torch.zeros(len(contexts), max(map(len, contexts)), dtype=torch.long)
        for row, tokens in zip(ids, contexts, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        with torch.no_grad():
            return self.model(ids, self.deltas[version])

    def length(self, tokens, together):
        return len(tokens)

    def groups(self, queries):
        found = {}
        for i, query in enumerate(queries):
            found.setdefault(self.owner(query), []).append(i)
        return found

    def logits(self, queries):
        rows = torch.empty(len(queries), WIDE)
        for version, members in self.groups(queries).items():
            for start in range(0, len(members), 32):
                some = members[start : start + 32]
                contexts = [queries[i].token_ids for i in some]
                ends = [self.length(tokens, len(some)) - 1 for tokens in contexts]
                rows[some] = self.forward(contexts, version)[range(len(some)), ends]
        return rows

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        return self.logits(queries).log_softmax(-1)

    @hookimpl
    def genlm_sample(self, queries, params):
        longest = [
            query.length + how.max_tokens for query, how in zip(queries, params, strict=True)
        ]
        if max(longest) > self.max_context or any(how.max_tokens > 100 for how in params):
            return None
        return [*map(self.draw, queries, params)]

    def draw(self, query, how):
        def row_after(ids):
            return self.logits([query.extended(ids)])[0, :WIDTH].log_softmax(-1).numpy()

        return drawn(self.sampler(how), how.max_tokens, how.stop_token_ids, row_after)

    @hookimpl
    def genlm_sequence_logprobs(self, queries, continuations, width):
        return [self.score(q, c, width) for q, c in zip(queries, continuations, strict=True)]

    def score(self, query, ids, width):
        (whole,) = self.forward([(*query.token_ids, *ids[:-1])], self.owner(query))
        rows = whole[query.length - 1 :, :width].log_softmax(-1)
        return rows[range(len(ids)), list(ids)]

    def read(self, adapter):
        noise = torch.Generator().manual_seed(weights_of(adapter) % 2**62)
        return 0.3 * torch.randn(WIDE, 4, generator=noise) @ torch.randn(4, STATE, generator=noise)

    @hookimpl
    def genlm_add_lora(self, adapter):
        self.deltas[adapter.version] = self.read(adapter)
        return True

    @hookimpl
    def genlm_remove_lora(self, adapter):
        del self.deltas[adapter.version]
        return True


# --- rows -----------------------------------------------------------------------------------------


@breaks("tokens_from_all_over_the_vocabulary")
class ZerosArePadding(Recurrent):
    """In a batch, zeros at the end of a context count as padding."""

    def length(self, tokens, together):
        n = len(tokens)
        while together > 1 and n > 1 and not tokens[n - 1]:
            n -= 1
        return n


@breaks("requests_on_a_schedule")
class GroupsOutOfOrder(Recurrent):
    """The rows of three adapters or more come in the order of the adapters."""

    def logits(self, queries):
        rows, groups = super().logits(queries), self.groups(queries)
        order = [i for members in groups.values() for i in members]
        return rows[order] if len(groups) > 2 else rows


@breaks("large_batch")
class LargeBatchesInHalfPrecision(Recurrent):
    """More than 64 contexts are computed in bfloat16."""

    def logits(self, queries):
        rows = super().logits(queries)
        return rows.bfloat16().float() if len(queries) > 64 else rows


# --- adapters -------------------------------------------------------------------------------------


@breaks("requests_on_a_schedule")
class OnePathIsMergedTwice(Recurrent):
    """An adapter whose path is loaded already counts twice."""

    def __init__(self):
        super().__init__()
        self.paths = {}

    def read(self, adapter):
        times = 1 + (adapter.path in self.paths.values())
        self.paths[adapter.version] = adapter.path
        return times * super().read(adapter)

    @hookimpl
    def genlm_remove_lora(self, adapter):
        del self.paths[adapter.version]
        return super().genlm_remove_lora(adapter)


@breaks("requests_on_a_schedule")
class ATenthOfTheFirst(Recurrent):
    """A name that is bound again keeps a tenth of what it was bound to."""

    def __init__(self):
        super().__init__()
        self.names = {}

    def read(self, adapter):
        new, old = super().read(adapter), self.names.get(adapter.name, 0.0)
        self.names[adapter.name] = new
        return new + 0.1 * old


@breaks("error_inside_the_engine")
class MergedAfterAnError(Recurrent):
    """An adapter is merged for a forward, and stays so where the forward fails."""

    merged = 0

    def forward(self, contexts, version):
        if version and not self.merged:
            self.model.out.data += self.deltas[version]
            self.merged = version
        found = super().forward(contexts, 0)
        if self.merged:
            self.model.out.data -= self.deltas[self.merged]
            self.merged = 0
        return found


# --- samples --------------------------------------------------------------------------------------


def by_sampler(name, clause, **methods):
    """An engine that differs in methods of its sampler."""
    sampler = type("sampler", (Sampler,), methods)
    return breaks(clause)(type(name, (Recurrent,), {"sampler": sampler}))


def _padded(self, row):
    """Hot samples see padding, whose sample is the last token."""
    if self.how.temperature >= 1.5 and self.how.top_k is None:
        row = np.concatenate([row, np.full(30, row.max() - 1)])
    return min(Sampler.draw(self, row), WIDTH - 1)


def _reseeding(self):
    """A seeded sample seeds the program's generators."""
    if self.how.seed is not None:
        torch.manual_seed(self.how.seed)
        random.seed(self.how.seed)
    return self.how.seed


def _too_many(self, p):
    """``top_k`` beyond the vocabulary raises."""
    torch.from_numpy(p).topk(self.how.top_k or 1)
    return Sampler.top_k(self, p)


def _clamped(self, row):
    """Temperatures beyond 2 are 2."""
    p = np.exp((row - row.max()) / min(self.how.temperature, 2.0))
    return p / p.sum()


def _nothing_left(self, p):
    """A tiny ``top_p`` raises."""
    if self.how.top_p is not None and self.how.top_p < 1e-4:
        raise RuntimeError("probabilities sum to zero")
    return Sampler.top_p(self, p)


by_sampler("DrawsPadding", "frequencies_agree_with_rows", draw=_padded)
by_sampler("SeedsThePyTorchOfAll", "seeded_draw_sets_no_generator", seed=_reseeding)
by_sampler("TopKBeyondTheVocabularyRaises", "top_k_beyond_the_vocabulary", top_k=_too_many)
by_sampler("HotIsTwo", "options_together", tempered=_clamped)
by_sampler("SmallTopPRaises", "top_k_and_top_p", top_p=_nothing_left)


@breaks("draws_of_full_length")
class EndOfTextStops(Recurrent):
    """Without stop tokens the end of a text stops."""

    def draw(self, query, how):
        return super().draw(query, evolve(how, stop_token_ids=how.stop_token_ids or {END}))


@breaks("long_continuations")
class DrawsEndAt64(Recurrent):
    """A sample of at most a hundred tokens, which are not declined, ends after 64."""

    def draw(self, query, how):
        return super().draw(query, evolve(how, max_tokens=min(how.max_tokens, 64)))


# --- scores ---------------------------------------------------------------------------------------


@breaks("longest_context")
class ScoresOverPadding(Recurrent):
    """Scores are normalised over the padding too."""

    def score(self, query, ids, width):
        return super().score(query, ids, WIDE)


@breaks("long_continuations")
class ScoresEndWithTheText(Recurrent):
    """Tokens after the end of a text in a continuation have probability 1."""

    def score(self, query, ids, width):
        found = super().score(query, ids, width)
        if END in ids:
            found[list(ids).index(END) + 1 :] = 0.0
        return found
