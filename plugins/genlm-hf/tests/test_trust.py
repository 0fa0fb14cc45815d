"""No code of an untrusted model folder runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from genlm.conformance.trust import TrustSuite
from genlm.conformance.trust.canaries import Canary
from genlm.core import load_model_by_name


class TestTrust(TrustSuite):
    backend = "hf"

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tiny: str) -> str:
        return tiny

    def test_trusted_code_is_run(self, made: dict[str, Canary]) -> None:
        """Or the traps above would show nothing."""
        canary = made["auto_map of an unknown type"]
        assert not canary.sprung
        with pytest.raises(Exception, match="Canary"):  # the canary's code is not a configuration
            load_model_by_name(str(canary.folder), "hf", {"hf_opts": {"trust_remote_code": True}})
        assert canary.sprung
        Path(canary.mark).unlink()
