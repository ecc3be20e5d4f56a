"""How a command ends when something is wrong."""

from __future__ import annotations

import json

import pytest
import typer

from holdfast.cli.output import plain_errors
from holdfast.errors import ModelLoadError


def test_our_own_errors_become_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as caught, plain_errors():
        raise ModelLoadError("first\n   second")
    assert caught.value.exit_code == 2
    assert capsys.readouterr().err == "holdfast: first second\n"


def test_bugs_keep_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError), plain_errors():
        raise ZeroDivisionError


def test_with_json_logs_an_error_is_a_log_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(typer.Exit), plain_errors("json"):
        raise ModelLoadError("first\n   second")
    line = json.loads(capsys.readouterr().err)
    assert (line["level"], line["logger"], line["message"]) == ("error", "holdfast", "first second")
