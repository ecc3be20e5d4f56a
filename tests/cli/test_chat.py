"""`holdfast chat` as a process: through a pipe, and on a terminal with its Ctrl-C."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.cli.terminal import holdfast, only_line
from tests.fakes.openai_server import running_server
from tests.fakes.tiny_models import write_tiny


def test_a_pipe_is_answered_line_by_line(tmp_path: Path) -> None:
    with running_server() as server:
        done = holdfast("chat", "--url", server.url, "--system", "Be brief.", "--api-key", "k", cwd=tmp_path, stdin="one\ntwo\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "you said: one\nyou said: two\n", "")
    assert server.requests[1]["model"] == "echo"
    assert server.requests[1]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert server.keys == ["Bearer k"]


def test_the_model_of_a_running_server_can_be_chosen(tmp_path: Path) -> None:
    with running_server() as server:
        holdfast("chat", "other", "--url", server.url, cwd=tmp_path, stdin="one\n")
        done = holdfast("chat", "third", "--url", server.url, cwd=tmp_path, stdin="one\n")
    assert [request["model"] for request in server.requests] == ["other"]
    assert done.returncode == 2
    assert only_line(done.stderr) == f"holdfast: {server.url} does not serve third; it serves: echo, other"


def test_a_failed_answer_gives_a_pipe_the_code_1(tmp_path: Path) -> None:
    with running_server() as server:
        server.behaviour = "refuse"
        done = holdfast("chat", "--url", server.url, cwd=tmp_path, stdin="one\n")
    assert (done.returncode, done.stderr) == (1, "holdfast: the prompt is too long\n")


def test_without_a_url_it_brings_its_own_server(tmp_path: Path) -> None:
    write_tiny(tmp_path / "model", "qwen3")
    done = holdfast("chat", "model", "--max-tokens", "3", "--temperature", "0", cwd=tmp_path, stdin="one\n/stats\n")
    assert done.returncode == 0, done.stderr
    assert "3 answer tokens" in done.stdout


def test_a_missing_model_is_one_line_and_code_2(tmp_path: Path) -> None:
    done = holdfast("chat", "none", cwd=tmp_path, stdin="one\n")
    assert done.returncode == 2
    assert "there is no model folder none" in only_line(done.stderr)


class Terminal:
    """A chat on a pseudo-terminal."""

    def __init__(self, *arguments: str, cwd: Path) -> None:
        self._screen, inner = pty.openpty()
        command = [sys.executable, "-m", "holdfast.cli.main", "chat", *arguments]
        # A shell's background jobs ignore SIGINT, and so would their children; a terminal's processes do not.
        self.process = subprocess.Popen(
            command,
            stdin=inner,
            stdout=inner,
            stderr=inner,
            cwd=cwd,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        os.close(inner)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def read_until(self, pattern: str, seconds: float = 30) -> None:
        """Read the screen until the pattern stands in what came since the last time."""
        deadline, new = time.monotonic() + seconds, ""
        while not re.search(pattern, new):
            assert self._has_more(deadline - time.monotonic()), f"{pattern!r} did not come; seen: {self.seen!r}, then {new!r}"
            new += os.read(self._screen, 4096).decode(errors="replace")
        self.seen += new

    def interrupt(self) -> None:
        """Press Ctrl-C until something happens: one that comes just before the process waits is only seen when it wakes up."""
        self.process.send_signal(signal.SIGINT)
        for _ in range(10):
            if self._has_more(2):
                return
            self.process.send_signal(signal.SIGINT)

    def _has_more(self, seconds: float) -> bool:
        return bool(select.select([self._screen], [], [], max(0.0, seconds))[0])


def test_ctrl_c_stops_the_answer_only(tmp_path: Path) -> None:
    with running_server() as server:
        terminal = Terminal("--url", server.url, cwd=tmp_path)
        terminal.read_until("> ")
        server.behaviour = "wait"
        terminal.type("one\n")
        terminal.read_until(r"you\b(?! said)")
        terminal.interrupt()
        terminal.read_until(r"\(stopped\)[^>]*> ")
        assert server.client_left.wait(10)
        server.behaviour = "answer"
        terminal.type("two\\\nthree\n")
        terminal.read_until(r"you said: two\s+three[^>]*> ")
        assert [message["content"] for message in server.requests[1]["messages"]] == ["one", "you", "two\nthree"]
        terminal.interrupt()
        terminal.read_until(r"Ctrl-D leaves\)[^>]*> ")
        terminal.type("/exit\n")
        assert terminal.process.wait(10) == 0
