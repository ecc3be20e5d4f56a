"""Starts writer processes and reads their output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}


def start_writer(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.store_writer_process", str(folder), *words],
        stdout=subprocess.PIPE, cwd=ROOT, env=ENVIRONMENT,
    )  # fmt: skip


@dataclass
class Told:
    """A writer's output before it ended."""

    put: dict[bytes, float] = field(default_factory=dict)  # key → when
    stored: set[bytes] = field(default_factory=set)
    killed_at: float = 0.0


def kill_after(writer: subprocess.Popen[bytes], blocks: int) -> Told:
    """Let a writer put this many blocks, kill it, and read its output."""
    assert writer.stdout is not None
    said = b""
    while blocks:
        line = writer.stdout.readline()
        said += line
        blocks -= line.startswith(b"put ")
    told = Told(killed_at=time.monotonic())
    os.kill(writer.pid, signal.SIGKILL)
    said += writer.stdout.read()
    writer.wait()
    for text in said.decode().splitlines():
        words = text.split()
        if len(words) == 3 and len(words[1]) == 64:
            if words[0] == "put":
                told.put[bytes.fromhex(words[1])] = float(words[2])
            else:
                told.stored.add(bytes.fromhex(words[1]))
    return told
