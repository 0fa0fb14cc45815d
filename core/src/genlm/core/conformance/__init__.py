"""The conformance suite: what every backend must do, as tests that a plugin inherits. See
``docs/conformance.md``.

Needs the extra ``genlm-core[conformance]`` (pytest and Hypothesis).
"""

from genlm.core.conformance.compare import Violation
from genlm.core.conformance.suite import ConformanceSuite
from genlm.core.conformance.trust import TrustSuite

__all__ = ["ConformanceSuite", "TrustSuite", "Violation"]
