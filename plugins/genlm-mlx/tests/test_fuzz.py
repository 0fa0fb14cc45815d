"""Random programs on each way of keeping state."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests.programs import fuzz

from .fuzz import CLOSE_ATOL, FAR_ATOL, RECURRENT_ATOL, Reference, program
from .watched import Folders

#: The ways of keeping state, each with the longest contexts.
FAMILIES = {
    "llama": (3000, FAR_ATOL),
    "gpt2": (250, CLOSE_ATOL),
    "mistral": (600, CLOSE_ATOL),
    "qwen2": (3000, FAR_ATOL),
    "phi": (600, CLOSE_ATOL),
    "gemma3": (600, CLOSE_ATOL),
    "gemma2": (600, CLOSE_ATOL),
    "mamba": (300, RECURRENT_ATOL),
    "lfm2": (600, CLOSE_ATOL),
    "falcon_h1": (300, RECURRENT_ATOL),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_random_programs(
    folders: Folders,
    lora_folders: dict[str, str],
    family: str,
    fuzz_seed: int,
    say: Callable[[str], None],
) -> None:
    reference = Reference(folders(family), lora_folders if family == "llama" else {})
    begin = functools.partial(program, reference, *FAMILIES[family])
    say(str(fuzz(begin, fuzz_seed, usually=18, parts=len(FAMILIES))))
