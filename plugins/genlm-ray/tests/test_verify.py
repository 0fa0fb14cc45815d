"""Replicas verify their models."""

from __future__ import annotations

import pytest

from genlm.core import InvalidOptionError
from genlm.ray.engine import _verifying
from genlm.ray.options import RayOptions


def test_a_replica_is_told_to_verify_unless_its_own_options_say_otherwise():
    assert _verifying(RayOptions(backend="hf"), True).backend_opts == {"verify": True}
    own = RayOptions(backend="hf", backend_opts={"verify": False})
    assert _verifying(own, True).backend_opts == {"verify": False}


def test_replicas_of_a_backend_that_verifies_nothing_are_refused():
    with pytest.raises(InvalidOptionError, match="'mock' verifies no models"):
        _verifying(RayOptions(backend="mock"), True)
    assert _verifying(RayOptions(backend="mock"), False).backend_opts == {}
