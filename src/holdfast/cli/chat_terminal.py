"""The terminal of a chat while nobody asks for input: before the first prompt, and while an answer
is written.
"""

from __future__ import annotations

import contextlib
import sys
import termios
from collections.abc import Iterator

_INPUT, _LOCAL = 0, 3  # places in termios' list of attributes
_MARK_PASTES, _PASTES_AS_KEYS = "\x1b[?2004h", "\x1b[?2004l"


@contextlib.contextmanager
def keys_kept() -> Iterator[None]:
    """Keys are kept for the next prompt as they come, neither shown nor gathered to lines; Ctrl-C
    works. Put back at the end.
    """
    keyboard = sys.stdin.fileno()
    before, meanwhile = termios.tcgetattr(keyboard), termios.tcgetattr(keyboard)
    meanwhile[_INPUT] &= ~termios.ICRNL
    meanwhile[_LOCAL] &= ~(termios.ECHO | termios.ICANON)
    meanwhile[_LOCAL] |= termios.NOFLSH  # Ctrl-C, too, leaves what was typed before it
    termios.tcsetattr(keyboard, termios.TCSANOW, meanwhile)
    mark_pastes()
    try:
        yield
    finally:
        _tell_terminal(_PASTES_AS_KEYS)
        termios.tcsetattr(keyboard, termios.TCSANOW, before)


def mark_pastes() -> None:
    """Ask the terminal to mark where a paste begins and ends, so that its lines can be told from
    lines that are typed.
    """
    _tell_terminal(_MARK_PASTES)


def _tell_terminal(sequence: str) -> None:
    if sys.stdout.isatty():
        sys.stdout.write(sequence)
        sys.stdout.flush()
