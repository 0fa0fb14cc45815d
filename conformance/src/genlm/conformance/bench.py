"""``genlm bench``: tokens per second against the number of particles."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time

from attrs import frozen

from genlm.core.checks import number, safe_repr
from genlm.core.cli.doctor import accelerators
from genlm.core.cli.model import Commands, add_model, loaded
from genlm.core.cli.processor import dtypes
from genlm.core.cli.terminal import Progress, bar, table
from genlm.core.drawer import TokenDrawer
from genlm.core.errors import BackendImportError, GenlmError, InvalidOptionError, PluginError
from genlm.core.installation import pip_install
from genlm.core.lm import AsyncLM
from genlm.core.plugins import backend_names, find_backend
from genlm.core.sampling import checked_params

PROMPT = "Once upon a time there was"
PARTICLE_COUNTS = (1, 2, 4, 8, 16, 32, 64)
BENCH_SECONDS = 60.0

#: How many tokens a particle draws before a new one begins.
PARTICLE_TOKENS = 32

#: Backends that are measured only if they are named: the mock is not made for speed.
UNMEASURED_BACKENDS = ("mock",)


@frozen
class Measured:
    """The result of one backend: tokens per second for each number of particles, or the reason why
    there are none."""

    backend: str
    rates: dict[int, float]
    error: str | None = None


def add_to(commands: Commands) -> None:
    bench = commands.add_parser(
        "bench", help="tokens per second against the number of particles, in about a minute"
    )
    add_model(
        bench,
        "an installed backend; give it again for more; default all that run here",
        action="append",
    )
    bench.add_argument(
        "--seconds",
        type=float,
        default=BENCH_SECONDS,
        help=f"in all, loading apart; default {BENCH_SECONDS:g}",
    )
    bench.add_argument(
        "--particles",
        default=",".join(map(str, PARTICLE_COUNTS)),
        help="numbers of particles, with commas between; default %(default)s",
    )
    bench.add_argument("--json", action="store_true", help="print the result as JSON")
    bench.set_defaults(run=run_bench)


def run_bench(options: argparse.Namespace) -> int:
    """Measure every backend; more than one, each in a process of its own."""
    particles = _particles(options.particles)
    seconds = number("--seconds", options.seconds, "above 0", lambda s: s > 0)
    backends = list(dict.fromkeys(options.backend or _backends()))
    if len(backends) == 1:
        results = [_measured(options, backends[0], particles, seconds)]
    else:
        each = seconds / len(backends)
        results = [_in_a_process(options, backend, each) for backend in backends]
    if options.json:
        print(json.dumps([_as_dict(result) for result in results]))
    else:
        print(report(results, particles))
        if not accelerators():
            print(f"\n{dtypes()}")
    return 0 if any(result.rates for result in results) else 1


def _backends() -> list[str]:
    """The installed backends that run here.

    Raises:
        InvalidOptionError: there is none.
    """
    found = []
    for name in backend_names():
        try:
            if name not in UNMEASURED_BACKENDS and find_backend(name).info().available:
                found.append(name)
        except (BackendImportError, PluginError) as error:
            print(f"genlm: {name} is left out: {error}", file=sys.stderr)
    if not found:
        raise InvalidOptionError(
            f"no backend runs here but the mock; {pip_install('genlm-hf')}, or give --backend mock"
        )
    return found


def _particles(given: str) -> list[int]:
    numbers = given.split(",")
    if not all(n.isdecimal() and int(n) > 0 for n in numbers):
        raise InvalidOptionError(
            "--particles must be integers of at least 1, with commas between; "
            f"got {safe_repr(given)}"
        )
    return sorted({int(n) for n in numbers})


def _measured(
    options: argparse.Namespace, backend: str, particles: list[int], seconds: float
) -> Measured:
    try:
        with loaded(options, backend) as (lm, _):
            return Measured(backend, asyncio.run(rates(lm, particles, seconds / len(particles))))
    except (GenlmError, OSError) as error:
        return Measured(backend, {}, str(error))


def _in_a_process(options: argparse.Namespace, backend: str, seconds: float) -> Measured:
    """Several engines do not share a process well, and one that dies leaves the others alone."""
    command = [sys.executable, "-m", "genlm.core", "bench", options.model, "--json"]
    command += ["--backend", backend, "--seconds", str(seconds), "--particles", options.particles]
    command += [f"--option={given}" for given in options.option]
    done = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8")
    try:
        (found,) = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return Measured(backend, {}, f"its process ended with code {done.returncode}")
    rates = {int(count): rate for count, rate in found["tokens_per_second"].items()}
    return Measured(backend, rates, found["error"])


async def rates(lm: AsyncLM, particles: list[int], seconds: float) -> dict[int, float]:
    """Tokens per second for each number of particles, each measured for ``seconds``."""
    progress = Progress()
    measured = {}
    try:
        await step(lm, 1, 0.0)  # The first step includes what the engine does once.
        for done, count in enumerate(particles):
            progress.show(f"bench: {count} particles ({done + 1} of {len(particles)}) ...")
            start = time.perf_counter()
            tokens = await step(lm, count, seconds)
            measured[count] = tokens / (time.perf_counter() - start)
    finally:
        progress.clear()
    return measured


async def step(lm: AsyncLM, count: int, seconds: float) -> int:
    """How many tokens ``count`` particles draw in ``seconds``, at least one each. Each is a
    coroutine that asks for one row at a time; rows of earlier ones are dropped first."""
    end = time.perf_counter() + seconds
    prompt = lm.encode(PROMPT)
    lm.clear_cache()

    async def particle(seed: int) -> int:
        drawer, drawn = TokenDrawer(checked_params(PARTICLE_TOKENS, [], seed=seed)), 0
        while True:
            context = lm.context(prompt)
            for _ in range(PARTICLE_TOKENS):
                token_id = drawer.draw(await lm.next_token_logprobs(context))
                context = context.extend(token_id)
                drawn += 1
                if time.perf_counter() >= end:
                    return drawn

    return sum(await asyncio.gather(*map(particle, range(count))))


def report(results: list[Measured], particles: list[int]) -> str:
    """The table, the plot, and why a backend is in neither."""
    good = [result for result in results if result.rates]
    parts = [f"{result.backend}: {result.error}" for result in results if result.error]
    if good:
        header = ("particles", *(result.backend for result in good))
        rows = [
            (f"{n:9}", *(_figure(result.rates[n]).rjust(len(result.backend)) for result in good))
            for n in particles
        ]
        parts = ["tokens per second", table([header, *rows]), plot(good, particles), *parts]
    return "\n\n".join(parts)


def plot(results: list[Measured], particles: list[int]) -> str:
    """A bar for each figure; the longest is the greatest of all."""
    most = max(max(result.rates.values()) for result in results)
    rows = [
        (f"{n:9}", result.backend, f"{bar(result.rates[n] / most)} {_figure(result.rates[n])}")
        for n in particles
        for result in results
    ]
    return table(rows)


def _figure(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"


def _as_dict(result: Measured) -> dict[str, object]:
    return {
        "backend": result.backend,
        "tokens_per_second": result.rates,
        "error": result.error,
    }
