"""Replicas verify their models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from genlm.core import AsyncLM, EngineError, InvalidOptionError
from genlm.ray.engine import _verifying
from genlm.ray.options import RayOptions


def test_replica_verifies_unless_its_own_options_decide():
    assert _verifying(RayOptions(backend="hf"), True).backend_opts == {"verify": True}
    own = RayOptions(backend="hf", backend_opts={"verify": False})
    assert _verifying(own, True).backend_opts == {"verify": False}


def test_replicas_of_a_backend_that_verifies_nothing_are_rejected():
    with pytest.raises(InvalidOptionError, match="'mock' verifies no models"):
        _verifying(RayOptions(backend="mock"), True)
    assert _verifying(RayOptions(backend="mock"), False).backend_opts == {}


def test_replica_verifies_its_model_and_reports_gaps(
    tiny: str, fleet: Callable[..., AsyncLM]
) -> None:
    def verified(**hf_opts: Any) -> AsyncLM:
        opts = {"verify": True, "hf_opts": hf_opts}
        return fleet(tiny, "hf", replicas=1, backend_opts=opts)

    assert verified().next_token_logprobs_sync([1, 2, 3]).isfinite().all()
    with pytest.raises(EngineError, match="cannot be verified: ignore_mismatched_sizes asks for"):
        verified(ignore_mismatched_sizes=True)
