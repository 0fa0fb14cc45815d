"""Random programs. To repeat what was found:
``GENLM_FUZZ_SEED=... nox -R -s "plugin(hf)" -- -k fuzz``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest

from tests.programs import fuzz

pytest.importorskip("peft", reason="adapters are made with the package peft")

from .fuzz import ATTENTION, RECURRENT, program, program_in_four_bits

pytestmark = pytest.mark.any_version


@pytest.mark.parametrize("families", [RECURRENT, ATTENTION], ids=["recurrent", "attention"])
def test_random_programs(
    families: Sequence[str], fuzz_seed: int, say: Callable[[str], None]
) -> None:
    say(str(fuzz(functools.partial(program, families), fuzz_seed, usually=16, parts=2, rounds=10)))


def test_random_programs_with_adapters_on_weights_of_four_bits(
    fuzz_seed: int, say: Callable[[str], None]
) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    say(str(fuzz(program_in_four_bits, fuzz_seed, usually=4, parts=2, rounds=10)))
