from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.files import CLAIM_PREFIX, claim
from holdfast.front.run.running_servers import (
    RunningServer,
    run_folder,
    running_servers,
    write_server,
)


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
