"""Importance sampling of a regular expression: texts that match it, with weights.

Each sample writes one token after the other. A walk over the byte trie finds the tokens that keep a
match possible, and the sample takes one of them, with the model's probabilities. Its weight is the
product, over all steps, of the probability that the model gives to these tokens. So the mean weight
estimates the probability that the model itself writes a matching text and ends there.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
from collections import defaultdict

import regex
import torch
from attrs import frozen

from genlm.core import AsyncLM, load_model_by_name
from genlm.core.trie import TokenCharacterTrie

MODELS = {"hf": "HuggingFaceTB/SmolLM2-135M-Instruct"}


class Constraint:
    """The texts that match a regular expression, as a choice of tokens at each step."""

    def __init__(self, lm: AsyncLM, pattern: str) -> None:
        self.vocab = lm.byte_vocab
        self.trie = TokenCharacterTrie(self.vocab)
        self.end = lm.tokenizer.eos_token_id
        self.pattern = regex.compile(pattern.encode())
        self._known: dict[bytes, torch.Tensor] = {}

    def allowed(self, text: bytes) -> torch.Tensor:
        """The ids of the tokens after which ``text`` can still become a match, and of the end if it
        is one."""
        if text not in self._known:
            ending = [self.end] if self.pattern.fullmatch(text) else []
            self._known[text] = torch.tensor([*self._tokens(text), *ending], dtype=torch.long)
        return self._known[text]

    def _tokens(self, text: bytes) -> list[int]:
        found = []
        reached = [(self.trie.root, text)]
        for node, longer in reached:
            for edge, child in self.trie.children[node].items():
                if isinstance(edge, tuple):  # a token ends here
                    token = self.vocab[edge[1]]
                    if token and not token.is_special:
                        found.append(token.token_id)
                elif self.pattern.fullmatch(longer + bytes([edge]), partial=True):
                    reached.append((child, longer + bytes([edge])))
        return found


@frozen
class Draw:
    """A text, and the logarithm of its importance weight: -inf if it did not end in time."""

    text: bytes
    log_weight: float


async def draw(
    lm: AsyncLM, prompt: list[int], constraint: Constraint, max_tokens: int, seed: int
) -> Draw:
    """Draw one text of fewer than ``max_tokens`` tokens."""
    rng = random.Random(seed)
    context, text, log_weight = lm.context(prompt), b"", 0.0
    for _ in range(max_tokens):
        allowed = constraint.allowed(text)
        row = (await lm.next_token_logprobs(context)).cpu()[allowed].double()
        mass = float(row.logsumexp(0))  # -inf if nothing is allowed
        if mass == -math.inf:
            break
        log_weight += mass
        token_id = rng.choices(allowed.tolist(), row.softmax(0).tolist())[0]
        if token_id == constraint.end:
            return Draw(text, log_weight)
        context, text = context.extend(token_id), text + constraint.vocab[token_id].byte_string
    return Draw(text, -math.inf)


async def draw_many(
    lm: AsyncLM, prompt: list[int], constraint: Constraint, max_tokens: int, n: int, seed: int
) -> list[Draw]:
    """Draw ``n`` texts at once."""
    seeds = random.Random(seed).sample(range(1 << 32), n)
    return await asyncio.gather(*(draw(lm, prompt, constraint, max_tokens, s) for s in seeds))


@frozen
class Estimate:
    """The probability that the model writes a matching text.

    Attributes:
        log_probability: The logarithm of the mean weight.
        relative_error: The standard error of the mean weight, as a share of it.
        effective_size: The number of equal weights with the same information.
    """

    log_probability: float
    relative_error: float
    effective_size: float


def estimate(draws: list[Draw]) -> Estimate:
    """Estimate the probability from all weights, those of failed samples included."""
    log_weights = torch.tensor([draw.log_weight for draw in draws], dtype=torch.float64)
    if log_weights.max() == -math.inf:
        return Estimate(-math.inf, math.nan, 0.0)
    relative = (log_weights - log_weights.max()).exp()
    return Estimate(
        log_probability=float(log_weights.max() + relative.mean().log()),
        relative_error=float(relative.std() / len(draws) ** 0.5 / relative.mean()),
        effective_size=float(relative.sum() ** 2 / relative.square().sum()),
    )


def report(draws: list[Draw]) -> None:
    found = estimate(draws)
    weights: defaultdict[bytes, float] = defaultdict(float)
    for one in draws:
        if one.log_weight > -math.inf:
            weights[one.text] += math.exp(one.log_weight - found.log_probability) / len(draws)
    for text, weight in sorted(weights.items(), key=lambda item: -item[1])[:10]:
        print(f"{weight:7.3f}  {text.decode()!r}")
    print(
        f"log probability {found.log_probability:.3f}, standard error of the probability "
        f"{100 * found.relative_error:.1f} %"
    )
    print(f"effective sample size {found.effective_size:.1f} of {len(draws)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="hf", help="a backend that `genlm backends` lists")
    parser.add_argument("--model", help="a folder or a hub name")
    parser.add_argument("--prompt", default="Q: When did the war end?\nA: It ended on")
    parser.add_argument("--pattern", default=r" (May|June|July) \d{1,2}, (18|19)\d\d\.")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    model = options.model or MODELS.get(options.backend, options.backend)
    with load_model_by_name(model, backend=options.backend) as lm:
        constraint = Constraint(lm, options.pattern)
        prompt = lm.tokenizer.encode(options.prompt)
        report(
            asyncio.run(
                draw_many(lm, prompt, constraint, options.max_tokens, options.samples, options.seed)
            )
        )


if __name__ == "__main__":
    main()
