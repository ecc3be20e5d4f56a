from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from holdfast.front.run.web import Awake
from tests.fakes.server_process import children_running

CAFFEINATE = f"""#!{sys.executable}
import pathlib, sys, threading
pathlib.Path(__file__).with_name("asked").write_text(" ".join(sys.argv[1:]))
threading.Event().wait()
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In place of macOS's own program: records its arguments and keeps running; a failing test's
    leftovers are ended.
    """
    path = tmp_path / "caffeinate"
    path.write_text(CAFFEINATE)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    yield path
    for child in children(path):
        child.kill()
        child.wait()


def children(program: Path) -> list[psutil.Process]:
    return children_running(str(program))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def test_one_program_runs_from_the_first_request_to_the_last(program: Path) -> None:
    awake = Awake(platform="darwin", linger_seconds=0.001)
    awake.running(1)
    await until(
        lambda: (program.parent / "asked").exists() and bool((program.parent / "asked").read_text())
    )
    assert (program.parent / "asked").read_text() == f"-i -w {os.getpid()}"
    (first,) = children(program)
    awake.running(2)
    awake.running(1)
    assert children(program) == [first]
    awake.running(0)
    await until(lambda: not first.is_running())
    awake.running(1)
    assert children(program) != [first]
    awake.close()
    assert children(program) == []


async def test_the_program_lingers_for_the_next_request(program: Path) -> None:
    awake = Awake(platform="darwin", linger_seconds=60.0)
    awake.running(1)
    await until((program.parent / "asked").exists)
    (first,) = children(program)
    awake.running(0)
    awake.running(1)
    assert children(program) == [first]
    awake.close()


async def test_other_systems_start_no_program(program: Path) -> None:
    awake = Awake(platform="linux")
    awake.running(1)
    assert children(program) == []
    assert not (program.parent / "asked").exists()


async def test_a_program_that_cannot_start_fails_no_request(
    program: Path, caplog: pytest.LogCaptureFixture
) -> None:
    awake = Awake(platform="darwin")
    program.write_text("#!/no/such/interpreter\n")
    awake.running(1)
    awake.running(0)
    awake.running(1)
    assert len(caplog.records) == 1
