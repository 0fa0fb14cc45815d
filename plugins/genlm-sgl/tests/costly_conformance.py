"""The whole suite on a small real model."""

from __future__ import annotations

from tests.whole_suite import OnARealModel


class TestReal(OnARealModel):
    backend = "sgl"
    options = {"engine_opts": {"context_length": 512, "max_total_tokens": 16384}}  # noqa: RUF012
