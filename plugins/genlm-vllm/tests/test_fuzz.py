"""Random programs in a small cache; those of test_running.py are the same each time."""

from __future__ import annotations

from contextlib import contextmanager

from tests.programs import fuzz

from .driven import random_program


def test_random_programs(lora_engine, write_adapter, fuzz_seed, say):
    adapters = {name: write_adapter(name, seed=ord(name)) for name in "ab"}

    @contextmanager
    def program(source):
        made = random_program(lora_engine, source, adapters=adapters)
        try:
            yield made
        finally:
            made.leave()
        lora_engine.genlm_clear_kv_cache()

    say(str(fuzz(program, fuzz_seed, usually=5)))
