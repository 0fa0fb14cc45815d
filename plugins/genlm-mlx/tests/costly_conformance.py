"""The whole suite on a small real model."""

from __future__ import annotations

from tests.whole_suite import OnARealModel


class TestReal(OnARealModel):
    backend = "mlx"
    longest = 129
