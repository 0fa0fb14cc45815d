"""The command `genlm`, run as a user runs it, on the mock. Its output is checked."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import structlog

from genlm.conformance import ConformanceSuite
from genlm.core import MockAsyncLM
from genlm.core.cli import main, parser
from genlm.core.cli.doctor import accelerators
from genlm.core.cli.processor import dtypes_verdict, threads_verdict, timings
from genlm.core.installation import pip_install

GENLM = [sys.executable, "-m", "genlm.core"]
ON_MOCK = ["mock", "Hello", "--backend", "mock"]


@pytest.fixture(autouse=True)
def silent_logs() -> None:
    """As in a process of its own: other tests have configured structlog."""
    structlog.reset_defaults()


@pytest.fixture
def genlm(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the command, and returns its output. Any output on the standard error is a failure."""

    def run(*arguments: str) -> str:
        assert main(arguments) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return run


HELPED = """
import contextlib, sys
from genlm.core.cli import main

with contextlib.suppress(SystemExit):
    main(["--help"])
assert "torch" not in sys.modules
"""


def test_all_subcommands_are_listed_without_pytorch() -> None:
    """Its import takes seconds."""
    done = subprocess.run([sys.executable, "-c", HELPED], capture_output=True, text=True)
    assert "new-plugin" in done.stdout
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["backend"], "backends"),
        (["top", "hi", "--model", "mock"], "comes first, without --model: genlm top MODEL"),
    ],
)
def test_unknown_command_exits_with_2(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "arguments", "said"),
    [
        ("sample", ["-n", "0"], "-n must be an integer of at least 1; got 0"),
        ("sample", ["--temperature", "-1"], "temperature must be"),
        ("sample", ["--max-tokens", "-2"], "max_tokens must be"),
        ("sample", ["--option", "delay"], "--option 'delay': give --option NAME=VALUE"),
        ("sample", ["--option", "dealy=1"], "dealy"),
        ("sample", ["--chat"], "no chat template"),
        ("bench", ["--particles", "1,0"], "--particles must be integers of at least 1"),
        ("bench", ["--seconds", "0"], "--seconds must be"),
    ],
)
def test_command_prints_an_error_for_invalid_arguments(command, arguments, said, capsys):
    given = ON_MOCK if command == "sample" else ["mock", "--backend", "mock"]
    assert main([command, *given, *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("genlm: ")
    assert said in err


def test_the_version_is_that_of_the_core_and_of_every_plugin(install, capsys):
    """A broken plugin has a version too, since it is not imported."""
    install("broken", "raise ValueError")
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert not stopped.value.code
    first, *plugins, last = capsys.readouterr().out.splitlines()
    assert first == f"genlm-core {version('genlm-core')}"
    assert "broken 1.2" in plugins
    assert last.startswith("Python 3.")


#: A plugin whose code does something else instead of loading a model.
BROKEN = """
import os
from genlm.core.mock import genlm_backend_info, hookimpl

@hookimpl
def genlm_load(model, options):
    {}
"""


def test_plugin_error_is_one_line_unless_traceback_is_requested(install, capsys):
    install("fails", BROKEN.format("raise KeyError('no weights')"))
    top = ["top", "any", "x", "--backend", "fails"]
    assert main(top) == 1
    assert capsys.readouterr() == (
        "",
        "genlm: KeyError: 'no weights', while backend 'fails' (fails 1.2) loaded 'any' (`genlm "
        "--traceback ...` shows where)\n",
    )
    with pytest.raises(KeyError) as raised:
        main(["--traceback", *top])
    assert raised.traceback[-1].name == "genlm_load"


def test_interrupted_command_ends_with_the_exit_code_of_the_signal(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("genlm.core.cli.backends.backend_table", interrupted)
    assert main(["backends"]) == 130


@pytest.mark.parametrize("asked", ["backends", "--version"])
def test_closed_output_pipe_ends_silently(asked):
    with subprocess.Popen(
        [*GENLM, asked], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


@pytest.mark.parametrize("closed", ["1", "2"])
@pytest.mark.parametrize("asked", [["--version"], ["sample", *ON_MOCK, "--temperature=0"]])
def test_an_output_may_be_closed(asked, closed):
    in_a_shell = ["sh", "-c", f'exec "$@" {closed}>&-', "sh", *GENLM, *asked]
    done = subprocess.run(in_a_shell, capture_output=True)
    assert (done.returncode, done.stderr, bool(done.stdout)) == (0, b"", closed == "2")


# --- sample ---------------------------------------------------------------------------------------


def test_sample_prints_what_batch_sample_draws(genlm):
    shown = genlm("sample", *ON_MOCK, "-n", "2", "--seed", "1", "--max-tokens", "30", "--top-k=90")
    with MockAsyncLM() as lm:
        prompts = [lm.encode("Hello")] * 2
        drawn = lm.batch_sample_sync(prompts, 30, seed=1, top_k=90)
        tokens = [[lm.byte_vocab[i] for i in ids] for ids in drawn]
    expected = [
        b"".join(token.byte_string for token in each if not token.is_special) for each in tokens
    ]
    assert expected[0] != expected[1]
    headed = [
        f"--- {i} of 2 ---\n{text.decode(errors='replace')}\n" for i, text in enumerate(expected, 1)
    ]
    assert shown == "".join(headed)


def test_the_prompt_may_come_from_standard_input(genlm, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello"))
    options = ["--backend", "mock", "--seed", "5"]
    read = genlm("sample", "mock", "-", *options)
    assert read == genlm("sample", "mock", "Hello", *options)


WAITS = """
import sys
from genlm.core import mock
from genlm.core.mock import genlm_backend_info, hookimpl

def letters(token_ids):
    row = [-50.0] * 258
    row[ord("a") + len(token_ids)] = 0.0
    return row

def wait(queries):
    if any(len(query.token_ids) == 4 for query in queries):
        sys.stdin.readline()

@hookimpl
def genlm_load(model, options):
    return mock.MockEngine(mock.ByteTokenizer(), row=letters, on_batch=wait)
"""


def test_text_is_printed_while_later_tokens_are_not_drawn_yet(install):
    install("waits", WAITS)
    process = subprocess.Popen(
        [*GENLM, "sample", "any", "x", "--backend", "waits", "--max-tokens", "5"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        assert process.stdout.read(3) == "bcd"  # the engine waits until the test lets it continue
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.read() == "ef\n"
    assert process.returncode == 0


# --- top ------------------------------------------------------------------------------------------


def test_top_prints_the_ten_likeliest_tokens_with_bars(genlm):
    *lines, rest = genlm("top", *ON_MOCK).splitlines()
    with MockAsyncLM() as lm:
        row = lm.next_token_logprobs_sync(lm.encode("Hello"))
        expected = lm.top_logprobs(row, 10)
    assert [line.split()[0] for line in lines] == [
        f"{row[t.token.token_id].exp():.2%}" for t in expected
    ]
    for line, token in zip(lines, expected, strict=True):
        assert f" {token.token.token_id} " in line
    lengths = [line.count("█") for line in lines]
    assert lengths[0] == 40
    assert lengths == sorted(lengths, reverse=True)
    shares = [float(line.split("%")[0]) for line in [*lines, rest]]
    assert sum(shares) == pytest.approx(100, abs=0.06)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["top", *ON_MOCK, "-k", "2"], rb"[^#]* #{40}\n"),  # # instead of block characters
        (["sample", *ON_MOCK, "--max-tokens", "2", "--seed", "5"], rb"\?\n$"),
    ],
)
def test_ascii_output_gets_only_ascii(monkeypatch, command, shown):
    """The standard error may have more characters: on Windows, for instance, only one of the two
    may be a file."""
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert main(command) == 0
    assert re.match(shown, sys.stdout.buffer.getvalue())


# --- doctor, backends -----------------------------------------------------------------------------


def test_doctor_lists_the_machine_and_the_default_backend(
    install, genlm, monkeypatch, tmp_path: Path
):
    install("good", preference=1000)
    install("better", preference=2000)
    install("best", preference=3000, unavailable="not here")
    install("broken", "raise RuntimeError")
    cache = tmp_path / "hub"
    cache.mkdir()
    (cache / "weights").write_bytes(bytes(2_500_000))
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    # PyTorch warns about a compiler for CUDA on a machine without a GPU.
    monkeypatch.setattr(logging.getLogger("torch.utils.cpp_extension"), "disabled", True)
    out = genlm("doctor")
    assert f"({sys.executable})" in out
    for word in ("platform", "processors", "accelerator", "mock", "threads:", "dtype:"):
        assert f"\n{word} " in out
    (said,) = [line for line in out.splitlines() if line.startswith("Without --backend: ")]
    assert "better; it has the highest preference (2000) of those that run" in said
    others, _, only = said.partition("; only by name: ")
    assert ", before good (1000)" in others
    assert "mock" in only
    (models,) = [line for line in out.splitlines() if line.startswith("cache: models (hub)")]
    assert models.split()[3:] == ["2.5", "MB", str(cache)]


@pytest.mark.skipif(os.name == "nt", reason="Windows runs no scripts of a shell")
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'H100, 80 GiB'", "CUDA: H100, 80 GiB"),
        ("echo 'no driver'; exit 9", "CUDA: nvidia-smi failed: no driver"),
    ],
)
def test_accelerators_are_named_by_their_tool(monkeypatch, tmp_path: Path, script, said):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert said in accelerators()


@pytest.mark.parametrize(
    ("verdict", "other", "said"),
    [
        (threads_verdict, 0.0005, "one takes 1.00 ms where two take 0.50 ms"),
        (threads_verdict, 0.0011, "one takes 1.00 ms where two take 1.10 ms"),
        (threads_verdict, 0.02, "WARNING.*20.0 times slower.*OMP_NUM_THREADS=1"),
        (dtypes_verdict, 0.0005, "float32 takes 1.00 ms where bfloat16 takes 0.50 ms.*=bfloat16"),
        (dtypes_verdict, 0.0009, "float32 takes 1.00 ms where bfloat16 takes 0.90 ms.*right"),
        (dtypes_verdict, 0.006, "float32 takes 1.00 ms where bfloat16 takes 6.00 ms.*right"),
    ],
)
def test_doctor_says_which_threads_and_dtype_are_faster(verdict, other: float, said: str):
    text = verdict(0.001, other)
    assert re.search(said, text, re.DOTALL)
    assert ("WARNING" in text) == ("WARNING" in said)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process may use all processors")
def test_doctor_counts_the_processors_that_this_process_may_use():
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(usable)})
    try:
        assert "there is one processor" in timings()
    finally:
        os.sched_setaffinity(0, usable)


