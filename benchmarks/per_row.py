"""What a row costs beside its forward: CPU time of a step per row, on a model that costs nothing

Two layers of width 16 with random weights, so that what the library does is not hidden.
``extend``: n contexts grow by a token. ``lists``: the same, each given as a list of all its ids.
``fork``: half of them, each continued twice. ``newcomer``: all grow by a token, and a new one
comes. ``ragged``: they grow by 1 to 5 tokens. ``batch``: as ``extend``, in one call. ``draws``: a
token is drawn after each. ``scores``: two tokens are scored after each. With the default cache of
rows, with none, and with a wrapper that processes rows.

Beyond 32, contexts of 2,000 tokens stand behind 32 prompts of nearly that length: as many
different ones would be a benchmark of attention. *Beside the forward* leaves out what passes inside
the model, on engines that can be asked for it, and *beside the scheduler* what passes inside
SGLang's. *Kernels* are the operations that a step of hf computes, each of which a GPU would launch,
with forks copied and uneven rows padded together as there. The floor is the raw engine:
transformers, mlx-lm or vLLM.

On another engine: ``python -m benchmarks.per_row ours --backend vllm``, and ``floor`` likewise.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

from benchmarks.protocol import Bench, main
from benchmarks.sgl_step import Stopwatch, watched_scheduler
from benchmarks.steps import ragged_length

PLUGIN = "hf"

LENGTHS = (20, 2000)
CONTEXTS = (1, 32, 256, 1000)
DIFFERENT = 32  # how many different prompts there are of the greater length
REPEAT = {1: 60, 32: 30, 256: 15, 1000: 8}


Contexts = list[Any]


def save_model(folder: str) -> None:
    """A model that costs nothing, and a tokenizer of bytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tools.tiny import write_tokenizer

    tokens = write_tokenizer(folder, "<end>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokens,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,  # the smallest head size for which every engine has kernels
        max_position_embeddings=4096,
        eos_token_id=tokens - 1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


class Steps:
    """The contexts of one case, new ones for every step."""

    def __init__(self, n: int, length: int, context: Callable[[list[int]], Any]) -> None:
        self._source = random.Random(1000 * n + length)
        self._context, self.n, self.length = context, n, length
        self.current: Contexts = []

    def prompts(self) -> Contexts:
        few = self.n if self.length == LENGTHS[0] else min(self.n, DIFFERENT)
        self.current = [self._context(self._tokens(self.length)) for _ in range(few)]
        return self.current

    def extend(self) -> Contexts:
        parents = (self.current * self.n)[: self.n]
        self.current = [one.extend(*self._tokens(1)) for one in parents]
        return self.current

    def lists(self) -> Contexts:
        return [[*one] for one in self.extend()]

    def fork(self) -> Contexts:
        half = self.current[: max(self.n // 2, 1)]
        self.current = [one.extend(*self._tokens(1)) for one in half for _ in range(2)][: self.n]
        return self.current

    def newcomer(self) -> Contexts:
        return [*self.extend(), self._context(self._tokens(self.length))]

    def ragged(self) -> Contexts:
        self.current = [
            one.extend(*self._tokens(1 + at % 5)) for at, one in enumerate(self.current)
        ]
        return self.current

    def _tokens(self, count: int) -> list[int]:
        return [self._source.randrange(256) for _ in range(count)]


class Forward:
    """CPU seconds that have passed inside a model's forward."""

    def __init__(self, model: Any) -> None:
        self.seconds, self._forward = 0.0, getattr(model, "forward", None)
        if self._forward is not None:
            model.forward = self._timed

    def _timed(self, *args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        try:
            return self._forward(*args, **kwargs)
        finally:
            self.seconds += time.process_time() - began


Inside = Forward | Stopwatch


def ours(bench: Bench) -> None:
    from genlm.core import hookimpl, load_model_by_name

    class Wrapper:
        @hookimpl
        def genlm_process_logprobs(self, queries: Any, rows: Any) -> Any:
            return rows

    options: dict[str, dict[str, Any]] = {
        "default cache": {},
        "no cache": {"cache_size": 0},
        "no cache, wrapper": {"cache_size": 0, "wrappers": [Wrapper()]},
    }
    scheduler = watched_scheduler() if bench.backend == "sgl" else None
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        for what, given in options.items():
            with (
                load_model_by_name(folder, backend=bench.backend or PLUGIN, **given) as lm,
                asyncio.Runner() as runner,
            ):
                inside = scheduler or Forward(lm.underlying_model)
                measure(bench, lm, runner, what, inside)
        if (bench.backend or PLUGIN) == "hf":
            count_kernels(bench, folder)


def measure(bench: Bench, lm: Any, runner: asyncio.Runner, what: str, inside: Inside) -> None:
    """Every case, on a loaded model."""

    async def gathered(call: Callable[[Any], Any], contexts: Contexts) -> None:
        await asyncio.gather(*map(call, contexts))

    async def together(contexts: Contexts) -> None:
        await lm.batch_next_token_logprobs(contexts)

    calls: dict[str, Callable[[Contexts], Any]] = {
        "batch": together,
        "draws": lambda contexts: gathered(lambda one: lm.sample(one, 1, []), contexts),
        "scores": lambda contexts: gathered(
            lambda one: lm.sequence_logprobs(one, [1, 2]), contexts
        ),
    }
    for length, n in sizes(bench):
        steps = Steps(n, length, lm.context)
        for case in ("extend", "lists", "fork", "newcomer", "ragged", "batch", "draws", "scores"):
            call = calls.get(case, lambda contexts: gathered(lm.next_token_logprobs, contexts))
            if case in ("extend", "batch"):
                lm.clear_kv_cache()
                runner.run(gathered(lm.next_token_logprobs, steps.prompts()))
                runner.run(gathered(lm.next_token_logprobs, steps.extend()))
            grow = getattr(steps, case, steps.extend)
            named = f"{case} after {length} tokens, {what}"
            repeat = 3 if bench.quick else REPEAT[n]
            ask = lambda asked, c=call: runner.run(c(asked))  # noqa: E731
            time_of(bench, named, n, repeat, grow, ask, inside)


def time_of(
    bench: Bench,
    case: str,
    n: int,
    repeat: int,
    prepare: Callable[[], Contexts],
    call: Callable[[Contexts], object],
    inside: Inside,
) -> None:
    """Time the steps of a case: the whole time, and the time outside the engine."""
    whole: list[float] = []
    beside: list[float] = []
    # The first turns warm up, because memory for forks is allocated then.
    for turn in range(repeat + 3):
        contexts = prepare()
        within, began = inside.seconds, time.process_time()
        call(contexts)
        passed = time.process_time() - began
        if turn >= 3:
            whole.append(passed / n * 1e6)
            beside.append((passed - inside.seconds + within) / n * 1e6)
    bench.record(case, whole, unit="us", x=n)
    if inside.seconds:
        part = "forward" if isinstance(inside, Forward) else "scheduler"
        bench.record(f"beside the {part}: {case}", beside, unit="us", x=n)


def count_kernels(bench: Bench, folder: str) -> None:
    """How many kernels a step of hf would launch on a GPU, without the copies for callers."""
    from genlm.core import hookimpl, load_model_by_name
    from genlm.hf.costs import COSTS
    from tools.launched import Launched

    launched = Launched()

    class Counting:
        @hookimpl
        def genlm_call_begins(self, hook: str) -> None:
            if hook == "genlm_step":
                launched.__enter__()

        @hookimpl
        def genlm_call_ended(self, hook: str) -> None:
            if hook == "genlm_step":
                launched.__exit__(None, None, None)

    with (
        mock.patch.dict(COSTS, clear=True),
        load_model_by_name(folder, backend="hf", cache_size=0, wrappers=[Counting()]) as lm,
        asyncio.Runner() as runner,
    ):
        for length, n in sizes(bench):
            steps = Steps(n, length, lm.context)
            # Beside many short contexts, long prompts would become shared prefixes.
            lm.clear_kv_cache()
            runner.run(lm.batch_next_token_logprobs(steps.prompts()))
            for case in ("extend", "fork", "newcomer", "ragged"):
                # Only the last turn counts, because memory has been allocated by then.
                for _ in range(4):
                    launched.count = 0
                    runner.run(lm.batch_next_token_logprobs(getattr(steps, case)()))
                name = f"kernels: {case} after {length} tokens"
                bench.record(name, launched.count, unit="kernels", x=n)


def floor(bench: Bench) -> None:
    bench.clock = time.process_time
    floors = {"hf": floor_of_transformers, "mlx": floor_of_mlx, "vllm": floor_of_vllm}
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        floors[bench.backend or PLUGIN](bench, folder)


def sizes(bench: Bench) -> list[tuple[int, int]]:
    """Lengths, and numbers of contexts."""
    lengths = LENGTHS[:1] if bench.quick else LENGTHS
    return [(length, n) for length in lengths for n in (CONTEXTS[:2] if bench.quick else CONTEXTS)]


def floor_of_transformers(bench: Bench, folder: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from tools.launched import Launched

    model = AutoModelForCausalLM.from_pretrained(folder).eval()

    @torch.inference_mode()
    def run(tokens: Sequence[Sequence[int]], state: Any = None) -> Any:
        given = torch.tensor(tokens)
        output = model(given, past_key_values=state, use_cache=True, logits_to_keep=1)
        output.logits[:, -1].log_softmax(dim=-1)
        return output.past_key_values

    for length, n in sizes(bench):
        few = n if length == LENGTHS[0] else min(n, DIFFERENT)
        state = run([[at % 256] * length for at in range(few)])
        state.batch_repeat_interleave(-(-n // few))
        state.batch_select_indices(torch.arange(n))
        with Launched() as launched:
            run([[5]] * n, state)
        name = f"kernels: extend after {length} tokens"
        bench.record(name, launched.count, unit="kernels", x=n)
        for case, count in (("extend", 1), ("ragged", ragged_length(n))):
            bench.time(
                f"{case} after {length} tokens",
                lambda n=n, count=count, state=state: run([[5] * count] * n, state),
                unit="us", x=n, per=n, warm=3, repeat=REPEAT[n],
            )  # fmt: skip


def floor_of_mlx(bench: Bench, folder: str) -> None:
    """A step of all rows in one cache."""
    import mlx.core as mx
    import mlx_lm
    from mlx_lm.models.cache import make_prompt_cache

    model, *_ = mlx_lm.load(folder)
    for length, n in sizes(bench):
        cache = make_prompt_cache(model)

        def run(count: int, n: int = n, cache: Any = cache) -> None:
            logits = model(mx.full((n, count), 5), cache=cache)[:, -1]
            mx.eval(logits - mx.logsumexp(logits, axis=-1, keepdims=True), [c.state for c in cache])

        run(length)
        bench.time(
            f"extend after {length} tokens",
            lambda run=run: run(1),
            unit="us", x=n, per=n, warm=3, repeat=REPEAT[n],
        )  # fmt: skip


def floor_of_vllm(bench: Bench, folder: str) -> None:
    """A step of ``LLM.generate``, which gives no row: the time of 33 tokens less that of one."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    from benchmarks.vllm_sessions import RAW

    llm = LLM(folder, dtype="float32", kv_cache_memory_bytes=1 << 30, **RAW)
    for length, n in sizes(bench):
        prompts: Any = [{"prompt_token_ids": [at % 256] * length} for at in range(n)]

        def run(count: int, prompts: Any = prompts) -> float:
            params = SamplingParams(max_tokens=count, detokenize=False, ignore_eos=True)
            began = time.process_time()
            llm.generate(prompts, params, use_tqdm=False)
            return time.process_time() - began

        run(1)
        taken = [(run(33) - run(1)) / 32 / n * 1e6 for _ in range(3 if bench.quick else 10)]
        bench.record(f"extend after {length} tokens", taken, unit="us", x=n)


if __name__ == "__main__":
    main(ours=ours, floor=floor)
