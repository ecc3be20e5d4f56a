from __future__ import annotations

import json
import shlex

import pytest

from holdfast.app.ready import ReadyServer, announce
from holdfast.config import LogSettings
from tests.fakes.worker_main import INFO

READY = ReadyServer(url="http://127.0.0.1:8321", model="demo", info=INFO, ready_seconds=1.234, needs_key=False, store_folder="")


def test_people_read_where_the_server_is_and_how_to_ask_it(capsys: pytest.CaptureFixture[str]) -> None:
    announce(READY, LogSettings())
    shown = capsys.readouterr().out
    assert "is ready at http://127.0.0.1:8321" in shown
    assert "ready in  1.23 s" in shown
    words = shlex.split(shown[shown.index("curl") :].replace("\\\n", " "))
    assert words[1] == "http://127.0.0.1:8321/v1/chat/completions"
    assert json.loads(words[-1])["model"] == "demo"


def test_a_key_is_part_of_the_example_but_never_shown(capsys: pytest.CaptureFixture[str]) -> None:
    announce(
        ReadyServer(url="http://h:1", model="demo", info=INFO, ready_seconds=1, needs_key=True, store_folder="/s"), LogSettings()
    )
    assert "$HOLDFAST_SERVER_API_KEY" in capsys.readouterr().out


def test_where_logs_are_json_nothing_else_is_printed(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="holdfast.app"):
        announce(READY, LogSettings(format="json"))
    assert capsys.readouterr().out == ""
    assert "http://127.0.0.1:8321" in caplog.text
