"""Write the generated blocks of the pages, so that GitHub shows them too.

A page has blocks such as::

    <!-- made: reference genlm.core.lm.AsyncLM inherited -->
    ...
    <!-- end -->

``reference`` is made from docstrings, ``figures`` from the newest results of the benchmarks,
``clauses`` from the docstrings of the conformance suite, ``options`` from what the backends take:
of one that is named, or of all; ``families`` from the record of the sweeps. ``--check`` writes
nothing and fails if a block is old. The site shows references with links between types:
``tools/site.py`` turns them into directives of mkdocstrings.
"""

from __future__ import annotations

import argparse
import ast
import logging
import re
import sys
from collections.abc import Iterator
from typing import Any

import griffe

from tools import families
from tools.figures import TABLES, Figures
from tools.options import NO_OPTIONS, TAKEN_BY, options_of
from tools.sources import ROOT, found

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]

#: A generated block: its beginning, its kind, its subject, and its end.
BLOCK = re.compile(
    r"(<!-- made: (\w+)(?: ([\w.]+))?( inherited)? -->\n).*?(<!-- end -->)", re.DOTALL
)
ROLE = re.compile(r":(?:class|meth|func|mod|data|attr|exc):`~?([\w.]+)`")

#: The most characters of a signature in one line.
WIDTH = 88


def filled(page: str) -> str:
    """A page with its blocks filled."""

    def text(block: re.Match[str]) -> str:
        begin, kind, about, inherited, end = block.groups()
        match kind:
            case "reference":
                made = documented(about, bool(inherited))
            case "figures":
                made = f"\n{TABLES[about](Figures())}\n\n"
            case "clauses":
                made = f"\n{clauses()}\n\n"
            case "families":
                made = f"\n{families.table()}\n\n"
            case "options":
                made = f"\n{options(about)}\n\n"
            case _:
                raise ValueError(f"a page has a block of kind {kind!r}")
        return f"{begin}{made}{end}"

    return BLOCK.sub(text, page)


def directives(page: str) -> str:
    """A page with its references turned into directives of mkdocstrings."""

    def directive(block: re.Match[str]) -> str:
        _, kind, name, inherited, _ = block.groups()
        if kind != "reference":
            return block[0]
        options = ["inherited_members: true"] if inherited else []
        if isinstance(found(name), griffe.Module):
            options += ["show_root_heading: false", "show_root_toc_entry: false"]
        lines = [f"::: {name}", *(["    options:"] if options else [])]
        return "\n".join([*lines, *(f"      {option}" for option in options)])

    return BLOCK.sub(directive, page)


def clauses() -> str:
    """The clauses of the conformance suite: what holds by each, the likeliest cause of a failure,
    and the capability by which an engine is excused."""
    suite = found("genlm.conformance.suite.ConformanceSuite")
    lines = [
        "| clause | what holds | likeliest cause of a failure | excused by |",
        "|---|---|---|---|",
    ]
    for name, member in suite.inherited_members.items():
        if name.startswith("test_"):
            promise = " ".join(_prose(member.docstring.value).split())
            cause, capability = _advice(member)
            cells = f"`{name.removeprefix('test_')}`", promise, cause, capability
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def options(backend: str | None) -> str:
    """The options of a backend, or of all, with their defaults and meanings."""
    lines = ["| option | default | meaning |", "|---|---|---|"]
    if backend is None:
        lines = ["| backend | option | default | meaning |", "|---|---|---|---|"]
    for name in TAKEN_BY if backend is None else [backend]:
        first = f"| {name if name == 'every' else f'`{name}`'} " * (backend is None)
        for option in options_of(name):
            meaning = " ".join(_prose(option.meaning).split())
            lines.append(f"{first}| `{option.name}` | `{option.default}` | {meaning} |")
    return "\n".join(lines)


def _advice(clause: Any) -> tuple[str, str]:
    """The likeliest cause that its decorator ``advise`` names, and the capability, if any."""
    for decorator in clause.decorators:
        if decorator.callable_path.endswith(".advise"):
            given = ast.parse(str(decorator.value), mode="eval").body
            assert isinstance(given, ast.Call)
            named = {each.arg: ast.literal_eval(each.value) for each in given.keywords}
            return str(ast.literal_eval(given.args[0])), named.get("capability", "")
    return "", ""


