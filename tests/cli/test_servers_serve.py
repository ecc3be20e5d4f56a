"""`holdfast serve` as a process: causes and forms of its end."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from holdfast.cli.server_client import ServerClient
from tests.fakes.adapters import write_tiny_adapter
from tests.fakes.command_line import holdfast, only_line
from tests.fakes.tiny_models import write_tiny


@pytest.fixture
def server(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    write_tiny(tmp_path / "model", "qwen3")
    (tmp_path / "file").touch()
    command = [sys.executable, "-m", "holdfast.cli.main", "serve", "model", "--port", "0"]
    command += ["--until-stdin-closes", "--store", str(tmp_path / "file" / "store")]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    yield process
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def url_of(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    for line in server.stdout:
        if found := re.search(r"ready at (http://\S+)", line):
            return found[1]
    raise AssertionError("the server ended without becoming ready")


def test_serve_prints_its_address_and_ends_with_its_parent(
    server: subprocess.Popen[str],
) -> None:
    assert ServerClient(url=url_of(server)).model_ids() == ("model",)
    workers = psutil.Process(server.pid).children(recursive=True)
    assert workers
    assert server.stdin is not None
    server.stdin.close()  # as the system does when the process at the other end dies
    assert server.wait(60) == 0
    assert server.stdout is not None
    assert "CANNOT BE WRITTEN" in " ".join(server.stdout.read().split())
    assert [
        worker
        for worker in workers
        if worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE
    ] == []


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["none"], "there is no model folder none"),
        (["someone/nothing"], "neither a folder here nor completely in the cache"),
    ],
)
def test_an_unservable_model_is_one_line_and_code_2(
    tmp_path: Path, arguments: list[str], part: str
) -> None:
    done = holdfast(
        "serve", *arguments, "--port", "0", cwd=tmp_path, variables={"HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 2
    assert part in only_line(done.stderr)


@pytest.mark.parametrize(
    "content",
    [pytest.param("{", marks=pytest.mark.slow), '{"model_type": "no_such_architecture"}'],
)
def test_a_damaged_model_is_one_line_and_code_2(tmp_path: Path, content: str) -> None:
    write_tiny(tmp_path / "model", "qwen3")
    (tmp_path / "model" / "config.json").write_text(content)
    done = holdfast("serve", "model", cwd=tmp_path)
    assert done.returncode == 2
    assert "model" in only_line(done.stderr)


def test_an_incompatible_adapter_is_one_line_and_code_2(tmp_path: Path) -> None:
    write_tiny(tmp_path / "model", "qwen3")
    write_tiny_adapter(tmp_path / "sql", "mamba2", seed=1)
    done = holdfast("serve", "model", "--port", "0", "--adapter", "sql=sql", cwd=tmp_path)
    assert done.returncode == 2
    line = only_line(done.stderr)
    assert "adapter sql in " in line
    assert "does not fit this model: the model has no layer backbone.layers.0." in line
    done = holdfast("serve", "model", "--adapter", "sql=none", cwd=tmp_path)
    assert done.returncode == 2
    assert "adapter sql: there is no folder" in only_line(done.stderr)
