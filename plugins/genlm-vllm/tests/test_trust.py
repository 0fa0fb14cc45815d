"""What a stranger's model folder may do: none of its code runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from genlm.core import InvalidOptionError, load_model_by_name
from genlm.core.conformance.canaries import TRAPS, Canary, canaries
from genlm.core.errors import ModelNotFoundError

SMALL = {"max_model_len": 64, "max_num_seqs": 4, "kv_cache_memory_bytes": 8 << 20}


@pytest.fixture(scope="module")
def made(tiny_path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Canary]:
    into = tmp_path_factory.mktemp("canaries")
    return {canary.name: canary for canary in canaries(Path(tiny_path), into)}


@pytest.mark.parametrize("trap", TRAPS)
def test_no_code_of_a_model_folder_is_run(made, trap):
    made[trap].use("vllm", engine_opts=dict(SMALL))
    assert not made[trap].sprung


def test_a_wrong_path_is_said_at_once():
    with pytest.raises(ModelNotFoundError, match="no folder '/no/such/model', and a hub"):
        load_model_by_name("/no/such/model", "vllm")


def test_a_misspelt_option_names_the_right_one():
    from genlm.vllm import AsyncVirtualLM

    with pytest.raises(
        InvalidOptionError,
        match=r"no option live_session \(did you mean live_sessions\?\); it has engine_opts, live",
    ):
        AsyncVirtualLM.from_name("any", live_session=3)
