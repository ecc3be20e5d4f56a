from __future__ import annotations

import ipaddress
import json
import os
import re
import shlex
import stat
import tempfile
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from holdfast.config import LogSettings
from holdfast.errors import ConfigError
from holdfast.files import CLAIM_PREFIX, claim
from holdfast.front.run.running_servers import (
    OPEN,
    ReadyServer,
    RunningServer,
    announce,
    lan_addresses,
    run_folder,
    running_servers,
    write_server,
)
from holdfast.wire.events import CacheFigures, StoreFigures
from tests.fakes.fake_worker import INFO


def a_server(pid: int, *, started_at: float) -> RunningServer:
    return RunningServer(
        pid=pid,
        url=f"http://127.0.0.1:{pid}",
        port=pid,
        started_at=started_at,
        version="0",
        store_folder="",
        log_file="",
        certificate="",
    )


def test_running_servers_are_found_oldest_first_and_dead_ones_not(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    place = tmp_path / "holdfast" / "run"
    place.mkdir(parents=True)
    claims = [claim(place, prefix=CLAIM_PREFIX) for _ in range(4)]
    young, old, ended = (
        a_server(1, started_at=30.0),
        a_server(2, started_at=10.0),
        a_server(3, started_at=20.0),
    )
    # the fourth describes something else, such as `doctor`
    for held, server in zip(claims, (young, old, ended), strict=False):
        write_server(server, held.folder)
    claims[2].give_back()
    (claims[3].folder / "server.json").write_text("{half")
    assert running_servers(environ) == [old, young]
    for held in (claims[0], claims[1], claims[3]):
        held.give_back()
    assert running_servers(environ) == []


def test_without_a_home_directory_servers_are_not_found(tmp_path: Path) -> None:
    assert running_servers({"XDG_CACHE_HOME": str(tmp_path / "none")}) == []


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
    model="demo",
    info=INFO,
    ready_seconds=1.234,
    needs_key=False,
    store_folder="",
    memory=CacheFigures(),
)


def test_the_block_shows_the_address_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    announce(READY, LogSettings())
    shown = capsys.readouterr().out
    assert "is ready at http://127.0.0.1:8321" in shown
    assert "ready in  1.23 s" in shown
    words = shlex.split(shown[shown.index("curl") :].replace("\\\n", " "))
    assert words[1] == "http://127.0.0.1:8321/v1/chat/completions"
    assert json.loads(words[-1])["model"] == "demo"


def test_the_example_for_a_base_model_completes_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    announce(replace(READY, can_chat=False), LogSettings())
    shown = capsys.readouterr().out
    words = shlex.split(shown[shown.index("curl") :].replace("\\\n", " "))
    assert words[1] == "http://127.0.0.1:8321/v1/completions"
    assert json.loads(words[-1]) == {"model": "demo", "prompt": "Once upon a time"}


def test_the_example_uses_a_key_variable_not_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    announce(replace(READY, needs_key=True), LogSettings())
    assert "$HOLDFAST_SERVER_API_KEY" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("memory", "said"),
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
    memory: CacheFigures | None,
    said: str,
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    announce(replace(READY, store_folder="/kept", memory=memory), LogSettings())
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
        replace(READY, info=msgspec.structs.replace(INFO, warnings=(WARNING,)), log_file="/a/log"),
        LogSettings(),
    )
    assert f"warning: {WARNING}" in capsys.readouterr().out.splitlines()
    assert WARNING in caplog.text


def test_the_block_names_the_draft_model(capsys: pytest.CaptureFixture[str]) -> None:
    announce(READY, LogSettings())
    assert "draft model" not in capsys.readouterr().out
    info = msgspec.structs.replace(INFO, draft_model="small")
    announce(replace(READY, info=info), LogSettings())
    assert "draft model  small" in capsys.readouterr().out


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The shared folder for temporary files."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def test_temporary_files_are_in_a_private_folder_and_removed(tmp_path: Path, outside: Path) -> None:
    with run_folder({"XDG_CACHE_HOME": str(tmp_path / "caches")}) as folder:
        assert folder.parent == tmp_path / "caches" / "holdfast" / "run"
        assert (
            stat.S_IMODE(folder.stat().st_mode)
            == stat.S_IMODE(folder.parent.stat().st_mode)
            == 0o700
        )
        assert os.environ["TMPDIR"] == str(folder)
        Path(tempfile.mkdtemp(), "session").write_text("in the clear")
    assert not folder.exists()
    assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(outside)
    assert list(outside.iterdir()) == []


def test_without_a_cache_folder_the_temporary_folder_is_used(
    tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TMPDIR")
    (tmp_path / "caches").write_text("a file")
    with run_folder({"XDG_CACHE_HOME": str(tmp_path / "caches")}) as folder:
        assert folder.parent == outside
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(outside.iterdir()) == []
    assert "TMPDIR" not in os.environ


def test_leftovers_are_removed_in_all_locations(tmp_path: Path, outside: Path) -> None:
    places = (outside, tmp_path / "holdfast" / "run")
    places[1].mkdir(parents=True)
    dead, living = ([claim(place, prefix=CLAIM_PREFIX) for place in places] for _ in range(2))
    for left in dead:
        os.close(left.file)  # as a kill does
    with run_folder({"XDG_CACHE_HOME": str(tmp_path)}):
        assert [left.folder.exists() for left in dead] == [False, False]
        assert [held.folder.exists() for held in living] == [True, True]
    for held in living:
        held.give_back()


def test_a_missing_location_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    (tmp_path / "caches").write_text("a file")
    with (
        pytest.raises(ConfigError, match="no folder for temporary files"),
        run_folder({"XDG_CACHE_HOME": str(tmp_path / "caches")}),
    ):
        pass
