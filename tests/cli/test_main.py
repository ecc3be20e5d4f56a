"""The command line as a whole."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.command_line import holdfast, holdfast_here, invoked

COMMANDS = ("serve", "run", "chat", "launch", "doctor", "quality", "config", "version")


def test_help_names_every_command() -> None:
    result = invoked(["--help"])
    assert result.exit_code == 0
    assert [
        name for name in COMMANDS if not re.search(rf"^.? ?{name} ", result.output, re.MULTILINE)
    ] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_on_one_screen(command: str) -> None:
    result = invoked([command, "--help"], env={"COLUMNS": "100"})
    assert result.exit_code == 0
    assert "Usage:" in result.output
    assert len(result.output.splitlines()) <= 60


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["serf"], "Did you mean 'serve'?"),
        (["start"], "Did you mean 'serve'?"),
        (["talk"], "Did you mean 'chat'?"),
        (["list"], "Did you mean 'models ls'?"),
        (["store", "lst"], "Did you mean 'ls'?"),
        (["mlx-community/Qwen3-4B-4bit"], "holdfast serve mlx-community/Qwen3-4B-4bit"),
        (["serve", "--prot", "1"], "--port"),
        (["doctor", "--jsn"], "--json"),
    ],
)
def test_a_mistyped_command_gets_a_suggestion(arguments: list[str], meant: str) -> None:
    result = invoked(arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert meant in result.output


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["serve", "a/b", "c/d"], "name them in models.toml and start 'holdfast serve' without"),
        (["serve", "a/b", "c/d", "--port", "1"], "takes one model; 'c/d' is left over"),
        (["chat", "a/b", "hello"], "holdfast run MODEL QUESTION"),
        (["doctor", "a/b", "c/d"], "Run the command once for each"),
    ],
)
def test_several_models_get_a_hint(arguments: list[str], hint: str) -> None:
    result = invoked(arguments, env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert hint in result.output


@pytest.mark.parametrize(
    ("arguments", "title"), [(["help"], "COMMAND"), (["help", "serve"], "holdfast serve")]
)
def test_help_is_a_command_too(arguments: list[str], title: str) -> None:
    result = invoked(arguments, prog_name="holdfast")
    assert result.exit_code == 0
    assert f"{title} [" in result.output


def test_help_all_has_the_settings_that_help_leaves_out() -> None:
    short, whole = (
        invoked(["serve", option], env={"COLUMNS": "200"}).output
        for option in ("--help", "--help-all")
    )
    assert "--dtype" not in short
    assert "--dtype" in whole
    assert "--context" in short


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("holdfast do", "doctor"),
        ("holdfast launch co", "codex"),
        ("holdfast serve --cont", "--context"),
    ],
)
def test_a_shell_completes_commands_agents_and_options(
    typed: str, found: str, tmp_path: Path
) -> None:
    done = holdfast_here(cwd=tmp_path, variables=completing(typed))
    assert found in done.stdout.split()


def test_the_installed_program_completes(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("holdfast"))],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | completing("holdfast la"),
        check=False,
    )
    assert "launch" in done.stdout.split()


def completing(typed: str) -> dict[str, str]:
    """What a shell sets to ask for completions."""
    return {
        "_HOLDFAST_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split()) - 1),
    }


def test_a_port_can_be_given_in_one_letter() -> None:
    result = invoked(["config", "-p", "9000", "--json"])
    assert json.loads(result.output)["server.port"] == {"value": 9000, "origin": "flag --port"}


@pytest.mark.parametrize("value", ["4", "63", "-1"])
def test_a_context_too_small_for_an_answer_is_refused(
    value: str,
) -> None:
    result = invoked(["config", "--context", value])
    assert result.exit_code == 2
    assert "at least 64, or auto" in result.output


def test_the_smallest_and_largest_contexts_are_accepted_but_not_zero() -> None:
    for fit in ("64", "auto"):
        assert invoked(["config", "--context", fit]).exit_code == 0
    for command in ("config", "serve"):
        refused = invoked([command, "--context", "0"])
        assert refused.exit_code == 2
        assert "model.context_tokens" in refused.output
        assert "at least 64, or auto" in refused.output


def test_an_unknown_flag_exits_with_2_and_no_traceback(tmp_path: Path) -> None:
    done = holdfast("serve", "--prot", "1", cwd=tmp_path)
    assert done.returncode == 2
    assert "No such" in done.stderr
    assert "Traceback" not in done.stderr


def test_other_distributions_add_commands_by_entry_point() -> None:
    assert invoked(["bench", "--help"]).exit_code == 0
