"""A step in which each context grows by one token: ours, transformers' own and genlm-backend's."""

from __future__ import annotations

import asyncio
import inspect
import random
from typing import Any

import torch

from genlm.core.mock import ByteTokenizer
from genlm.hf import AsyncTransformer
from genlm.hf.cudnn import attention_kernels
from genlm.hf.runner import CACHE_NAMES
from tools.gpu import peer
from tools.gpu.timing import medians, seconds, waits_of, work_of
from tools.shapes import VOCABULARY

#: The most tokens in one raw forward, so that a long prefill fits into memory.
RAW_TOKENS = 1 << 15

#: How many tokens each context has of its own behind a shared prompt.
OWN_TOKENS = 4

#: The most nats by which float32 rows may differ from the raw model's.
ATOL = 1e-3

#: How many steps of genlm-backend are measured, after one that is not.
PEER_STEPS = 3


class WideTokenizer(ByteTokenizer):
    """A vocabulary as wide as that of a real model."""

    def __len__(self) -> int:
        return VOCABULARY

    def token_bytes(self) -> list[bytes]:
        return [token_id.to_bytes(3, "big") for token_id in range(VOCABULARY)]


class Raw:
    """The model as transformers has it, with a cache of its own and hf's choice of kernels: the
    floor. With cuDNN's attention it would compile a plan for each new shape."""

    def __init__(self, model: Any, contexts: list[list[int]]) -> None:
        self._model = model
        takes = inspect.signature(model.forward).parameters
        self._name = next(name for name in CACHE_NAMES if name in takes)
        self._cache: Any = None
        ids = torch.tensor(contexts, device=model.device)
        # A recurrent model can continue its cache only by single tokens.
        width = ids.shape[1] if model._is_stateful else max(RAW_TOKENS // len(ids), 1)
        for start in range(0, ids.shape[1], width):
            self.rows = self._forward(ids[:, start : start + width])

    @torch.inference_mode()
    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {} if self._cache is None else {self._name: self._cache}
        with attention_kernels(self._model.device):
            result = self._model(ids, use_cache=True, logits_to_keep=1, **options)
        self._cache = getattr(result, self._name)
        rows: torch.Tensor = result.logits[:, -1].float().log_softmax(-1)
        return rows

    def forget(self) -> None:
        """Free its memory."""
        self._cache = None

    def extend(self, tokens: list[int]) -> None:
        """One token more for every context."""
        ids = torch.tensor(tokens, device=self._model.device)[:, None]
        self.rows = self._forward(ids)


class Contexts:
    """Contexts of random tokens, behind one prompt or each of its own, that grow."""

    def __init__(self, count: int, length: int, *, shared: bool) -> None:
        self._source = random.Random(count * length)
        self.prompt = self._tokens(length - OWN_TOKENS) if shared else []
        own = length - len(self.prompt)
        self.all = [self.prompt + self._tokens(own) for _ in range(count)]

    def grow(self) -> list[int]:
        """One token more for each; returns these."""
        new = self._tokens(len(self.all))
        for context, token in zip(self.all, new, strict=True):
            context.append(token)
        return new

    def resample(self) -> None:
        """The contexts of the next step continue some of these, chosen with repetition."""
        self.all = [[*context] for context in self._source.choices(self.all, k=len(self.all))]

    def _tokens(self, count: int) -> list[int]:
        return [self._source.randrange(VOCABULARY) for _ in range(count)]


def step_figures(
    model: Any,
    contexts: int,
    length: int,
    repeat: int,
    *,
    shared: bool,
    static: bool | None = None,
) -> dict[str, Any]:
    """A step in which each context grows by one token, ours and transformers' own.

    Args:
        model: The model.
        contexts, length: How many contexts, and their tokens.
        repeat: How often each way is timed.
        shared: Whether they have all but their last tokens in common.
        static: hf's option of this name.

    Returns:
        Milliseconds of ours in one call, in a coroutine for each context and after resampling, of
        the raw model and of genlm-backend where it is here; what a step makes the device do, and
        where Python waits for it; what the core takes of a step for each request (microseconds);
        and how far any of the rows are apart (nats).
    """
    device, grown = str(model.device), Contexts(contexts, length, shared=shared)
    raw, apart = Raw(model, grown.all), 0.0
    mine, floor, core, gathered, resampled = [], [], [], [], []
    options: dict[str, Any] = {"cache_size": 0, "static": static}
    with AsyncTransformer(model, WideTokenizer(), **options) as lm, asyncio.Runner() as runner:
        rows: Any = None

        def ours() -> None:
            nonlocal rows
            rows = lm.batch_next_token_logprobs_sync(grown.all)

        async def coroutines() -> Any:
            return await asyncio.gather(*map(lm.next_token_logprobs, grown.all))

        def compare() -> float:
            return max(float((a - b).abs().max()) for a, b in zip(rows, raw.rows, strict=True))

        ours()
        apart = compare()
        for _ in range(repeat + 1):  # the sides take turns, so that a busy machine slows both
            new = grown.grow()
            in_engine = lm.stats.engine_seconds
            mine.append(seconds(ours, device))
            core.append(mine[-1] - (lm.stats.engine_seconds - in_engine))
            floor.append(seconds(lambda new=new: raw.extend(new), device))  # type: ignore[misc]
            apart = max(apart, compare())
        work = {
            f"raw_{key}": value for key, value in work_of(lambda: raw.extend(new), device).items()
        }
        raw.forget()
        for _ in range(repeat + 1):
            grown.grow()
            gathered.append(seconds(lambda: runner.run(coroutines()), device))
        grown.grow()
        work |= work_of(ours, device)
        grown.grow()
        waits = waits_of(ours, device)
        for _ in range(repeat + 1):
            grown.resample()
            grown.grow()
            resampled.append(seconds(ours, device))
    figures = medians(
        ours=mine, raw=floor, gathered=gathered, resampled=resampled, **peer_step(model, grown)
    )
    return figures | {
        "times_raw": figures["ours_ms"] / figures["raw_ms"],
        "gathered_times_raw": figures["gathered_ms"] / figures["raw_ms"],
        # On a GPU this includes waiting for the device, which the engine leaves to its callers.
        "core_us_per_request": 1e3 * medians(core=core)["core_ms"] / contexts,
        "rows_apart": apart,
        "waits_at": dict(waits),
        **work,
    }


def peer_step(model: Any, grown: Contexts) -> dict[str, list[float]]:
    """Seconds of genlm-backend's steps; with the prompt given to ``cache_kv`` where one is shared,
    else as it is."""
    count, length = len(grown.all), len(grown.all[0]) - len(grown.prompt)
    stateful = model._is_stateful  # genlm-backend can cache keys and values only
    if stateful or not peer.is_here() or not peer.fits(count, length, VOCABULARY):
        return {}
    theirs, taken = peer.over(model), []
    if grown.prompt:
        theirs.cache_kv(grown.prompt)

    async def ask() -> Any:
        return await asyncio.gather(*map(theirs.next_token_logprobs, grown.all))

    with asyncio.Runner() as runner:
        for _ in range(PEER_STEPS + 1):
            grown.grow()
            taken.append(seconds(lambda: runner.run(ask()), str(model.device)))
    return {"theirs": taken}
