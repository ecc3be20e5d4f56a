"""`holdfast config` shows the settings in force and their origin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.config import all_specs
from tests.fakes.command_line import invoked


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def shown(*arguments: str, **variables: str) -> dict[str, dict[str, object]]:
    result = invoked(["config", "--json", *arguments], env=dict(variables))
    assert result.exit_code == 0, result.output
    content: dict[str, dict[str, object]] = json.loads(result.output)
    return content


def test_it_shows_all_settings_with_their_defaults() -> None:
    rows = shown()
    assert list(rows) == list(all_specs())
    assert rows["server.port"] == {"value": 8321, "origin": "default"}


def test_it_shows_where_each_value_came_from(tmp_path: Path) -> None:
    (tmp_path / "holdfast.toml").write_text("[log]\nlevel = 'error'\n[server]\nport = 1\n")
    rows = shown(
        "some/model",
        "--port",
        "3",
        "--set",
        "scheduler.max_running=7",
        HOLDFAST_SERVER_PORT="2",
        HOLDFAST_MODEL_NAME="n",
    )
    assert rows["log.level"] == {"value": "error", "origin": f"file {tmp_path / 'holdfast.toml'}"}
    assert rows["server.port"] == {"value": 3, "origin": "flag --port"}
    assert rows["model.name"] == {"value": "n", "origin": "variable HOLDFAST_MODEL_NAME"}
    assert rows["model.path"] == {"value": "some/model", "origin": "argument MODEL"}
    assert rows["scheduler.max_running"] == {
        "value": 7,
        "origin": "flag --set scheduler.max_running",
    }


def test_a_named_file_replaces_the_default_one(tmp_path: Path) -> None:
    (tmp_path / "holdfast.toml").write_text("[server]\nport = 1\n")
    (tmp_path / "other.toml").write_text("[server]\nport = 2\n")
    assert shown("--config", "other.toml")["server.port"] == {
        "value": 2,
        "origin": "file other.toml",
    }
    assert shown(HOLDFAST_CONFIG="other.toml")["server.port"]["value"] == 2


def test_the_table_has_every_setting_and_hides_the_key() -> None:
    result = invoked(["config", "--api-key", "hush", "--memory", "8 GiB"], env={"COLUMNS": "120"})
    assert result.exit_code == 0
    assert [key for key in all_specs() if key not in result.output] == []
    assert "8 GiB" in result.output
    assert "(set)" in result.output
    assert "hush" not in result.output
    assert "hush" not in json.dumps(shown("--api-key", "hush"))


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--port", "70000"], ["server.port", '"70000"', "from 0 to 65535", "flag --port"]),
        (["--layout", "columns"], ["model.layout", "auto | rows | split | solo"]),
        (
            ["--set", "scheduler.max_runing=1"],
            ["scheduler.max_runing", "did you mean scheduler.max_running?"],
        ),
        (["--set", "oops"], ["--set oops", "KEY=VALUE"]),
        (["--config", "none.toml"], ["none.toml", "does not exist"]),
    ],
)
def test_a_bad_setting_is_one_line_and_code_2(arguments: list[str], parts: list[str]) -> None:
    result = invoked(["config", *arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("holdfast: ")
    assert result.stderr.count("\n") == 1
    assert [part for part in parts if part not in result.stderr] == []


def test_a_bad_variable_is_one_line_and_code_2() -> None:
    result = invoked(["config"], env={"HOLDFAST_LOG_LEVEL": "loud"})
    assert result.exit_code == 2
    assert 'log.level = "loud" is not allowed (variable HOLDFAST_LOG_LEVEL)' in result.stderr
