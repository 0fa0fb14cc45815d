"""What the README shows is run."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

from genlm.core import AsyncLM
from genlm.core.plugins import plugin_manager

README = (Path(__file__).parent.parent / "README.md").read_text()


def block(marker: str) -> str:
    """The code block that follows a marker."""
    found = re.search(rf"<!-- {re.escape(marker)} -->\n```python\n(.*?)```", README, re.DOTALL)
    assert found, f"the README has no block marked {marker!r}"
    return found[1]


def test_the_backend_of_the_readme_loads_and_answers(monkeypatch):
    module = types.ModuleType("genlm_uniform.plugin")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(block("file: genlm_uniform/plugin.py"), module.__dict__)
    hook = plugin_manager("uniform", module).hook
    assert hook.genlm_backend_info().available
    with AsyncLM(lambda: hook.genlm_load(model="any", options={}), backend="uniform", check=True) as lm:
        row = lm.next_token_logprobs_sync([1, 2, 3])
    assert row.shape == (258,)
    assert (row == row[0]).all()
