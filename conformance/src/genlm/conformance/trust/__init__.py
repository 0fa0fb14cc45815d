"""Tests of files from unknown authors, for plugins to inherit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from genlm.conformance.trust.canaries import TRAPS, Canary, canaries, pickled_adapter
from genlm.core.errors import GenlmError, ModelNotFoundError
from genlm.core.lm import load_model_by_name


class TrustSuite:
    """No code of a model folder, a tokenizer or an adapter is run.

    A plugin's class sets :attr:`backend` and gives a fixture ``folder``: a small model's folder as
    transformers saves it, with a fast tokenizer.

    Attributes:
        backend: Its name.
        options: For small models.
    """

    backend: str
    options: Mapping[str, Any] = {}

    @pytest.fixture(scope="class")
    @classmethod
    def made(cls, folder: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Canary]:
        into = tmp_path_factory.mktemp("canaries")
        return {canary.name: canary for canary in canaries(Path(folder), into)}

    @pytest.mark.parametrize("trap", TRAPS)
    def test_no_code_of_a_model_folder_is_run(self, made: dict[str, Canary], trap: str) -> None:
        made[trap].use(self.backend, **self.options)
        assert not made[trap].sprung

    def test_no_code_of_an_adapter_is_run(self, folder: str, tmp_path: Path) -> None:
        adapter = pickled_adapter(tmp_path)
        with (
            load_model_by_name(folder, self.backend, self.options) as lm,
            # The error says that it is a pickle, or that adapters are switched off.
            pytest.raises(GenlmError),
        ):
            lm.add_new_lora(str(adapter.folder), "stranger")
        assert not adapter.sprung

    def test_a_wrong_path_is_said_at_once(self) -> None:
        with pytest.raises(ModelNotFoundError, match="no folder '/no/such/model', and a hub"):
            load_model_by_name("/no/such/model", self.backend)
