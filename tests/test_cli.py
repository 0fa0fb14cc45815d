from __future__ import annotations

import pytest

from genlm.core.cli import main


def test_backends_are_listed(capsys):
    assert main(["backends"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["backend", "plugin", "engine", "runs", "here"]
    assert any(line.startswith("mock") and line.endswith("yes") for line in lines)


def test_a_command_that_does_not_exist(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["backend"])
    assert stopped.value.code == 2
    assert "backends" in capsys.readouterr().err
