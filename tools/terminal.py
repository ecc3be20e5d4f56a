"""Runs a program on a pseudo-terminal and emulates the screen."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import pyte

ENTER, CTRL_C, CTRL_D, ALT_ENTER = "\r", "\x03", "\x04", "\x1b\r"


class Terminal:
    """Starts the program. screen: its output as shown. One thread."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: Path,
        variables: Mapping[str, str] | None = None,
        columns: int = 100,
        lines: int = 40,
    ) -> None:
        self._master, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        environ = {
            **os.environ,
            "TERM": "xterm-256color",
            "COLUMNS": str(columns),
            "LINES": str(lines),
            **(variables or {}),
        }
        self.screen = pyte.HistoryScreen(columns, lines, history=10_000, ratio=0.5)
        # replies to queries, such as that for the cursor position, which the screen has not sent yet
        self._replies: list[str] = []
        self.screen.write_process_input = self._replies.append
        self._stream = pyte.ByteStream(self.screen)
        self.modes: list[str] = []  # private modes requested by the program, such as ?2004h
        self.process = subprocess.Popen(
            command,
            stdin=inner,
            stdout=inner,
            stderr=inner,
            cwd=cwd,
            env=environ,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(inner)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)

    def type(self, text: str) -> None:
        """Press keys."""
        data = text.encode()
        while data:  # a terminal accepts limited input at a time
            _, writable, _ = select.select([], [self._master], [], 0.01)
            if writable:
                data = data[os.write(self._master, data[:512]) :]
            self._read(0)

    def paste(self, text: str) -> None:
        """Paste text: with bracketed-paste marks if requested, and with carriage returns as line
        ends.
        """
        text = text.replace("\n", "\r")
        self.type(f"\x1b[200~{text}\x1b[201~" if self.marks_pastes else text)

    @property
    def marks_pastes(self) -> bool:
        """Whether the program has requested bracketed paste."""
        return bool(self.modes) and self.modes[-1] == "h"

    @property
    def echoes(self) -> bool:
        """Whether the terminal itself echoes and buffers lines, as for a shell."""
        local = termios.tcgetattr(self._master)[3]
        return bool(local & termios.ECHO and local & termios.ICANON)

    @property
    def text(self) -> str:
        """All output, including what has scrolled away, without trailing spaces."""
        above = [
            "".join(line[column].data for column in range(self.screen.columns))
            for line in self.screen.history.top
        ]
        return "\n".join([*(line.rstrip() for line in above), self.shown]).rstrip()

    @property
    def shown(self) -> str:
        """The current screen."""
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    def wait_for(self, pattern: str, *, seconds: float = 60.0) -> str:
        """Read until the pattern is in the output; returns the output. Raises AssertionError after
        `seconds`.
        """
        try:
            self.wait_until(
                lambda: re.search(pattern, self.text, re.MULTILINE) is not None, seconds=seconds
            )
        except AssertionError as error:
            raise AssertionError(f"{pattern!r}: {error}") from None
        return self.text

    def wait_until(self, condition: Callable[[], bool], *, seconds: float = 60.0) -> None:
        """Read until the condition holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline or not self._read(0.05):
                raise AssertionError(f"it did not come; the screen shows:\n{self.text}")

    def read_for(self, seconds: float) -> None:
        """Read for this many seconds."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._read(min(left, 0.05))

    def wait(self, seconds: float = 60.0) -> int:
        """Read until the program has ended; returns its exit code."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            self._read(0.05)
        return self.process.wait(0.1)

    def _read(self, seconds: float) -> bool:
        """Read available output. Returns False after the end of the output."""
        if not select.select([self._master], [], [], seconds)[0]:
            return True
        data = b""
        with contextlib.suppress(OSError):  # Linux: the program has closed its terminal
            data = os.read(self._master, 65536)
        if not data:
            return False
        self.modes += re.findall(r"\x1b\[\?2004([hl])", data.decode(errors="replace"))
        self._stream.feed(data)
        replies = "".join(self._replies)
        self._replies.clear()
        self.type(replies)
        return True


def _take_terminal() -> None:
    """In the child: take the terminal, and handle Ctrl-C although background jobs ignore it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
