"""A server of one's own: rows, scores and streamed samples of one model over HTTP.

    pip install fastapi uvicorn
    python examples/server.py --port 8000

One process, one model, any number of clients: requests that wait at the same time make one batch,
as coroutines of a program do. Do not give uvicorn ``--workers``: every worker would load the model.
A request that takes too long is cancelled, and so is that of a client who has left: what nobody
waits for is not computed.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel

from genlm.core import AsyncLM, GenlmError, InvalidInputError, load_model_by_name

T = TypeVar("T")

logger = logging.getLogger("uvicorn.error")


class Prompt(BaseModel):
    text: str
    top: int = 10


class Scored(BaseModel):
    text: str
    continuation: str


class Draw(BaseModel):
    text: str
    max_tokens: int = 100
    temperature: float = 1.0
    seed: int | None = None


async def while_there(request: Request, work: Coroutine[Any, Any, T], seconds: float) -> T:
    """The result of ``work``, which is cancelled when the client leaves or the time is up."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait([working, leaving], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise TimeoutError(f"no answer within {seconds:g} s, or the client has left")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


def app_of(lm: AsyncLM, seconds: float = 30.0) -> FastAPI:
    """The server of a model.

    Args:
        lm: The model; whoever loaded it closes it.
        seconds: The longest that an answer may take, and each token of a stream.
    """
    app = FastAPI()

    @app.exception_handler(InvalidInputError)
    async def invalid(request: Request, error: InvalidInputError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, status_code=422)

    @app.exception_handler(TimeoutError)
    async def late(request: Request, error: TimeoutError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, status_code=504)

    @app.post("/top")
    async def top(prompt: Prompt, request: Request) -> list[tuple[str, float]]:
        """The likeliest next tokens, each with its log-probability."""
        work = lm.next_token_logprobs(lm.encode(prompt.text))
        row = await while_there(request, work, seconds)
        found = lm.top_logprobs(row, prompt.top)
        return [(token.text, token.logprob) for token in found]

    @app.post("/score")
    async def score(asked: Scored, request: Request) -> float:
        """The log-probability of a continuation."""
        work = lm.sequence_logprobs(*encoded(lm, asked.text, asked.continuation))
        return float((await while_there(request, work, seconds)).sum())

    @app.post("/draw")
    async def draw(asked: Draw) -> StreamingResponse:
        """A sample as it is drawn. When its client leaves, nothing more is drawn. What fails
        on the way ends the text with a line that begins with ``error:``."""
        tokens = lm.stream(
            lm.encode(asked.text),
            asked.max_tokens,
            temperature=asked.temperature,
            seed=asked.seed,
        )

        async def text() -> AsyncIterator[bytes]:
            try:
                while True:
                    token_id = await asyncio.wait_for(anext(tokens), seconds)
                    yield lm.byte_vocab[token_id].byte_string
            except StopAsyncIteration:
                return
            except (TimeoutError, GenlmError) as error:  # the status 200 was sent already
                line = f"error: {str(error) or f'no token within {seconds:g} s'}"
                logger.error("/draw ended with an %s", line)
                yield f"\n{line}\n".encode()

        return StreamingResponse(text(), media_type="text/plain; charset=utf-8")

    return app


def encoded(lm: AsyncLM, text: str, continuation: str) -> tuple[list[int], list[int]]:
    """The ids of a text, and those that it has more with its continuation: encoded alone, that may
    begin with another space, or with a special token. Only inside a word it is encoded alone.

    Raises:
        InvalidInputError: The tokenizer cannot write it there.
    """
    prompt, whole = lm.encode(text), lm.encode(text + continuation)
    if whole[: len(prompt)] == prompt:
        return prompt, whole[len(prompt) :]
    ids = lm.encode(continuation, add_special_tokens=False)
    if b"".join(lm.byte_vocab[token_id].byte_string for token_id in ids) != continuation.encode():
        raise InvalidInputError(
            f"the continuation {continuation!r} joins the last token of the text; end the text "
            "where a word ends"
        )
    return prompt, ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="hf", help="a backend that `genlm backends` lists")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--seconds", type=float, default=30.0, help="the longest answer")
    options = parser.parse_args()
    with load_model_by_name(options.model, backend=options.backend) as lm:
        uvicorn.run(app_of(lm, options.seconds), host=options.host, port=options.port)


if __name__ == "__main__":
    main()
