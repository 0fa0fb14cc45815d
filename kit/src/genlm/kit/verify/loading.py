"""Loads a model while transformers computes its rows, and compares both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from genlm.core.errors import EngineError
from genlm.core.logs import get_logger
from genlm.kit.verify.comparison import HALF_DTYPES, compare
from genlm.kit.verify.copies import ServedCopy, serve_copy
from genlm.kit.verify.known import KnownProofs
from genlm.kit.verify.reference import Reference, Unanswered
from genlm.kit.verify.report import Report
from genlm.kit.verify.rows import row_of
from genlm.kit.verify.subject import Subject, seconds_for

log = get_logger()

E = TypeVar("E")

#: By default a model is verified if transformers' rows take less than this, seconds; and a load
#: waits for no more than three times as long.
MAX_REFERENCE_SECONDS, MAX_WAIT_SECONDS = 10.0, 30.0

#: The longest contexts that are compared, in tokens: by default, and on request.
DEFAULT_MAX_THRESHOLD, MAX_THRESHOLD = 64, 600

#: Whether to verify: ``None`` is by default, a function gets the report.
Verify = bool | Callable[[Report], None] | None


def load_verified(subject: Subject, verify: Verify, load: Callable[[str], E]) -> E:
    """Load a model, and compare its rows with transformers' rows of the same folder.

    The process that computes transformers' rows runs beside the load. On request, a scaled copy is
    compared as well: the engine loads it first, in a process of its own.

    Args:
        subject: The model.
        verify: Whether to compare, see :class:`genlm.core.options.CoreOptions`.
        load: Loads a folder or hub name with the options. The engine may have an attribute
            ``dtype``, the name of the type in which it computes.

    Raises:
        EngineError: rows differ by more than rounding (in half precision only if ``verify`` is
            true; otherwise this is logged); or ``verify`` is true, and there is nothing to compare
            with.
        Exception: what ``load`` raises.
    """
    asked = verify is not None
    if verify is False:
        return load(subject.model)
    if not asked and subject.on_request is None and subject in KnownProofs():
        return load(subject.model)
    try:
        engine, report = _loaded(subject, asked, load)
    except Unanswered as error:  # before the engine was loaded
        if asked:
            raise EngineError(f"{subject.model!r} cannot be verified: {error}") from error
        engine, report = load(subject.model), str(error)
    if isinstance(report, str):
        if not asked:
            log.info("model.unverified", model=subject.model, why=report, command=subject.command)
            return engine
        _close(engine)
        raise EngineError(f"{subject.model!r} cannot be verified: {report}; leave out verify")
    if callable(verify):
        verify(report)
    elif not report.passed:
        if asked or report.dtype not in HALF_DTYPES:
            _close(engine)
            raise EngineError(report.refusal())
        # Nobody asked, and how far engines round in half precision is known of few families.
        log.warning("model.differs", why=report.refusal())
        return engine
    log.info(
        "model.verified",
        model=subject.model,
        apart=max(one.apart for one in report.compared),
        lengths=[length for one in report.compared for length in one.lengths],
        not_compared=list(report.left_out),
        waited=round(report.seconds, 1),
    )
    if report.passed:
        KnownProofs().add(subject)
    return engine


def _loaded(subject: Subject, asked: bool, load: Callable[[str], E]) -> tuple[E, Report | str]:
    """The engine, and the report or why there is none.

    Raises:
        Unanswered: there is nothing to compare with, which is known before the load.
        Exception: what ``load`` raises.
    """
    reference = _reference(subject, asked)
    with reference:
        served = copy_of(subject, reference) if asked else None
        reference.begin(MAX_THRESHOLD if asked else DEFAULT_MAX_THRESHOLD)
        engine = load(subject.model)
        try:
            with reference.ended_after(None if asked else MAX_WAIT_SECONDS):
                report = compare(
                    subject,
                    reference,
                    lambda ids: row_of(engine, ids),
                    getattr(engine, "max_context", None),
                    getattr(engine, "dtype", None),
                    served,
                )
            getattr(engine, "genlm_clear_kv_cache", lambda: None)()
        except Unanswered as error:
            return engine, str(error)
        except BaseException:
            _close(engine)
            raise
    return engine, report


def _reference(subject: Subject, asked: bool) -> Reference:
    """Raises: Unanswered: there is nothing to compare with, or it takes too long."""
    if subject.unknown is not None:
        raise Unanswered(subject.unknown)
    if subject.on_request is not None and not asked:
        raise Unanswered(subject.on_request)
    folder = subject.folder()
    if folder is None:
        raise Unanswered("it is neither a model's folder nor in the hub's cache yet")
    if not asked and (seconds := seconds_for(folder)) > MAX_REFERENCE_SECONDS:
        raise Unanswered(f"transformers' rows would take about {seconds:.0f} seconds")
    return Reference(subject, folder)


def copy_of(subject: Subject, reference: Reference) -> ServedCopy | Unanswered | None:
    """A scaled copy as the subject's engine serves it, or why there is none; ``None`` if the model
    has no thresholds."""
    try:
        return serve_copy(subject, reference)
    except Unanswered as error:
        return error


def _close(engine: Any) -> None:
    getattr(engine, "genlm_close", lambda: None)()
