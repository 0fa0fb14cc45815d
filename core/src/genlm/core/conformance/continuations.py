"""Clauses on long continuations: scored, drawn, and gone on from."""

from __future__ import annotations

from genlm.core.conformance.agreement import expect_greedy, expect_scores
from genlm.core.conformance.compare import check
from genlm.core.conformance.subject import Subject

#: Places around which engines change what they do.
EDGES = (16, 64, 100, 128, 256, 512)


class ContinuationClauses:
    """Continuations of hundreds of tokens."""

    def test_long_continuations(self, live: Subject) -> None:
        """Continuations of up to 500 tokens score what the cold rows say, alone and beside others
        of other lengths; drawn ones have all their tokens, each the most likely one; and contexts
        go on from them."""
        self._scores(live)
        self._draws(live)

    def _scores(self, live: Subject) -> None:
        prompts = (3, 40)
        room = min(live.longest, live.contexts.limit - 1)
        lengths = [min(n, room - 40) for n in (500, 150)]
        cases = [
            (text[:prompt], text[prompt:])
            for prompt, n in zip(prompts, lengths, strict=True)
            if n > 1
            for text in [live.contexts.long(prompt + n, prompt)]
        ]
        for prompt, tokens in cases:
            scores = live.run(live.lm.sequence_logprobs(prompt, tokens))
            places = _around(len(tokens))
            expect_scores(live, scores, prompt, tokens, places=places, how="a long continuation")
            for end in (len(prompt) + len(tokens) - 1, len(prompt) + len(tokens)):
                longer = (*(prompt + tokens)[:end], live.contexts.tokens[1])
                live.expect(live.ask(longer), longer, how="going on from what was scored")

    def _draws(self, live: Subject) -> None:
        contexts = live.contexts
        for n, stops in ((live.scaled(200, 140), False), (21, True)):
            prompt = contexts.long(min(9, contexts.limit - 2), 2)
            most = min(n, live.longest, contexts.limit - len(prompt) - 1)
            drawn = live.run(live.lm.sample(prompt, most, [], temperature=0.0))
            check(len(drawn) == most, f"{most} tokens were to be drawn, and {len(drawn)} were")
            if stops:  # the last one, wherever it comes first
                stop = drawn[-1]
                expected = drawn[: drawn.index(stop)]
                drawn = live.run(live.lm.sample(prompt, most, [stop], temperature=0.0))
                check(drawn == expected, f"with stop token {stop} {drawn}, without {expected}")
            expect_greedy(live, drawn, prompt, places=_around(len(drawn)))
            for end in (len(drawn), len(drawn) - 1):
                context = (*prompt, *drawn[: max(end, 0)])
                for asked in ((*context, contexts.tokens[3]), context):
                    live.expect(live.ask(asked), asked, how="going on from what was drawn")


def _around(length: int) -> list[int]:
    around = {edge + off for edge in EDGES for off in (-1, 0, 1)}
    return sorted(place for place in {0, 1, *around, length - 1} if 0 <= place < length)