def test_backends_lists_installed_and_installable_backends(install, genlm):
    header, *lines = genlm("backends").splitlines()
    assert header.split() == ["backend", "plugin", "engine", "runs", "here"]
    assert any(line.startswith("mock") and line.endswith("yes") for line in lines)
    for name in ("ray", "sgl"):
        assert any(
            line.endswith(f"not installed: {pip_install(f'genlm-{name}')}") for line in lines
        )
    install("sgl")
    assert pip_install("genlm-sgl") not in genlm("backends")


# --- bench ----------------------------------------------------------------------------------------


def test_bench_measures_every_backend_and_says_why_one_cannot(genlm, install):
    install("dies", BROKEN.format("os._exit(options['max_context'])"))
    how = ["--backend=mock", "--backend=dies", "--option=max_context=64"]
    shown = genlm("bench", "mock", *how, "--seconds=0.2", "--particles=1,4,16")
    title, figures, plot, reason, *dtype = shown.strip().split("\n\n")
    assert title == "tokens per second"
    header, *rows = [line.split() for line in figures.splitlines()]
    assert header == ["particles", "mock"]
    assert [row[0] for row in rows] == ["1", "4", "16"]
    assert all(float(row[1].replace(",", "")) > 0 for row in rows)
    lengths = [line.count("█") for line in plot.splitlines()]
    assert (len(lengths), max(lengths)) == (3, 40)
    assert reason == "dies: its process ended with code 64"
    assert bool(dtype) != bool(accelerators())  # with an accelerator, the processor is not timed
    assert all(line.startswith("dtype: float32 takes ") for line in dtype)


