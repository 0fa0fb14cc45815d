"""The conformance suite: what every backend must do, as tests that a plugin inherits. See
``docs/conformance.md``."""

from typing import TYPE_CHECKING, Any

from genlm.conformance.compare import Violation
from genlm.conformance.programs import Program
from genlm.conformance.suite import ConformanceSuite

if TYPE_CHECKING:
    from genlm.conformance.trust import TrustSuite

__all__ = ["ConformanceSuite", "Program", "TrustSuite", "Violation"]


def __getattr__(name: str) -> Any:
    """``TrustSuite``, which is about files and not about what an engine computes: it is imported
    by those who inherit it."""
    if name == "TrustSuite":
        from genlm.conformance.trust import TrustSuite

        return TrustSuite
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
