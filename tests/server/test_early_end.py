"""A server that ends before it is ready gives the reason in one line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.fakes.server_process import command, environment, until
from tests.fakes.tiny_models import write_tiny

LOADS_FOR_EVER = """
import os, pathlib, threading
told = pathlib.Path(__file__).with_name("told")
told.write_text(str(os.getpid()))
told.rename(told.with_name("is-loading"))
threading.Event().wait()
"""


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """A model whose loading never ends, and which reports that it has started."""
    folder = write_tiny(tmp_path / "endless", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_file": "modeling.py"}))
    (folder / "modeling.py").write_text(LOADS_FOR_EVER)
    return folder


def loading(folder: Path) -> subprocess.Popen[str]:
    arguments = command(str(folder), "--port", "0", "--set", "model.trust_remote_code=true")
    return subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_while_loading_ends_both_processes_with_one_line(
    endless: Path, number: signal.Signals
) -> None:
    server = loading(endless)
    until(lambda: (endless / "is-loading").exists(), "the model is being loaded")
    worker = int((endless / "is-loading").read_text())
    assert psutil.pid_exists(worker)
    server.send_signal(number)
    output, errors = server.communicate(timeout=60)
    assert (server.returncode, output) == (0, "")
    (line,) = errors.strip().splitlines()
    assert "stopped before the model was ready" in line
    assert not psutil.pid_exists(worker)


SIGNALLED_AS_IT_STARTS = """
import contextlib, runpy, signal, sys
from holdfast.front.server.http_server import HttpServer

capture_signals = HttpServer.capture_signals

@contextlib.contextmanager
def signalled(self):
    with capture_signals(self):
        signal.raise_signal(signal.SIGTERM)
        yield

HttpServer.capture_signals = signalled
sys.argv = ["holdfast", *sys.argv[1:]]
runpy.run_module("holdfast.cli.main", run_name="__main__", alter_sys=True)
"""


def test_a_signal_during_the_handover_to_uvicorn_is_not_lost(
    endless: Path,
) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-c", SIGNALLED_AS_IT_STARTS, "serve", str(endless), "--port", "0"),
            *("--set", "model.trust_remote_code=true"),
        ],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert "stopped before the model was ready" in done.stderr


COMMANDS = [["serve"], ["chat"], ["store", "stat"]]
FURTHER_COMMANDS = [["doctor"], ["config"], ["version"], ["sessions", "ls"], ["bench", "list"]]


@pytest.mark.parametrize(
    "arguments",
    [*COMMANDS, *(pytest.param(each, marks=pytest.mark.slow) for each in FURTHER_COMMANDS)],
    ids=" ".join,
)
def test_a_deleted_working_directory_is_reported_in_one_line(
    arguments: list[str], tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    program = [*command()[:-1], *arguments]
    shell = ["/bin/sh", "-c", f'cd "{gone}" && rmdir "{gone}" && exec "$@"', "sh", *program]
    done = subprocess.run(
        shell,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.strip().splitlines()
    assert "the working folder cannot be used" in line