def test_bench_without_a_name_measures_available_backends_except_the_mock(
    install, monkeypatch, capsys
):
    install("good")
    install("elsewhere", unavailable="not here")
    install("broken", "raise RuntimeError")
    there = ["broken", "elsewhere", "good", "mock"]
    monkeypatch.setattr("genlm.conformance.bench.backend_names", lambda: there)
    bench = ["bench", "any", "--seconds=0.1", "--particles=1", "--json"]
    assert main(bench) == 0
    out, err = capsys.readouterr()
    assert [measured["backend"] for measured in json.loads(out)] == ["good"]
    assert err.startswith("genlm: broken is left out: ")
    there[:] = ["mock"]
    assert main(bench) == 1
    assert "no backend runs here but the mock; pip install" in capsys.readouterr().err


def test_bench_fails_where_nothing_was_measured(capsys):
    assert main(["bench", "mock", "--backend=mock", "--option=dealy=1", "--json"]) == 1
    (measured,) = json.loads(capsys.readouterr().out)
    assert measured["tokens_per_second"] == {}
    assert "no option dealy" in measured["error"]


# --- completion, progress -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shell", "asked"),
    [
        ("fish", "complete -C 'genlm {words}'"),
        ("bash", "COMP_WORDS=(genlm {words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))\n"
         "_shtab_genlm; echo ${{COMPREPLY[@]}}"),
    ],
)  # fmt: skip
def test_a_shell_completes_subcommands_and_options(shell: str, asked: str, tmp_path: Path, capsys):
    shtab = pytest.importorskip("shtab.main", reason="install genlm-core[completion]")
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is missing")
    shtab.main(["genlm.core.cli.parser", "-s", shell])
    (tmp_path / "script").write_text(capsys.readouterr().out)
    for words, expected in (("do", "doctor"), ("top --ba", "--backend")):
        said = subprocess.run(
            [shell, "-c", "source ./script\n" + asked.format(words=words)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        assert said.stdout.split()[:1] == [expected]


def test_no_distribution_replaces_a_subcommand_of_the_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An older genlm-kit brings ``doctor``."""
    older = tmp_path / "older-1.dist-info"
    older.mkdir()
    (older / "METADATA").write_text("Metadata-Version: 2.1\nName: older\nVersion: 1\n")
    (older / "entry_points.txt").write_text("[genlm.commands]\ndoctor = no.such.module\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert parser().parse_args(["doctor"]).command == "doctor"
    assert capsys.readouterr().err == ""


class Terminal(io.StringIO):
    """A terminal that interrupts the program when it would show ``last``."""

    last = "6 of "

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if text.startswith(self.last):
            raise KeyboardInterrupt
        return super().write(text)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (
            ["bench", "mock", "--backend=mock", "--seconds=0.1", "--particles=1,2"],
            ["loading mock on mock ...", "bench: 2 particles (2 of 2) ..."],
        ),
        (
            ["conformance", "mock", "--model", "mock", "--effort=0.001"],
            ["loading mock on mock ...", f"3 of {len(ConformanceSuite.clauses)} clauses ..."],
        ),
        (["doctor"], ["timing the processor ..."]),
    ],
    ids=["bench", "conformance", "doctor"],
)
def test_terminal_shows_progress_and_erases_it(arguments, shown, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr", Terminal())
    main(arguments)
    written = capsys.readouterr().out
    for text in shown:
        assert f"{text}\r{' ' * len(text)}\r" in sys.stderr.getvalue()
        assert text not in written
