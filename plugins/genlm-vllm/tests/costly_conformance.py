"""The whole suite on a small real model."""

from __future__ import annotations

from tests.whole_suite import OnARealModel

from .test_conformance import FLOAT32


class TestReal(OnARealModel):
    backend = "vllm"
    options = {"engine_opts": FLOAT32}  # noqa: RUF012
