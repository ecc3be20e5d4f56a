from __future__ import annotations

from pathlib import Path

from holdfast.files import CLAIM_PREFIX, claim
from holdfast.front.run.running_servers import RunningServer, running_servers, write_server


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


def test_running_servers_are_found_oldest_first_and_dead_ones_not(
    tmp_path: Path,
) -> None:
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
