"""The terminal in which agents and commands are tried."""

from __future__ import annotations

import sys
from pathlib import Path

from tools.terminal import Terminal

# asks for the terminal's attributes, with more output behind each question
ASKS = "print(('\\x1b[c' + 'x' * 5000) * 60, flush=True)"


def test_a_query_is_answered_while_more_output_arrives(tmp_path: Path) -> None:
    with Terminal([sys.executable, "-c", ASKS], cwd=tmp_path) as terminal:
        assert terminal.wait(60) == 0
