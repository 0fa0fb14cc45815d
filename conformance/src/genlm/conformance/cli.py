"""``genlm conformance``: its arguments. The suite is imported when it runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from genlm.core.cli.model import Commands


def add_to(commands: Commands) -> None:
    conformance = commands.add_parser(
        "conformance", help="check a backend against every clause of the contract"
    )
    conformance.add_argument("backend", help="the name of an installed backend")
    conformance.add_argument(
        "--model", required=True, help="a path or hub name, as the backend takes it"
    )
    conformance.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="a LoRA adapter of the model; give two or more",
    )
    conformance.add_argument(
        "--dtype",
        help="what the model computes in; it sets the tolerance only (the backend is told by "
        "--option dtype=...)",
    )
    conformance.add_argument("--atol", type=float, help="the tolerance of probabilities")
    conformance.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a further option of the backend, as JSON",
    )
    conformance.add_argument("--quick", action="store_true", help="a tenth of the examples")
    conformance.add_argument(
        "--effort", type=float, default=1.0, help="multiplies the examples; 10 looks deeper"
    )
    conformance.add_argument("--seed", type=int, default=0, help="chooses the examples")
    conformance.add_argument(
        "--longest",
        type=int,
        help="the longest context to ask, in tokens; by default what it bears",
    )
    conformance.add_argument(
        "--patience", type=float, default=120.0, help="seconds after which something hangs"
    )
    conformance.add_argument(
        "--deadline", type=float, default=3600.0, help="seconds for the whole run"
    )
    conformance.add_argument(
        "--window", type=int, help="how many tokens back the model looks, if it forgets the others"
    )
    conformance.add_argument(
        "--ignores-tokens",
        action="store_true",
        help="contexts that differ may have the same row, as in a back-off model",
    )
    conformance.add_argument(
        "--text-is-normalised",
        action="store_true",
        help="the tokenizer changes text, for instance to lower case",
    )
    conformance.add_argument(
        "--excuse",
        action="append",
        default=[],
        metavar="CAPABILITY=REASON",
        help="what the engine is not asked for, and why; a wrong name lists them all",
    )
    conformance.add_argument(
        "--no-second-model", action="store_true", help="there is no room for a second model"
    )
    conformance.add_argument(
        "--reference",
        metavar="BACKEND",
        help="another backend that takes the same model; cold rows are compared with its rows",
    )
    conformance.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="write a report to publish: FILE.html or FILE.json",
    )
    conformance.add_argument("--json", action="store_true", help="print the result as JSON")
    conformance.set_defaults(run=run_conformance)


def run_conformance(options: argparse.Namespace) -> int:
    """Run the conformance suite."""
    from genlm.conformance.command import run_command

    return run_command(options)
