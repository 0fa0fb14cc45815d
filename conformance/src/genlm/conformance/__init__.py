"""The conformance suite: what every backend must do, as tests that a plugin inherits. See
``docs/conformance.md``."""

from genlm.conformance.compare import Violation
from genlm.conformance.programs import Program
from genlm.conformance.suite import ConformanceSuite
from genlm.conformance.trust import TrustSuite

__all__ = ["ConformanceSuite", "Program", "TrustSuite", "Violation"]
