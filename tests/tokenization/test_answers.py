"""The recipe for the best of several answers, with tokenizers that begin a text with a space and a
special token."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest

from genlm.core import AsyncLM
from genlm.core.mock import MockEngine
from tests.pages import FENCED

from .conftest import FAMILIES

PAGE = Path(__file__).parents[2] / "docs/how-to/on-top.md"

#: The question ends with a byte's token, which the tokenizers of the tests join to no space.
QUESTION, ANSWERS = "The quick brown fox is at B", ["lazy", "a dog"]


def of_page() -> str:
    (block,) = [one for one in FENCED.findall(PAGE.read_text("utf-8")) if "def best(" in one]
    return str(block)


def of_docstring() -> str:
    lines = inspect.getdoc(AsyncLM.batch_sequence_logprobs).splitlines()
    start = next(at for at, line in enumerate(lines) if "async def best(" in line)
    written = [lines[start], *(line for line in lines[start + 1 :] if line.lstrip()[:3] == "...")]
    return "\n".join(line.lstrip()[4:] for line in written)


@pytest.fixture(params=["llama", "gemma"])
def lm(request: pytest.FixtureRequest) -> Any:
    tok = pytest.importorskip("tokenizers", reason="trains a tokenizer of the library tokenizers")
    transformers = pytest.importorskip("transformers", reason="its tokenizers begin with BOS")
    raw = FAMILIES[request.param](tok)
    begin = [("<s>", raw.token_to_id("<s>"))]
    raw.post_processor = tok.processors.TemplateProcessing("<s> $A", special_tokens=begin)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    with AsyncLM(lambda: MockEngine(tokenizer), backend="mock") as lm:
        yield lm


@pytest.mark.parametrize("recipe", [of_page, of_docstring])
def test_scored_tokens_are_those_of_the_answers_behind_one_space(
    lm: AsyncLM, recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[tuple[list[list[int]], list[list[int]]]] = []
    own = lm.batch_sequence_logprobs

    async def noted(prompts: Any, answers: Any) -> Any:
        scored.append((prompts, answers))
        return await own(prompts, answers)

    monkeypatch.setattr(lm, "batch_sequence_logprobs", noted)
    names: dict[str, Any] = {}
    exec(recipe(), names)
    given = ANSWERS if recipe is of_page else [f" {answer}" for answer in ANSWERS]
    assert asyncio.run(names["best"](lm, QUESTION, given)) in given
    ((prompts, found),) = scored
    special = {*lm.special_token_ids}
    for prompt, ids, answer in zip(prompts, found, ANSWERS, strict=True):
        assert prompt == lm.encode(QUESTION)
        assert not special & {*ids}
        assert b"".join(lm.byte_vocab[each] for each in ids) == f" {answer}".encode()
