"""The contexts of a program as a tree: what they share is computed once."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from attrs import define, field

from genlm.core import AsyncLM
from tools.pictures.svg import MARGIN, Picture

PARTICLES = 8
TOKENS = 7
LEAF = 24
COLUMN = 84
ROOT_WIDTH = 150


@define
class Node:
    """A token after a context, with the number of particles that have it."""

    text: str
    particles: int = 0
    children: dict[int, Node] = field(factory=dict)
    y: float = 0.0


def picture(lm: AsyncLM, smc: Any, prompt: str) -> Picture:
    """Eight particles of the demo after seven tokens, and how many tokens the model computed."""
    computed: list[int] = []
    lm.underlying_model.register_forward_pre_hook(
        lambda module, args, kwargs: computed.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    ids = lm.encode(prompt)
    asked: list[int] = []
    ask = lm.next_token_logprobs

    def counted(context: list[int], **given: Any) -> Any:
        asked.append(len(context))
        return ask(context, **given)

    lm.next_token_logprobs = counted  # type: ignore[method-assign,assignment]
    allowed = smc.allowed_tokens(lm, "e")
    particles, _ = asyncio.run(smc.smc(lm, ids, allowed, PARTICLES, TOKENS, random.Random(1)))
    root = Node(prompt)
    for particle in particles:
        node = root
        node.particles += 1
        for token in particle.token_ids:
            text = lm.byte_vocab[token].byte_string.decode("utf-8", "replace")
            node = node.children.setdefault(token, Node(text))
            node.particles += 1
    return drawn(root, sum(asked), sum(computed), len(asked))


def drawn(root: Node, asked: int, computed: int, requests: int) -> Picture:
    leaves = place(root, MARGIN + 26)
    height = leaves + 56
    width = 2 * MARGIN + ROOT_WIDTH + 14 + COLUMN * TOKENS
    title = (
        f"A tree: the prompt at its root, then the tokens of {PARTICLES} particles, which part "
        f"one by one. Their requests name {asked} tokens; the model computed {computed}."
    )
    shown = Picture(title, width, height)
    branches(shown, root, MARGIN + ROOT_WIDTH, 0)
    shown.box(MARGIN, root.y - 22, ROOT_WIDTH, 44, "shared", rx=4)
    words = root.text.split()
    for line, part in enumerate((words[:5], words[5:])):
        shown.text(
            MARGIN + ROOT_WIDTH / 2, root.y - 4 + 16 * line, " ".join(part), anchor="middle",
            fill="#ffffff", size=11,
        )  # fmt: skip
    shown.text(
        MARGIN,
        height - 18,
        f"{requests} requests name {asked:,} tokens in all; the model computed {computed}. "
        "Branches that resampling has dropped are not drawn.",
    )
    return shown


def place(node: Node, y: float) -> float:
    """Give a node and its children their heights, and return the height of the next leaf."""
    if not node.children:
        node.y = y
        return y + LEAF
    for child in node.children.values():
        y = place(child, y)
    ends = [child.y for child in node.children.values()]
    node.y = (ends[0] + ends[-1]) / 2
    return y


def branches(shown: Picture, node: Node, x: float, depth: int) -> None:
    for child in node.children.values():
        many = child.particles > 1
        colour = "shared" if many else "line"
        shown.curve(x, node.y, x + 14, child.y, 0.8 + 0.7 * child.particles, colour)
        shown.line((x + 14, child.y), (x + COLUMN, child.y), stroke=colour,
                   width=0.8 + 0.7 * child.particles)  # fmt: skip
        shown.text(x + 18, child.y - 5, child.text.strip() or child.text, size=11, mono=True)
        branches(shown, child, x + COLUMN, depth + 1)
