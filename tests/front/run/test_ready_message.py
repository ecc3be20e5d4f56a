from __future__ import annotations

import ipaddress
import json
import re
import shlex
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from holdfast.config import LogSettings
from holdfast.front.run.ready_message import OPEN, ReadyServer, announce, lan_addresses
from holdfast.wire.events import CacheFigures, StoreFigures
from tests.fakes.fake_worker import INFO
from tests.fakes.scripted_gateway import model_status


@pytest.mark.parametrize("listens_on", ["0.0.0.0", "::"])
def test_lan_addresses_are_reachable_and_valid_in_a_url(listens_on: str) -> None:
    found = lan_addresses(listens_on=listens_on)
    assert len(found) == len(set(found))
    for text in found:
        address = ipaddress.ip_address(text.strip("[]"))
        assert not (address.is_loopback or address.is_link_local or address.is_unspecified)
        assert (address.version == 6) == text.startswith("[")
        assert listens_on == "::" or address.version == 4


READY = ReadyServer(
    url="http://127.0.0.1:8321",
    models=[model_status(id="demo", info=INFO)],
    ready_seconds=1.234,
    needs_key=False,
    store_folder="",
    cache=CacheFigures(),
)


def with_model(**facts: Any) -> ReadyServer:
    return replace(READY, models=[replace(READY.model, **facts)])


def test_the_block_shows_the_address_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    announce(READY, LogSettings())
    shown = capsys.readouterr().out
    assert "is ready at http://127.0.0.1:8321" in shown
    assert "ready in  1.23 s" in shown
    words = shlex.split(shown[shown.index("curl") :].replace("\\\n", " "))
    assert words[1] == "http://127.0.0.1:8321/v1/chat/completions"
    assert json.loads(words[-1])["model"] == "demo"


def test_the_example_for_a_base_model_completes_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    announce(with_model(can_chat=False), LogSettings())
    shown = capsys.readouterr().out
    words = shlex.split(shown[shown.index("curl") :].replace("\\\n", " "))
    assert words[1] == "http://127.0.0.1:8321/v1/completions"
    assert json.loads(words[-1]) == {"model": "demo", "prompt": "Once upon a time"}


def test_the_example_uses_a_key_variable_not_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    announce(replace(READY, needs_key=True), LogSettings())
    assert "$HOLDFAST_SERVER_API_KEY" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cache", "said"),
    [
        (
            CacheFigures(store=StoreFigures(model="m", mode="writing", blocks=1)),
            "store  /kept (1 block of this model)",
        ),
        (
            CacheFigures(store=StoreFigures(model="m", mode="writing", blocks=2000)),
            "store  /kept (2,000 blocks of this model)",
        ),
        (
            CacheFigures(store=StoreFigures(model="m", mode="memory-only")),
            "store  /kept CANNOT BE WRITTEN: the cache is in RAM",
        ),
        (CacheFigures(), "store  off: the cache is in RAM"),
        (None, "store  no cache: the layout rows"),
    ],
)
def test_the_block_shows_the_cache_location_and_health(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    cache: CacheFigures | None,
    said: str,
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    announce(replace(READY, store_folder="/kept", cache=cache), LogSettings())
    assert said in capsys.readouterr().out


def test_with_json_logs_the_block_is_not_printed(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="holdfast.front.run"):
        announce(READY, LogSettings(format="json"))
    assert capsys.readouterr().out == ""
    assert "http://127.0.0.1:8321" in caplog.text


OPEN_READY = replace(
    READY,
    url="http://127.0.0.1:8321",
    lan_urls=("http://192.168.1.5:8321", "http://[fd00::2]:8321"),
    is_open=True,
)


def test_a_public_server_shows_its_addresses_and_a_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    announce(OPEN_READY, LogSettings())  # the brackets of an address are not markup
    shown = capsys.readouterr().out
    assert re.findall(r"for others +(\S+)", shown) == list(OPEN_READY.lan_urls)
    (line,) = [line for line in shown.splitlines() if "warning" in line]
    assert line == f"warning: {OPEN}"
    assert "curl http://127.0.0.1:8321/" in shown


def test_with_json_logs_the_risk_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="holdfast.front.run"):
        announce(OPEN_READY, LogSettings(format="json"))
        assert OPEN in caplog.text
        assert "http://192.168.1.5:8321" in caplog.text
        caplog.clear()
        announce(READY, LogSettings(format="json"))
    assert OPEN not in caplog.text


WARNING = (
    "this model runs in the layout solo. Why: rows fails [relative error 2.0e+00]. What to do: "
    "report it"
)


def test_the_block_shows_warnings_about_the_model(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    announce(
        replace(
            with_model(info=msgspec.structs.replace(INFO, warnings=(WARNING,))), log_file="/a/log"
        ),
        LogSettings(),
    )
    assert f"warning: {WARNING}" in capsys.readouterr().out.splitlines()
    assert WARNING in caplog.text


def test_the_block_names_the_draft_model(capsys: pytest.CaptureFixture[str]) -> None:
    announce(READY, LogSettings())
    assert "draft model" not in capsys.readouterr().out
    info = msgspec.structs.replace(INFO, draft_model="small")
    announce(with_model(info=info), LogSettings())
    assert "draft model  small" in capsys.readouterr().out


def test_the_block_names_the_adapters_as_requests_do(capsys: pytest.CaptureFixture[str]) -> None:
    announce(with_model(adapters=("sql", "tone")), LogSettings())
    assert "adapters  demo:sql, demo:tone" in capsys.readouterr().out