def documented(name: str, inherited: bool) -> str:
    """The text of a block."""
    thing = found(name)
    lines = [] if isinstance(thing, griffe.Module) else _heading(thing, 2)
    lines += _text(thing)
    for member in _members(thing, inherited):
        lines += _heading(member, 2 if isinstance(thing, griffe.Module) else 3)
        lines += _text(member)
        if isinstance(thing, griffe.Module):
            for inner in _members(member, inherited=False):
                lines += [*_heading(inner, 3), *_text(inner)]
    return "\n".join(lines).rstrip() + "\n\n"


def _members(thing: Any, inherited: bool) -> Iterator[Any]:
    """The public members that have a docstring, in the order of the source."""
    if not isinstance(thing, griffe.Module | griffe.Class):
        return
    own = [member for member in thing.members.values() if not member.is_alias]
    if inherited:
        own += [member.final_target for member in thing.inherited_members.values()]
    for member in own:
        hidden = member.name.startswith("_") or member.docstring is None
        if not (hidden or isinstance(member, griffe.Module)):
            yield member


def _heading(thing: Any, level: int) -> list[str]:
    lines = [f"{'#' * level} `{thing.name}`", ""]
    if isinstance(thing, griffe.Function | griffe.Class):
        signature = thing.signature() or thing.name
        if len(signature) > WIDTH:
            inside, _, end = signature.partition("(")[2].rpartition(")")
            parts = "".join(f"    {part},\n" for part in _split(inside))
            signature = f"{thing.name}(\n{parts}){end}"
        coroutine = "async " if "async" in getattr(thing, "labels", ()) else ""
        lines += ["```py", f"{coroutine}{signature}", "```", ""]
    return lines


def _split(arguments: str) -> list[str]:
    """The arguments of a signature, which are separated by the commas outside of brackets."""
    parts, depth = [""], 0
    for character in arguments:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _text(thing: Any) -> list[str]:
    """A docstring, section by section."""
    lines: list[str] = []
    for section in thing.docstring.parsed if thing.docstring else ():
        value: Any = section.value
        match section.kind.value:
            case "text":
                lines += [_prose(value), ""]
            case "examples":
                lines += ["Examples:", ""]
                for kind, text in value:
                    code = kind.value == "examples"
                    lines += ["```pycon", text, "```", ""] if code else [_prose(text), ""]
            case "admonition":
                prose = _prose(value.contents)
                apart = "\n\n" if prose.startswith("- ") else " "  # a list needs lines of its own
                lines += [f"**{section.title}:**{apart}{prose}", ""]
            case "parameters" if thing.path in TAKEN_BY.values():
                own = [item for item in value if item.name in NO_OPTIONS]
                others = "- The others are [options](options.md)."
                lines += ["Arguments:", "", *map(_item, own), others, ""]
            case kind:
                title = {"parameters": "Arguments"}.get(kind, kind.capitalize())
                lines += [f"{title}:", "", *map(_item, value), ""]
    return lines


def _item(item: Any) -> str:
    """An argument, attribute, result or error, as an item of a list."""
    name = getattr(item, "name", "") or (str(item.annotation) if item.annotation else "")
    said = " ".join(_prose(item.description).split())
    return f"- `{name}`: {said}" if name else f"- {said}"


def _prose(text: str) -> str:
    """Text of a docstring as Markdown: code and names of others as code."""
    text = ROLE.sub(lambda role: f"`{role[1].rpartition('.')[2]}`", text).replace("``", "`")
    return re.sub(r"::\n\n((?:    .*\n?|\n)+)", _block_of_code, text)


def _block_of_code(indented: re.Match[str]) -> str:
    code = re.sub(r"^    ", "", indented[1].rstrip(), flags=re.MULTILINE)
    return f":\n\n```\n{code}\n```\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail if one is old")
    check = parser.parse_args().check
    logging.getLogger("griffe").setLevel(logging.ERROR)
    old = [page for page in PAGES if filled(page.read_text()) != page.read_text()]
    for page in old if not check else ():
        page.write_text(filled(page.read_text()))
    names = ", ".join(str(page.relative_to(ROOT)) for page in old)
    if old and check:
        sys.exit(f"blocks: {names}: a block is old; run python -m tools.blocks")
    print(f"blocks: {names or 'nothing'} {'' if check else 'written'}".strip())


if __name__ == "__main__":
    main()
