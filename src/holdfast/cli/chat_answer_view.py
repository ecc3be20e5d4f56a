"""How `holdfast chat` shows one answer: lines broken between words, thoughts dimmed, each call of a
tool as one line.
"""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING, Any

from prompt_toolkit.utils import get_cwidth

from holdfast.cli.chat_client import AnswerPiece

if TYPE_CHECKING:
    from rich.console import Console

_DIM, _NOT_DIM = "\x1b[2m", "\x1b[22m"
_FENCE = "```"
_TAB = 8


class AnswerView:
    """Shows the pieces of one answer as they come, and keeps what they come to.

    In a pipe the thought does not show: what comes out is the answer.
    """

    def __init__(self, console: Console, *, interactive: bool) -> None:
        self._console, self._interactive = console, interactive
        self._dims = interactive and console.is_terminal and not console.is_dumb_terminal
        self._wrap = WordWrap(console.width) if self._dims else None
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
        begins_a_line = self._latest and (kind != self._latest or kind == "call")
        self._latest = kind
        if begins_a_line:
            self._console.file.write(self._placed("\n"))
        shown = self._placed(_printable(text) if self._interactive else text)
        if self._dims and kind != "text":
            shown = f"{_DIM}{shown}{_NOT_DIM}"
        self._console.file.write(shown)
        self._console.file.flush()

    def _placed(self, text: str) -> str:
        return text if self._wrap is None else self._wrap.placed(text)


class WordWrap:
    """Breaks lines between words where a terminal would break them anywhere.

    Text comes in pieces of any size.

    A word is shown as it comes; one that reaches the edge is taken back and written again on the
    next line. The last column stays empty, so that the cursor is where it seems to be. Code between
    fences is not broken: it is there to be copied.
    """

    def __init__(self, columns: int) -> None:
        self._columns = max(columns - 1, 2)
        self._column = 0
        self._word = ""  # since the last space
        self._line = ""  # as the model wrote it
        self._is_code = False

    def placed(self, text: str) -> str:
        """The text with line breaks, and with what moves a word to the next line."""
        return "".join(self._after(character) for character in text)

    def _after(self, character: str) -> str:
        if character == "\n":
            if self._line.lstrip().startswith(_FENCE):
                self._is_code = not self._is_code
            self._line = ""
            self._begin_line("")
            return character
        self._line += character
        width = _TAB - self._column % _TAB if character == "\t" else get_cwidth(character)
        if self._is_code or self._column + width <= self._columns:
            self._column += width
            self._word = "" if character.isspace() else self._word + character
            return character
        if character.isspace():
            self._begin_line("")
            return "\n"
        taken = get_cwidth(self._word)
        if 0 < taken < self._column:
            word = self._word + character
            self._begin_line(word)
            return f"\x1b[{taken}D\x1b[K\n{word}"
        self._begin_line(character)
        return f"\n{character}"

    def _begin_line(self, word: str) -> None:
        self._word = word
        self._column = get_cwidth(word)


def _printable(text: str) -> str:
    """Without what a terminal takes for a command: a model must not be able to recolour or clear
    it.
    """
    return "".join(
        character
        for character in text
        if character in "\n\t" or unicodedata.category(character) != "Cc"
    )
