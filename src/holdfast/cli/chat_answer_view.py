"""How `holdfast chat` shows one answer: its words as they are, thoughts dimmed, each call of a tool as one line."""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING, Any

from holdfast.cli.chat_client import AnswerPiece

if TYPE_CHECKING:
    from rich.console import Console

_DIM, _NOT_DIM = "\x1b[2m", "\x1b[22m"


class AnswerView:
    """Shows the pieces of one answer as they come, and keeps what they come to.

    In a pipe the thought does not show: what comes out is the answer.
    """

    def __init__(self, console: Console, *, interactive: bool) -> None:
        self._console, self._interactive = console, interactive
        self._dims = interactive and console.is_terminal and not console.is_dumb_terminal
        self._latest = ""  # kind of the latest piece that was shown
        self.text = self.thought = ""
        self.calls: list[dict[str, Any]] = []

    @property
    def is_empty(self) -> bool:
        """Whether nothing was said and nothing called; a thought alone is no answer."""
        return not self.text and not self.calls

    @property
    def has_shown(self) -> bool:
        """Whether something of it is on the screen."""
        return bool(self._latest)

    def show(self, piece: AnswerPiece) -> None:
        """Show one piece, and keep it."""
        if piece.kind == "reasoning":
            self.thought += piece.text
            if self._interactive:
                self._write("reasoning", piece.text)
        elif piece.call is not None:
            self.calls.append(piece.call)
            function = piece.call["function"]
            line = f"→ {function['name']} {function['arguments']}"
            self._write("call", " ".join(_printable(line).split()))
        else:
            self.text += piece.text
            self._write("text", piece.text)

    def message(self) -> dict[str, Any]:
        """The answer for the next turn of the conversation."""
        return {
            "role": "assistant",
            "content": self.text,
            **({"reasoning_content": self.thought} if self.thought else {}),
            **({"tool_calls": self.calls} if self.calls else {}),
        }

    def _write(self, kind: str, text: str) -> None:
        """The model's words as they are: rich would expand tabs and smileys."""
        shown = _printable(text) if self._interactive else text
        if self._dims and kind != "text":
            shown = f"{_DIM}{shown}{_NOT_DIM}"
        begins_a_line = self._latest and (kind != self._latest or kind == "call")
        self._latest = kind
        self._console.file.write(f"\n{shown}" if begins_a_line else shown)
        self._console.file.flush()


def _printable(text: str) -> str:
    """Without what a terminal takes for a command: a model must not be able to recolour or clear it."""
    return "".join(character for character in text if character in "\n\t" or unicodedata.category(character) != "Cc")
