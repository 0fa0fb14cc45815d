"""Make the documentation site in ``build/site``, from ``build/site-source``.

The site has the pages of ``docs/``, the READMEs of the plugins and a few pages of the repository's
root. Tutorials, and the page on changing rows, are executed: their outputs and plots become part
of the page, and an error in one of them is an error here. A comment ``<!-- check: CONDITION -->``
asserts what the text before it says of the outputs. Then zensical builds the site (see
``mkdocs.yml``), and it is looked at in a browser.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.figures import with_plots

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "build" / "site-source"

#: Pages from outside ``docs/``, each with its place in the site.
PAGES = {
    ROOT / "CHANGELOG.md": "changelog.md",
    ROOT / "CONTRIBUTING.md": "contributing.md",
    ROOT / "SECURITY.md": "security.md",
    ROOT / "benchmarks" / "README.md": "benchmarks.md",
    ROOT / "compat" / "genlm-backend" / "README.md": "how-to/genlm-backend.md",
    ROOT / "benchmarks" / "RESULTS.md": "results.md",
    ROOT / "benchmarks" / "RUNS.md": "runs.md",
    **{
        readme: f"how-to/backends/{readme.parent.name.removeprefix('genlm-')}.md"
        for readme in sorted(ROOT.glob("plugins/*/README.md"))
    },
}

#: Tutorials name the model as a user does, but run on a copy in a local folder.
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"

#: The look at the site, the programs of its pages, and the examples that run on the real model.
#: Each runs in a process of its own, because the browser leaves an event loop running.
SEEN = (
    ("tests/site/browser.py",),
    (
        "tests/site/test_programs.py",
        "tests/examples/test_constrained.py",
        "tests/examples/test_harness.py",
    ),
)

#: Code that runs before each page in the kernel that executes all pages. It removes the names of
#: the previous page.
SETUP = """__import__("os").chdir({folder!r})
%reset -f
%config InlineBackend.figure_formats = ["svg"]"""

#: A statement of a tutorial's text about its outputs, as a condition in Python. It is not shown.
CHECK = re.compile(r"^<!-- check: (.+?) -->$", re.MULTILINE | re.DOTALL)

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")


def prepare(model: str, only: str | None = None) -> None:
    """Write the source of the site. With ``only``, only this tutorial is executed, and the others
    have no outputs."""
    # Imported here, because the tests of this file have no griffe.
    from tools.blocks import directives

    shutil.rmtree(SOURCE, ignore_errors=True)
    shutil.copytree(ROOT / "docs", SOURCE)
    places = {page: SOURCE / page.relative_to(ROOT / "docs") for page in ROOT.glob("docs/**/*.md")}
    places |= {page: SOURCE / place for page, place in PAGES.items() if page.exists()}
    for page, place in places.items():
        place.parent.mkdir(parents=True, exist_ok=True)
        text = relinked(directives(page.read_text()), page, place, places)
        place.write_text(with_plots(text, place.parent / "plots"))
    pages = [*sorted((SOURCE / "tutorials").glob("*.md")), SOURCE / "how-to/change-rows.md"]
    with kernel() as manager:
        for page in pages:
            if only in (None, page.stem) and page.stem != "index":
                print(f"site: executing {page.name}", file=sys.stderr, flush=True)
                page.write_text(executed(page, model, manager))


def relinked(text: str, page: Path, place: Path, places: dict[Path, Path]) -> str:
    """A page with its links to files of the repository turned into links of the site.

    A file that is not in the site is named, without a link.
    """

    def link(match: re.Match[str]) -> str:
        label, target = match.groups()
        path, _, anchor = target.partition("#")
        if ":" in target or not path:
            return match[0]
        file = (page.parent / path).resolve()
        if file not in places:
            return match[0] if file.is_relative_to(ROOT / "docs") else label
        where = os.path.relpath(places[file], place.parent)
        return f"[{label}]({where}{'#' * bool(anchor)}{anchor})"

    # Links inside blocks of code are left alone.
    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)


@contextlib.contextmanager
def kernel() -> Iterator[Any]:
    """The manager of a kernel that begins with the first page. Importing an engine takes as long as
    most pages, so one process executes them all."""
    from jupyter_client import AsyncKernelManager
    from nbclient.util import run_sync

    manager = AsyncKernelManager(kernel_name="python3")
    try:
        yield manager
    finally:
        if manager.has_kernel:
            run_sync(manager.shutdown_kernel)(now=True)


def executed(page: Path, model: str, manager: Any) -> str:
    """A tutorial with the outputs of its Python cells, after checking its statements about them."""
    import jupytext
    from nbclient import NotebookClient

    source = CHECK.sub('```python tags=["check"]\nassert (\\1)\n```', page.read_text())
    notebook = jupytext.reads(source.replace(HUB_NAME, model), fmt="md")
    with tempfile.TemporaryDirectory() as folder:
        setup = SETUP.format(folder=folder)
        notebook.cells.insert(0, jupytext.reads(f"```python\n{setup}\n```", fmt="md").cells[0])
        NotebookClient(notebook, km=manager, timeout=600).execute()
        for made in Path(folder).glob("*.html"):  # shown in a frame
            shutil.copy(made, page.parent)
    shown = [cell for cell in notebook.cells[1:] if "check" not in cell.metadata.get("tags", [])]
    text = "\n\n".join(rendered(cell, page, number) for number, cell in enumerate(shown, 1))
    return text.replace(model, HUB_NAME) + "\n"


def rendered(cell: Any, page: Path, number: int) -> str:
    if cell.cell_type != "code":
        return str(cell.source)
    parts = [fenced(cell.source, "python")]
    printed = ""
    for output in cell.outputs:
        if output.output_type == "stream":
            printed += output.text if output.name == "stdout" else ""
            continue
        data = output.get("data", {})
        if "image/svg+xml" in data or "image/png" in data:
            name = f"{page.stem}-{number}" + (".svg" if "image/svg+xml" in data else ".png")
            write_image(page.with_name(name), data)
            parts.append(f"![A plot made by the code above]({name})")
        elif "text/html" in data:
            parts.append(data["text/html"])
        elif "text/plain" in data:
            printed += data["text/plain"] + "\n"
    if printed.strip():
        parts.insert(1, fenced(printed.rstrip(), "{ .text .output }"))
    return "\n\n".join(parts)


def fenced(text: str, language: str) -> str:
    return f"````{language}\n{text}\n````"


def write_image(path: Path, data: dict[str, str]) -> None:
    if path.suffix == ".svg":
        path.write_text(data["image/svg+xml"])
    else:
        path.write_bytes(base64.b64decode(data["image/png"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="the folder of SmolLM2-135M-Instruct")
    parser.add_argument("--only", help="execute this tutorial alone, by the name of its file")
    options = parser.parse_args()
    prepare(options.model, options.only)
    subprocess.run([sys.executable, "-m", "zensical", "build", "--strict", "--clean"], check=True)
    screenshots = ROOT / "build" / "screenshots"
    screenshots.mkdir(parents=True, exist_ok=True)
    seen = {
        "GENLM_TEST_MODEL": options.model,
        "GENLM_SITE": str(ROOT / "build" / "site"),
        "GENLM_SITE_ONLY": options.only or "",
        "GENLM_SCREENSHOTS": str(screenshots),
    }
    pytest = [sys.executable, "-m", "pytest"]
    codes = [subprocess.run([*pytest, *paths], env=os.environ | seen).returncode for paths in SEEN]
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
