"""What a stranger's model folder may do: none of its code runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from genlm.core import load_model_by_name
from genlm.core.conformance.canaries import TRAPS, Canary, canaries
from genlm.core.errors import ModelNotFoundError


@pytest.fixture(scope="module")
def made(folders, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Canary]:
    into = tmp_path_factory.mktemp("canaries")
    return {canary.name: canary for canary in canaries(Path(folders("llama")), into)}


@pytest.mark.parametrize("trap", TRAPS)
def test_no_code_of_a_model_folder_is_run(made, trap):
    made[trap].use("mlx")
    assert not made[trap].sprung


def test_a_wrong_path_is_said_at_once():
    with pytest.raises(ModelNotFoundError, match="no folder '/no/such/model', and a hub"):
        load_model_by_name("/no/such/model", "mlx")
