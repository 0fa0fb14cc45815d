"""A model in lm-evaluation-harness: its tasks over any backend of this library.

    pip install lm-eval
    python examples/harness.py --tasks arc_easy,wikitext --limit 50

The class is all that the harness needs: the log-likelihood of continuations, with a flag whether
each is what greedy decoding gives; that of whole texts, in windows where they are longer than the
context; and generation up to a stop string. Requests are made at once, and the library batches
them. A prompt that several answers share is computed once.

The figures are those of the harness's own class for transformers, ``hf``, with one exception. Where
the tokenizer begins every text with a token, as Gemma's does, that token stands before each window
of a long text, is itself not scored, and stays where a long prompt loses its beginning. (In ``hf``
only the first window has it, which scores it too.)
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Coroutine, Iterable
from functools import cached_property
from typing import Any, TypeVar

from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.utils import make_table
from tqdm.asyncio import tqdm

from genlm.core import AsyncLM, Score, load_model_by_name

T = TypeVar("T")

#: How many continuations are scored in one call, so that a progress bar moves.
CONTINUATIONS_PER_CALL = 64


class GenlmLM(TemplateLM):
    """An ``LM`` of the harness over a model of this library.

    Args:
        lm: The model, with a Hugging Face tokenizer.
        max_length: The most tokens of a context; ``None`` is the model's own, or 2,048.
        at_once: How many texts, or parts of the continuations, are waited for at a time.
    """

    def __init__(self, lm: AsyncLM, max_length: int | None = None, at_once: int = 64) -> None:
        super().__init__()
        self.lm = lm
        self.tokenizer = lm.tokenizer
        self.max_length = max_length or lm.max_context or 2048
        self._at_once = at_once

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """The ids of a text, by default as the tokenizer begins texts, but never with the first
        token twice: the text of a chat template has it already."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.decode(self.prefix_token_id))
        return self.lm.encode(string, add_special_tokens=add_special_tokens)

    @cached_property
    def begins(self) -> list[int]:
        """The token with which the tokenizer begins every text, if it does."""
        return [self.prefix_token_id][: self.tok_encode("a")[0] == self.prefix_token_id]

    def shortened(self, ids: list[int], length: int) -> list[int]:
        """The last ids of a text, as many as are wanted, with the token that begins it."""
        if len(ids) <= length:
            return ids
        kept = self.begins if ids[:1] == self.begins else []
        return [*kept, *ids[len(ids) - length + len(kept) :]]

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        parts = [
            requests[i : i + CONTINUATIONS_PER_CALL]
            for i in range(0, len(requests), CONTINUATIONS_PER_CALL)
        ]
        return [score for part in self._run(map(self._scored, parts)) for score in part]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        return self._run(self._whole(request.args[0]) for request in requests)

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        return self._run(self._until(*request.args) for request in requests)

    def _run(self, work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """The results of all, with a progress bar."""

        async def run() -> list[T]:
            room = asyncio.Semaphore(self._at_once)

            async def one(coroutine: Coroutine[Any, Any, T]) -> T:
                async with room:
                    return await coroutine

            results: list[T] = await tqdm.gather(*map(one, work))
            return results

        return asyncio.run(run())

    async def _scored(self, requests: Iterable[tuple[Any, list[int], list[int]]]) -> list[Score]:
        """The log-likelihood of each continuation, and whether greedy decoding gives it. A context
        that is too long loses its beginning, as in the harness."""
        contexts, continuations = [], []
        for _, context, rest in requests:
            if len(rest) > self.max_length:
                raise ValueError(
                    f"a continuation has {len(rest)} tokens, but a context at most "
                    f"{self.max_length}"
                )
            contexts.append(self.shortened(context, self.max_length + 1 - len(rest)))
            continuations.append(rest)
        return await self.lm.batch_sequence_logprobs(contexts, continuations)

    async def _whole(self, text: str) -> float:
        """The log-likelihood of a text, each token scored once."""
        ids = [self.prefix_token_id, *self.tok_encode(text, add_special_tokens=False)]
        keep = len(self.begins)
        return float((await self.lm.rolling_logprobs(ids, self.max_length, keep=keep)).sum())

    async def _until(self, text: str, options: dict[str, Any]) -> str:
        """The model's continuation of a text, up to a stop string or token."""
        until = options.get("until") or []
        stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        most = int(options.get("max_gen_toks") or 256)
        temperature = float(options.get("temperature") or 0) if options.get("do_sample") else 0.0
        context = self.shortened(self.tok_encode(text), self.max_length - most)
        drawn: list[int] = []
        written = ""
        async for token_id in self.lm.stream(context, most, temperature=temperature):
            drawn.append(token_id)
            written = self.tokenizer.decode(drawn, skip_special_tokens=True)
            if any(stop in written for stop in stops):
                break
        for stop in stops:
            written = written.partition(stop)[0]
        return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", required=True, help="names, with commas between them")
    parser.add_argument("--limit", type=int, help="the most questions of each task")
    parser.add_argument("--backend", default="hf", help="a backend that `genlm backends` lists")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    options = parser.parse_args()
    with load_model_by_name(options.model, backend=options.backend) as lm:
        results = simple_evaluate(GenlmLM(lm), tasks=options.tasks.split(","), limit=options.limit)
        print(make_table(results))


if __name__ == "__main__":
    main()
