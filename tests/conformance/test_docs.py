"""The documentation of the suite agrees with the code."""

from __future__ import annotations

import inspect

from genlm.conformance import ConformanceSuite

from .kit import ROOT
from .mutants import MUTANTS

#: Clauses that no mock can break: those on the plugin's module and on the class have tests of their
#: own, those on torch modules and on the folders of adapters have mutants of a tiny real model.
PLANTED = {
    "import_of_plugin_imports_no_engine": "a plugin module that imports torch",
    "no_clause_is_missing": "a class that deletes a clause, one that overrides it",
    "unknown_option_is_refused": "a plugin that takes any option",
    "weights_changed_in_place": "`StateOutlivesTheWeights`, of a tiny real model",
    "same_path_with_other_weights": "`FolderReadOnce`, of a tiny real model",
    "adapter_of_another_model": "`WrongAdapterPassedOver`, of a tiny real model",
}


def table() -> str:
    lines = ["| clause | what holds | what the suite's own tests break |", "|---|---|---|"]
    for name in ConformanceSuite.clauses:
        clause = name.removeprefix("test_")
        promise = " ".join((inspect.getdoc(getattr(ConformanceSuite, name)) or "").split()).replace(
            "``", "`"
        )
        mutants = [f"`{mutant}`" for mutant, fault in MUTANTS.items() if fault.breaks == clause]
        broken = ", ".join(mutants) or PLANTED[clause]
        lines.append(f"| `{clause}` | {promise} | {broken} |")
    return "\n".join(lines)


def test_the_table_of_clauses_is_that_of_the_code() -> None:
    assert table() in (ROOT / "docs" / "conformance.md").read_text()
