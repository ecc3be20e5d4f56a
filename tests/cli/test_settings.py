"""Options that are made from the settings."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from holdfast.cli.settings import settings_command
from holdfast.config import EffectiveSettings, all_specs, value_of
from holdfast.errors import ModelLoadError

SEEN: list[tuple[EffectiveSettings, int]] = []
app = typer.Typer()


@app.command()
@settings_command
def remember(effective: EffectiveSettings, count: int = 1) -> None:
    SEEN.append((effective, count))


def run(*arguments: str) -> tuple[EffectiveSettings, int]:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return SEEN.pop()


@pytest.mark.parametrize("key", [key for key, spec in all_specs().items() if spec.flag])
def test_every_setting_with_a_flag_is_an_option(key: str) -> None:
    spec = all_specs()[key]
    choice = spec.choices[-1] if spec.choices else ""
    texts = {
        "choice": choice,
        "text": "words",
        "number": "77",
        "size": "7 KiB",
        "list": "a, b",
        "switch": "",
    }
    text = texts[spec.kind]
    expected = {
        "number": 77,
        "size": 7 << 10,
        "list": ("a", "b"),
        "switch": not spec.default,
    }.get(spec.kind, text)
    given = [spec.flag] * spec.flag.startswith("--") + [text] * bool(text)
    # both or none
    given += {"server.tls_cert": ["--tls-key", "k"], "server.tls_key": ["--tls-cert", "c"]}.get(
        key, []
    )
    effective, _ = run(*given)
    assert value_of(effective.settings, key) == expected
    assert effective.origins[key] in (f"flag {spec.flag}", f"argument {spec.flag}")


def test_a_command_has_its_own_options_and_the_settings() -> None:
    effective, count = run("--count", "3", "--set", "limits.max_choices = 2")
    assert count == 3
    assert effective.settings.limits.max_choices == 2


def test_defaults_are_shown_in_the_help() -> None:
    output = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    assert "127.0.0.1" in output
    assert "8321" in output


@pytest.mark.parametrize("bad", [["--port", "none"], ["--set", "server.port=none"]])
def test_with_json_logs_a_bad_setting_is_a_json_line(bad: list[str]) -> None:
    result = CliRunner().invoke(app, ["--log-format", "json", *bad])
    assert result.exit_code == 2
    assert "server.port" in json.loads(result.stderr)["message"]


def test_a_failing_command_reports_in_the_configured_log_format() -> None:
    failing = typer.Typer()

    @failing.command()
    @settings_command
    def fail(effective: EffectiveSettings) -> None:
        raise ModelLoadError("there is no such model")

    result = CliRunner().invoke(failing, ["--set", "log.format=json"])
    assert (result.exit_code, json.loads(result.stderr)["message"]) == (2, "there is no such model")
    assert CliRunner().invoke(failing, []).stderr == "holdfast: there is no such model\n"
