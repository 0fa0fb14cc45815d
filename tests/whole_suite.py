"""The whole suite on a small real model: the gate's looks at its rows, and takes a tiny model for
the rest."""

from __future__ import annotations

import pytest

from genlm.conformance import ConformanceSuite


class OnARealModel(ConformanceSuite):
    effort = 0.1

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def given(cls, real_model: str) -> None:
        cls.model = real_model
