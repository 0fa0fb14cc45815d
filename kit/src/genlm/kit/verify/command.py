"""``genlm verify``: whether an engine serves the model that a folder holds."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from genlm.core.cli.model import Commands, add_model, loaded, own_options
from genlm.core.errors import EngineError
from genlm.core.lm import AsyncLM
from genlm.core.plugins import choose_backend, find_backend
from genlm.kit.verify.subject import Subject

if TYPE_CHECKING:
    from genlm.kit.verify.report import Report

#: The name of an adapter while it is verified.
ADAPTER = "verified"


def add_to(commands: Commands) -> None:
    verify = commands.add_parser(
        "verify", help="compare an engine's rows with transformers' rows of the same folder"
    )
    add_model(verify)
    verify.add_argument("--lora", metavar="FOLDER", help="compare the rows of an adapter, too")
    verify.set_defaults(run=verify_model)


def verify_model(options: argparse.Namespace) -> int:
    """Print what was compared; 0 if the engine serves the model."""
    from genlm.kit.verify.reference import Unanswered

    name = options.backend or choose_backend()
    backend = find_backend(name)
    given = own_options(options)
    subject = Subject(
        model=options.model, engine=backend.info().engine, backend=name, options=given
    )
    reports: list[Report] = []
    more = {"verify": reports.append} if backend.verifies else {}
    try:
        with loaded(options, name, **more) as (lm, out):
            if not reports:
                reports.append(_compared(lm, subject))
            print(reports[0], file=out)
            if options.lora is not None:
                dtype = reports[0].dtype
                reports.append(_compared(lm, reports[0].subject, options.lora, dtype))
                print(f"\nwith the adapter {options.lora}\n{reports[1]}", file=out)
    except Unanswered as error:
        raise EngineError(f"{options.model!r} cannot be verified: {error}") from error
    return 0 if all(report.passed for report in reports) else 1


def _compared(
    lm: AsyncLM, subject: Subject, adapter: str | None = None, dtype: str | None = None
) -> Report:
    """The report on a model that is loaded already, of one that its plugin does not verify or with
    an adapter.

    Raises:
        Unanswered: there is nothing to compare with.
    """
    from genlm.kit.verify.comparison import compare
    from genlm.kit.verify.loading import MAX_THRESHOLD, copy_of
    from genlm.kit.verify.reference import Reference, Unanswered

    folder = subject.folder()
    if folder is None:
        raise Unanswered("it is neither a model's folder nor in the hub's cache")
    if adapter is not None:
        lm.add_new_lora(adapter, ADAPTER)
    with Reference(subject, folder, adapter) as reference:
        served = copy_of(subject, reference) if adapter is None else None
        reference.begin(MAX_THRESHOLD)
        name = None if adapter is None else ADAPTER
        return compare(
            subject,
            reference,
            lambda ids: lm.next_token_logprobs_uncached(ids, lora_name=name),
            lm.max_context,
            dtype,
            served,
        )
