"""What holds for every test of this repository."""

from __future__ import annotations

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # some environments have none, and no test that needs it
    pass
else:
    # How long an example takes says how busy the machine is, not whether it is right.
    settings.register_profile(
        "any-speed", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("any-speed")
