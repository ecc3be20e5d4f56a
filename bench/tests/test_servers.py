"""Tests of starting and ending servers."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from holdfast.errors import HoldfastError
from holdfast_bench.contenders import Contender, by_command
from holdfast_bench.load import user
from holdfast_bench.models import BenchModel
from holdfast_bench.null_server import NULL, NullServer
from holdfast_bench.servers import ServerFailed, ServerStarter
from tests.fakes.null_servers import serving


def starter(folder: Path) -> ServerStarter:
    return ServerStarter(folder=folder, model=BenchModel(name="none", folder=folder))


async def test_a_server_starts_is_measured_and_ends(tmp_path: Path) -> None:
    server = await starter(tmp_path).start(NULL)
    assert server.process is not None
    use = server.use()
    assert use.processes == 1
    assert use.resident_bytes > 1 << 20
    assert 0 < server.listening_seconds <= server.ready_seconds
    (server.store / "block").write_bytes(b"x" * 100)
    assert server.store_bytes() == 100
    server.stop()
    assert not psutil.pid_exists(server.process.pid)


async def test_a_failed_server_start_is_reported_with_its_log(
    tmp_path: Path,
) -> None:
    code = "raise SystemExit('no such model')"
    words = Contender(label="broken", command=(sys.executable, "-c", code, "{port}"))
    with pytest.raises(ServerFailed, match=r"ended with code 1.*no such model"):
        await starter(tmp_path).start(words)


async def test_servers_inherit_no_settings_except_the_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_SERVER_PORT", "1")
    monkeypatch.setenv("HOLDFAST_KERNELS", "0")
    code = "import os; raise SystemExit(sorted(x for x in os.environ if x.startswith('HOLDFAST')))"
    contender = Contender(label="broken", command=(sys.executable, "-c", code, "{port}"))
    with pytest.raises(ServerFailed, match=r"\['HOLDFAST_KERNELS', 'HOLDFAST_STORE_FOLDER'\]"):
        await starter(tmp_path).start(contender)


async def test_a_server_at_a_url_keeps_running(tmp_path: Path) -> None:
    async with serving(NullServer()) as url:
        server = await starter(tmp_path).start(Contender(label="there", url=url))
        assert server.client.target.model == "null"
        assert server.use().processes == 0
        server.stop()  # not started here: it keeps running
        assert (await server.client.ask(user("are you there", max_tokens=1))).is_good


def test_a_command_needs_a_port_and_its_placeholders_are_filled(tmp_path: Path) -> None:
    contender = by_command("serve {model} --port={port} 'a b'")
    assert contender.filled_command(model=tmp_path, port=7, store=tmp_path) == [
        "serve",
        str(tmp_path),
        "--port=7",
        "a b",
    ]
    with pytest.raises(HoldfastError, match=r"must contain \{port\}"):
        by_command("serve {model}")
