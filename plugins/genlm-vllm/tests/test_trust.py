"""What a stranger's model folder may do: none of its code runs."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from genlm.core import InvalidOptionError, load_model_by_name
from genlm.core.conformance.canaries import TRAPS, Canary, canaries
from genlm.core.errors import ModelNotFoundError

SMALL = {"max_model_len": 64, "max_num_seqs": 4, "kv_cache_memory_bytes": 8 << 20}


def _use(canary: Canary) -> None:
    """Load it, ask it, and render its chat template; it need not succeed."""
    with (
        contextlib.suppress(Exception),
        load_model_by_name(str(canary.folder), "vllm", {"engine_opts": dict(SMALL)}) as lm,
    ):
        lm.next_token_logprobs_sync([1, 2, 3])
        lm.tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])


@pytest.fixture(scope="module")
def made(tiny_path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Canary]:
    into = tmp_path_factory.mktemp("canaries")
    return {canary.name: canary for canary in canaries(Path(tiny_path), into)}


@pytest.mark.parametrize("trap", TRAPS)
def test_no_code_of_a_model_folder_is_run(made, trap):
    _use(made[trap])
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
