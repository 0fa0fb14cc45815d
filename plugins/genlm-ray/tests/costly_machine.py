"""Other programs for the fleet without Ray, every time: ten times as many as in the gate."""

from __future__ import annotations

from hypothesis import settings

from .test_machine import Machine

TestFleet = Machine.TestCase
TestFleet.settings = settings(
    TestFleet.settings, max_examples=3000, derandomize=False, print_blob=True
)
