"""What a stranger's model folder may do: none of its code runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from genlm.core import InvalidOptionError, load_model_by_name
from genlm.core.conformance.canaries import TRAPS, Canary, canaries
from genlm.core.errors import ModelNotFoundError

SMALL = {"max_total_tokens": 1024}


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Canary]:
    into = tmp_path_factory.mktemp("canaries")
    return {canary.name: canary for canary in canaries(Path(tiny), into)}


@pytest.mark.parametrize("trap", TRAPS)
def test_no_code_of_a_model_folder_is_run(made, trap):
    made[trap].use("sgl", engine_opts=dict(SMALL))
    assert not made[trap].sprung


def test_a_wrong_path_is_said_at_once():
    with pytest.raises(ModelNotFoundError, match="no folder '/no/such/model', and a hub"):
        load_model_by_name("/no/such/model", "sgl")


@pytest.mark.parametrize("trap", [name for name in TRAPS if name.startswith("auto_map")])
def test_a_folder_that_names_code_is_refused_by_name(made, trap):
    with pytest.raises(InvalidOptionError, match=r"auto_map in config\.json.*trust_remote_code"):
        load_model_by_name(str(made[trap].folder), "sgl")


def test_a_folder_that_is_trusted_may_name_code(made):
    """A class that SGLang has itself: the code is not needed, and the model loads."""
    trusted = {"trust_remote_code": True, **SMALL}
    folder = str(made["processor"].folder)
    with load_model_by_name(folder, "sgl", {"engine_opts": trusted}) as lm:
        assert lm.next_token_logprobs_sync([1, 2]).isfinite().all()
