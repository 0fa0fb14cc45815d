"""Random programs with adapters that come and go."""

from __future__ import annotations

from contextlib import contextmanager

from sgl_torch_cpu import without_pinned_memory

from genlm.conformance import Program
from genlm.sgl.loading import load
from tests.programs import fuzz

from .conftest import TOKENS

#: More adapters than a batch may have, prompts in chunks, and a pool that is sometimes full.
OPTIONS = {
    "enable_lora": True,
    "max_loras_per_batch": 2,
    "chunked_prefill_size": 64,
    "max_total_tokens": 2048,
    "max_running_requests": 24,
}


def test_random_programs(tiny, make_adapter, fuzz_seed, say) -> None:
    adapters = {
        "attention": make_adapter(1, "q_proj v_proj"),
        "everything": make_adapter(2, "q_proj v_proj o_proj gate_proj up_proj down_proj"),
        "wide": make_adapter(3, "q_proj k_proj v_proj", rank=32),
        "products": make_adapter(4, "gate_proj up_proj down_proj", rank=8),
    }

    @contextmanager
    def program(source):
        made = Program(
            engine=engine,
            source=source,
            longest=200,
            tokens=range(TOKENS),
            adapters=adapters,
            chunk=64,
            share=0.5,
            may_lack_room=True,
        )
        yield made
        made.leave()
        engine.genlm_clear_kv_cache()

    with without_pinned_memory():
        engine = load(tiny, {"engine_opts": OPTIONS})
        say(str(fuzz(program, fuzz_seed, usually=6)))
        engine.genlm_close()
