"""The outcome of a small model of every family on every backend, and the table of outcomes.

The sweeps (``nox -s "costly(hf)"`` and the others) note each family in ``build/families.jsonl``.
``python -m tools.families`` takes these notes into ``benchmarks/families.jsonl``, and
``tools.blocks`` makes the table of the page from that. The sweeps fail if the outcome of a
family is not that of the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "families.jsonl"
NOTES = ROOT / "build" / "families.jsonl"

#: The backends in the order of the table, hf first.
BACKENDS = ("hf", "vllm", "mlx", "sgl")

#: The words by which the plugins' own errors show that a family is rejected only on a CPU.
ON_A_CPU = re.compile(r"on a CPU|in plain PyTorch")

#: The words of errors about kernels that an engine lacks for CPUs.
NO_KERNEL = re.compile(
    r"cpu|cuda|active drivers|causal_conv1d|OpNamespace|attention backends|trtllm|AttnB|MLA b",
    re.IGNORECASE,
)

#: The words of errors about small models that an engine cannot load at all.
DOES_NOT_LOAD = re.compile(r"cannot (load|serve)|^(?!EngineError)\w+Error: ")

#: The most characters of an error that are kept.
REASON_CHARACTERS = 160


@dataclass(frozen=True)
class Outcome:
    """The outcome for a family's small model on a backend.

    Attributes:
        backend: The backend's name.
        family: The ``model_type`` of transformers.
        outcome: ``"right"``, ``"refused"``, ``"not built"`` (no small model could be made), or
            another outcome of the sweep.
        limit: The limitation of right rows: ``"contexts end early"``, ``"keeps no state"``, or
            nothing.
        why: The text of the error, for a family without rows.
        versions: The versions of the engine and of transformers.
    """

    backend: str
    family: str
    outcome: str
    limit: str = ""
    why: str = ""
    versions: str = ""


def note(outcome: Outcome, notes: Path = NOTES) -> None:
    """Add what a sweep has found to the notes, without paths of this machine."""
    fields = asdict(outcome)
    fields["why"] = re.sub(r"(?<!\w)/[\w./-]+", "...", fields["why"])[:REASON_CHARACTERS]
    notes.parent.mkdir(parents=True, exist_ok=True)
    with notes.open("a", encoding="utf-8") as file:
        file.write(json.dumps(fields) + "\n")


def read(file: Path) -> dict[tuple[str, str], Outcome]:
    """The outcomes in a file by backend and family; the last of each."""
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    found = [Outcome(**json.loads(line)) for line in lines]
    return {(one.backend, one.family): one for one in found}


def recorded(backend: str, family: str) -> Outcome | None:
    """The recorded outcome for a family; ``None`` if the backend has no such family."""
    return read(RECORD).get((backend, family))


def lines(outcomes: dict[tuple[str, str], Outcome]) -> Iterator[str]:
    for _, outcome in sorted(outcomes.items()):
        yield json.dumps({name: value for name, value in asdict(outcome).items() if value}) + "\n"


def said(outcome: Outcome | None) -> str:
    """An outcome in the words of the table; empty if the engine has no such family."""
    if outcome is None:
        return ""
    if outcome.outcome == "right":
        return f"right, {outcome.limit}" if outcome.limit else "right"
    if outcome.outcome == "fails by itself":
        return "no reference"
    if outcome.outcome != "refused":
        return "no small model"
    if not DOES_NOT_LOAD.search(outcome.why):
        return "rejected on a CPU" if ON_A_CPU.search(outcome.why) else "rejected"
    return "no kernel" if NO_KERNEL.search(outcome.why) else "does not load"


def table() -> str:
    """A row for each family that an engine besides transformers has; the others of hf as a list."""
    record = read(RECORD)
    backends = [one for one in BACKENDS if any(backend == one for backend, _ in record)]
    families = sorted({family for _, family in record})
    shared = [f for f in families if any((backend, f) in record for backend in backends[1:])]
    rows = [
        [f"`{family}`", *(said(record.get((backend, family))) for backend in backends)]
        for family in shared
    ]
    only: dict[str, list[str]] = {}
    for family in families:
        if family not in shared:
            only.setdefault(said(record["hf", family]), []).append(f"`{family}`")
    lists = [[f"{outcome} ({len(names)})", ", ".join(names)] for outcome, names in only.items()]
    versions = {outcome.backend: outcome.versions for outcome in record.values()}
    return "\n\n".join(
        [
            markdown(["family", *(f"`{backend}`" for backend in backends)], rows),
            "Families that only hf has:",
            markdown(["outcome", "families"], lists),
            markdown(["backend", "versions"], [[f"`{one}`", versions[one]] for one in backends]),
        ]
    )


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    new = read(NOTES)
    RECORD.write_text("".join(lines({**read(RECORD), **new})), "utf-8")
    print(f"families: {len(new)} notes taken into {RECORD.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
