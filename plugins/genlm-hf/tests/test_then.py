"""Programs with ``then`` give the same particles as programs that request rows."""

from __future__ import annotations

import asyncio

import pytest
import torch

from genlm.core import load_model_by_name
from genlm.core.reductions import draw_among
from tests.particle_forms import ALLOWED, FORMS, ByRows, smc


@pytest.mark.parametrize("adapter", [None, "a"])
@pytest.mark.parametrize("cache_size", [0, 1000])
def test_all_forms_of_a_program_give_the_same_particles(
    tiny: str, lora_folders: dict[str, str], cache_size: int, adapter: str | None
) -> None:
    pytest.importorskip("peft", reason="LoRA needs peft")
    found = []
    for form in FORMS:
        with load_model_by_name(tiny, "hf", cache_size=cache_size) as lm:
            lm.add_new_lora(lora_folders["a"], "a")
            found.append(asyncio.run(smc(form, lm, lora_name=adapter)))
    texts, constant, times = found[0]
    assert times >= 1
    for other in found[1:]:
        assert other[::2] == (texts, times)
        assert other[1] == pytest.approx(constant, abs=1e-4)


def test_programs_with_different_adapters_draw_as_if_alone(
    tiny: str, lora_folders: dict[str, str]
) -> None:
    pytest.importorskip("peft", reason="LoRA needs peft")
    adapters = [None, "a", "b"]
    with load_model_by_name(tiny, "hf") as lm:
        for name, folder in lora_folders.items():
            lm.add_new_lora(folder, name)
        alone = [asyncio.run(smc(ByRows, lm, lora_name=name))[0] for name in adapters]
        lm.clear_cache()

        async def crowd() -> list[object]:
            asked = [smc(form, lm, lora_name=name) for form in FORMS for name in adapters]
            return [texts for texts, *_ in await asyncio.gather(*asked)]

        assert asyncio.run(crowd()) == alone * len(FORMS)
        assert alone[0] != alone[1] != alone[2]


def test_step_is_drawn_at_once_without_rows_in_the_program(tiny: str) -> None:
    calls = []
    among = draw_among(ALLOWED)
    inner = among.function

    def counted(rows: torch.Tensor, uniforms: list[float]) -> list[tuple[int, float]]:
        calls.append(len(rows))
        return [*inner(rows, uniforms)]

    among.function = counted
    with load_model_by_name(tiny, "hf") as lm:

        async def step(n: int) -> None:
            await asyncio.gather(
                *(lm.next_token_logprobs([5, at], then=among(at / n)) for at in range(n))
            )

        asyncio.run(step(100))
        assert calls == [100]
        assert lm.stats.batches == 1
