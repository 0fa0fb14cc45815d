"""No code of an untrusted model folder runs."""

from __future__ import annotations

import pytest

from genlm.conformance.trust import TrustSuite


class TestTrust(TrustSuite):
    backend = "mlx"

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, folders) -> str:
        return str(folders("llama"))
