"""The server that a command uses if none is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from holdfast.cli.server_client import (
    SERVER_OPTIONS,
    NoSuchServer,
    ServerClient,
    client_of,
    server_command,
)
from holdfast.front.run.running_servers import RunningServer


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[RunningServer]:
    found: list[RunningServer] = []
    monkeypatch.setattr("holdfast.front.run.running_servers.running_servers", lambda environ: found)
    monkeypatch.chdir(tmp_path)
    return found


def server(port: int) -> RunningServer:
    url = f"http://127.0.0.1:{port}"
    return RunningServer(
        pid=1,
        url=url,
        port=port,
        started_at=0,
        version="",
        store_folder="",
        log_file="",
        certificate="c.pem",
    )


def test_the_only_running_server_is_chosen_on_any_port(
    running: list[RunningServer],
) -> None:
    assert client_of(None, None).url == "http://127.0.0.1:8321"
    running.append(server(9000))
    found = client_of(None, "k")
    assert (found.url, found.api_key, found.certificate, found.pid) == (
        "http://127.0.0.1:9000",
        "k",
        "c.pem",
        1,
    )
    assert client_of("box:1", None).url == "http://box:1"


def test_a_port_in_the_settings_is_used(
    running: list[RunningServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    running.append(server(9000))
    monkeypatch.setenv("HOLDFAST_SERVER_PORT", "9001")
    assert client_of(None, None).url == "http://127.0.0.1:9001"


def test_of_several_servers_the_default_port_is_chosen(
    running: list[RunningServer],
) -> None:
    running += [server(9000), server(9001)]
    with pytest.raises(
        NoSuchServer,
        match=r"http://127\.0\.0\.1:9000, http://127\.0\.0\.1:9001; choose one with --url",
    ):
        client_of(None, None)
    running.append(server(8321))
    assert client_of(None, None).url == "http://127.0.0.1:8321"


@pytest.mark.parametrize(
    ("error", "raised"), [(BrokenPipeError(), BrokenPipeError), (OSError("no disk"), typer.Exit)]
)
def test_a_closed_output_pipe_ends_a_command_silently(
    error: OSError,
    raised: type[Exception],
    running: list[RunningServer],
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(client: ServerClient) -> None:
        raise error

    with pytest.raises(raised):
        server_command(fail, options=SERVER_OPTIONS)(url="box:1", api_key=None)
    assert capsys.readouterr().err == ("" if raised is BrokenPipeError else "holdfast: no disk\n")
