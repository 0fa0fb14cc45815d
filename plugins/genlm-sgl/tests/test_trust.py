"""No code of an untrusted model folder runs."""

from __future__ import annotations

from typing import ClassVar

import pytest

from genlm.conformance.trust import TrustSuite
from genlm.conformance.trust.canaries import TRAPS
from genlm.core import InvalidOptionError, load_model_by_name

SMALL = {"max_total_tokens": 1024}


class TestTrust(TrustSuite):
    backend = "sgl"
    options: ClassVar = {"engine_opts": dict(SMALL)}

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tiny) -> str:
        return str(tiny)

    @pytest.mark.parametrize("trap", [name for name in TRAPS if name.startswith("auto_map")])
    def test_a_folder_that_names_code_is_rejected_by_name(self, made, trap):
        message = r"auto_map in config\.json.*trust_remote_code"
        with pytest.raises(InvalidOptionError, match=message):
            load_model_by_name(str(made[trap].folder), "sgl")

    def test_a_folder_that_is_trusted_may_name_code(self, made):
        """A class that SGLang has itself: the code is not needed, and the model loads."""
        trusted = {"trust_remote_code": True, **SMALL}
        folder = str(made["processor"].folder)
        with load_model_by_name(folder, "sgl", {"engine_opts": trusted}) as lm:
            assert lm.next_token_logprobs_sync([1, 2]).isfinite().all()
