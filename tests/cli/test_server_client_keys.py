"""Every command that talks to a server says in one line how to pass the key."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import Result

from holdfast.agents import AGENTS
from holdfast.cli.main import app
from holdfast.config import ServerSettings
from holdfast.front.run.running_servers import RunningServer
from tests.fakes.command_line import invoked
from tests.fakes.http_clients import served_on_a_thread
from tests.fakes.recording_agent import install
from tests.fakes.scripted_gateway import MODEL

KEY = "the-servers-key"
NAMED = ("--api-key", "HOLDFAST_SERVER_API_KEY")
COMMANDS: Sequence[Sequence[str]] = (
    ("chat", "-p", "hello"),
    ("run", MODEL, "hello"),
    ("launch", "pi"),
    ("performance",),
    ("load", MODEL),
    ("unload", MODEL),
    ("logs", "--level", "info"),
    ("sessions", "ls"),
    *(("sessions", name, "s") for name in ("show", "open", "pin", "unpin", "close")),
    ("sessions", "fork", "s", "t"),
    ("sessions", "export", "s", "exported"),
    ("sessions", "import", "file"),
    ("models", "ls"),
    ("models", "rm", "coast/kelp", "--yes"),
)
WORKS_WITHOUT_SERVER = {("models", "ls")}  # it shows information that needs no server
# commands with --api-key that start a server instead of using one
STARTS_A_SERVER = {"serve", "quality", "doctor", "config", "service install"}
WITHOUT_URL = {"logs", "ps"}  # they select one of the user's own servers in another way


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    settings = ServerSettings(port=0, shutdown_seconds=0, api_key=KEY)
    with served_on_a_thread(settings=settings) as url:
        yield url


@pytest.fixture
def home(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home whose user runs the server; a model of the Hub is in the cache."""
    described = RunningServer(
        pid=os.getpid(),
        url=url,
        port=int(url.rpartition(":")[2]),
        started_at=time.time(),
        version="0",
        store_folder="",
        log_file="",
        certificate="",
    )
    monkeypatch.setattr(
        "holdfast.front.run.running_servers.running_servers", lambda environ: [described]
    )
    commit = "a" * 40
    model = tmp_path / "hub" / "models--coast--kelp"
    (model / "snapshots" / commit).mkdir(parents=True)
    (model / "snapshots" / commit / "config.json").write_text("{}")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    install(tmp_path / "bin", AGENTS["pi"].program)
    (tmp_path / "file").write_text("x")
    for name, value in {
        "HOME": str(tmp_path),
        "PATH": str(tmp_path / "bin"),
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "COLUMNS": "300",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HOLDFAST_SERVER_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def called(*arguments: str) -> Result:
    return invoked(list(arguments))


def with_key(command: Sequence[str], key: str) -> list[str]:
    """The command with a key; launch takes its own options before the agent's name."""
    place = 2 if command[0] in ("sessions", "models") else 1
    return [*command[:place], "--api-key", key, *command[place:]]


def commands_of(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, set[str]]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands_of(command, (*path, name))
        else:
            options = {each for parameter in command.params for each in parameter.opts}
            yield " ".join((*path, name)), options


@pytest.mark.parametrize("key", ["", "wrong"])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_refused_key_is_one_line_with_the_remedy(
    command: Sequence[str], key: str, home: Path, url: str
) -> None:
    result = called(*(with_key(command, key) if key else command))
    assert (result.exit_code == 0) == (tuple(command) in WORKS_WITHOUT_SERVER), result.output
    (line,) = [line for line in result.stderr.splitlines() if url in line]
    assert all(name in line for name in NAMED), line
    assert ("does not accept this API key" in line) == bool(key)
    if tuple(command) not in WORKS_WITHOUT_SERVER:
        assert result.output.splitlines() == [line]


def test_the_table_has_every_command_that_uses_a_server() -> None:
    found = dict(commands_of(typer.main.get_command(app)))
    tested = {
        " ".join(command[: 2 if command[0] in ("sessions", "models") else 1])
        for command in COMMANDS
    } | {"ps"}
    talking = {name for name, options in found.items() if "--url" in options} | WITHOUT_URL
    assert tested == talking
    with_a_key = {name for name, options in found.items() if "--api-key" in options}
    assert with_a_key == talking | STARTS_A_SERVER


@pytest.mark.parametrize("command", [("chat", "-p", "hello"), ("run", MODEL, "hello")])
def test_a_refused_key_starts_no_second_server(
    command: Sequence[str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("a second server was started")

    monkeypatch.setattr("holdfast.cli.chat.own_server", started)
    refused = called(*command)
    assert refused.exit_code == 2
    assert "--own-server" in refused.stderr
    accepted = [called(*with_key(command, KEY))]
    monkeypatch.setenv("HOLDFAST_SERVER_API_KEY", KEY)
    accepted.append(called(*command))
    for result in accepted:  # the scripted model does not answer it
        assert not isinstance(result.exception, AssertionError)
        assert "API key" not in result.output
