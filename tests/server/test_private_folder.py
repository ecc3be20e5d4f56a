"""Files that a server needs only while it runs are private and removed at its end."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from holdfast.files import kernels_folder
from tests.fakes.server_process import ServerProcess, until


class Places:
    """A test server's folders for caches and temporary files."""

    def __init__(self, root: Path) -> None:
        self.caches, self.temporary = root / "c", root / "t"
        self.caches.mkdir(mode=0o700)
        self.temporary.mkdir(mode=0o700)
        self.run = self.caches / "holdfast" / "run"

    def left(self) -> list[Path]:
        """Everything that a server leaves except caches."""
        return [*self.temporary.rglob("*"), *(self.run.rglob("*") if self.run.is_dir() else ())]


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    places = Places(tmp_path)
    kernels = places.caches / "holdfast" / "kernels"  # already compiled kernels
    kernels.parent.mkdir(mode=0o700)
    kernels.symlink_to(kernels_folder(os.environ), target_is_directory=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(places.caches))  # servers inherit both
    monkeypatch.setenv("TMPDIR", str(places.temporary))
    return places


@pytest.fixture
def running(model_folder: Path) -> Iterator[list[ServerProcess]]:
    """The servers started by a test."""
    servers: list[ServerProcess] = []
    yield servers
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


def started(model_folder: Path, running: list[ServerProcess]) -> ServerProcess:
    server = ServerProcess(str(model_folder), "--name", "demo")
    running.append(server)
    server.wait_ready()
    return server


def kill(server: ServerProcess) -> None:
    """kill -9 of front and worker, in this order."""
    worker = server.model()["pid"]
    for pid in (server.process.pid, worker):
        os.kill(pid, signal.SIGKILL)
    server.process.wait()
    until(lambda: not psutil.pid_exists(worker), "the end of the worker")


def test_an_idle_server_is_small_and_private_and_cleans_up(
    model_folder: Path, places: Places, running: list[ServerProcess]
) -> None:
    server = started(model_folder, running)
    assert list(places.temporary.iterdir()) == []
    assert {
        stat.S_IMODE(path.stat().st_mode) for path in places.run.rglob("*") if path.is_dir()
    } <= {0o700, 0o755}
    (folder,) = places.run.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(places.run.stat().st_mode) == 0o700
    worker = psutil.Process(server.model()["pid"])
    resident = sum(
        psutil.Process(pid).memory_info().rss for pid in (server.process.pid, worker.pid)
    )
    assert resident < 200e6, f"{resident / 1e6:.0f} MB"
    assert Path(worker.environ()["TMPDIR"]).parent == folder
    assert stat.S_IMODE(Path(worker.environ()["TMPDIR"]).stat().st_mode) == 0o700
    assert server.stop(signal.SIGINT) == 0, server.log()
    assert not worker.is_running()
    assert "Traceback" not in server.log()
    assert places.left() == []


@pytest.mark.slow
def test_the_next_start_removes_the_files_of_a_killed_server(
    model_folder: Path, places: Places, running: list[ServerProcess]
) -> None:
    killed, living = started(model_folder, running), started(model_folder, running)
    answer = httpx.post(
        f"{killed.url}/v1/completions",
        json={"prompt": "one", "max_tokens": 1, "session_id": "s"},
        timeout=60,
    )
    assert answer.status_code == 200
    (folder,) = {path for path in places.run.iterdir() if _belongs_to(path, killed)}
    (folder / "session").write_text("on its way, in the clear")
    kill(killed)
    assert folder.exists()
    third = started(model_folder, running)
    assert not folder.exists()
    assert len(list(places.run.iterdir())) == 2
    assert httpx.get(f"{living.url}/health", timeout=60).json()["models"][0]["state"] == "ready"
    for server in (third, living):
        assert server.stop() == 0, server.log()
    assert places.left() == []


def _belongs_to(folder: Path, server: ServerProcess) -> bool:
    return str(folder) in psutil.Process(server.model()["pid"]).environ()["TMPDIR"]


@pytest.mark.slow
def test_long_paths_move_the_sockets_and_these_are_swept_too(
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    running: list[ServerProcess],
) -> None:
    deep = tmp_path / ("a" * 60) / ("b" * 60)
    deep.mkdir(parents=True)
    places = Places(deep)
    monkeypatch.setenv("XDG_CACHE_HOME", str(places.caches))
    monkeypatch.setenv("TMPDIR", str(places.temporary))
    server = started(model_folder, running)
    folder = _link_of(server).parent
    assert folder.parent == Path("/tmp")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    kill(server)  # its folder stays until the next server starts, in this or a concurrent test
    again = started(model_folder, running)
    assert not folder.exists()
    folder = _link_of(again).parent
    assert again.stop() == 0, again.log()
    assert not folder.exists()
    assert places.left() == []


def _link_of(server: ServerProcess) -> Path:
    """The socket between a server and its worker."""
    sockets = {
        str(connection.laddr)
        for connection in psutil.Process(server.process.pid).net_connections(kind="unix")
    }
    (path,) = {path for path in sockets if path.endswith("/link")}
    return Path(path)


@pytest.mark.slow
def test_compiled_kernels_are_kept_for_the_next_worker(
    model_folder: Path, places: Places, running: list[ServerProcess]
) -> None:
    first = started(model_folder, running)
    compiled = [path.name for path in places.run.rglob("*.so")]
    if not compiled:
        pytest.skip("nothing is compiled into files here: no compiler, or a GPU that keeps its own")
    assert first.stop() == 0, first.log()
    kept = {path.name: path.stat().st_mtime_ns for path in places.caches.rglob("compiled/**/*.so")}
    assert set(kept) == set(compiled)
    second = started(model_folder, running)
    assert {path.name for path in places.run.rglob("*.so")} == set(kept)
    assert second.stop() == 0, second.log()
    assert {
        path.name: path.stat().st_mtime_ns for path in places.caches.rglob("compiled/**/*.so")
    } == kept
