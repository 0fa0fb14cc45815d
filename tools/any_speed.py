"""Imported by a ``conftest.py``: how fast the machine is decides nothing in a test of examples.

How long an example takes says how busy the machine is, not whether it is right.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("any-speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-speed")
