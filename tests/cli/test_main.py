"""The command line as a whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast.cli.main import app
from tests.cli.terminal import holdfast

COMMANDS = ("serve", "chat", "doctor", "config", "version")


def test_help_names_every_command() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert [name for name in COMMANDS if not re.search(rf"^.? ?{name} ", result.output, re.MULTILINE)] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "Usage:" in result.output


def test_an_unknown_command_or_flag_ends_with_code_2_and_no_traceback(tmp_path: Path) -> None:
    for arguments in (["serf"], ["serve", "--prot", "1"]):
        done = holdfast(*arguments, cwd=tmp_path)
        assert done.returncode == 2
        assert "No such" in done.stderr
        assert "Traceback" not in done.stderr


def test_the_command_of_another_distribution_comes_in_by_its_entry_point() -> None:
    assert CliRunner().invoke(app, ["bench", "--help"]).exit_code == 0
