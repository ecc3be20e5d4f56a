"""One conversation of `holdfast chat`: messages, commands and statistics."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from holdfast.cli.chat_client import AnswerStatistics, ChatClient
from holdfast.cli.errors import complain
from holdfast.cli.server_client import ServerFailed

if TYPE_CHECKING:
    from rich.console import Console

HELP = """\
/reset          forget the conversation (the system prompt stays)
/system [TEXT]  show the system prompt, or set it and start anew; /system none removes it
/stats          tokens and times of the last answer and of the whole conversation
/help           this list
/exit           leave (Ctrl-D too)
Ctrl-C stops an answer; what was said of it stays in the conversation. A line that ends with \\ goes on in the next.
A message that begins with a slash is written with two."""


class ChatSession:
    """Keeps the messages, sends them, prints the answers."""

    def __init__(self, client: ChatClient, model: str, console: Console, *, interactive: bool) -> None:
        self.system = ""
        self.options: dict[str, Any] = {}  # further fields of each request; None: not sent
        self._client, self._model, self._console, self._interactive = client, model, console, interactive
        self._messages: list[dict[str, str]] = []
        self._answers: list[AnswerStatistics] = []

    def run(self, lines: Iterable[str]) -> int:
        """Answer line after line until they end or /exit. Returns the exit code: 1 when an answer failed in a pipe."""
        if self._interactive:
            self._note(f"{self._model} · /help lists the commands")
        failed = False
        for line in lines:
            text = line.strip()
            if not text:
                continue
            if text in ("/exit", "/quit"):
                break
            if text.startswith("/") and not text.startswith("//"):
                self._obey(text)
            else:
                failed |= not self._answer(text.removeprefix("/") if text.startswith("//") else text)
        return 1 if failed and not self._interactive else 0

    def _obey(self, text: str) -> None:
        command, _, argument = text.partition(" ")
        match command:
            case "/reset":
                self._forget()
            case "/system":
                self._set_system(argument.strip())
            case "/stats":
                self._note(self._statistics())
            case "/help":
                self._note(HELP)
            case _:
                self._note(f"there is no {command}; /help lists the commands")

    def _forget(self) -> None:
        self._messages.clear()
        self._answers.clear()
        self._note("(a new conversation)")

    def _set_system(self, text: str) -> None:
        if text:
            self.system = "" if text == "none" else text
            self._forget()
        else:
            self._note(self.system or "(no system prompt)")

    def _answer(self, text: str) -> bool:
        """Send one message and print the answer as it comes. Returns whether it came to an end (or was stopped on purpose)."""
        self._messages.append({"role": "user", "content": text})
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {"model": self._model, "messages": system + self._messages}
        body |= {name: value for name, value in self.options.items() if value is not None}
        statistics, said, stopped = AnswerStatistics(), "", False
        try:
            for piece in self._client.stream(body, statistics):
                said += piece
                self._show(piece)
        except ServerFailed as error:
            self._messages.pop()
            if said:
                self._console.print()
            complain(str(error))
            return False
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            stopped = True
        self._console.print()
        if stopped or statistics.finish_reason == "length":
            self._note("(stopped)" if stopped else "(cut off: no more tokens allowed)")
        self._messages.append({"role": "assistant", "content": said})
        self._answers.append(statistics)
        return True

    def _show(self, piece: str) -> None:
        """The model's words as they are: rich would expand tabs and smileys."""
        self._console.file.write(_printable(piece) if self._interactive else piece)
        self._console.file.flush()

    def _statistics(self) -> str:
        if not self._answers:
            return "nothing was answered yet"
        last = self._answers[-1]
        about = "" if last.exact else "about "
        cached = f" ({last.cached_tokens} of them kept from before)" if last.cached_tokens else ""
        spoken = sum(answer.completion_tokens for answer in self._answers)
        return (
            f"last answer: {last.prompt_tokens} prompt tokens{cached}, {about}{last.completion_tokens} answer tokens, "
            f"first token after {last.first_token_seconds:.2f} s, {last.tokens_per_second:.1f} tokens/s\n"
            f"conversation: {len(self._answers)} answers, {spoken} answer tokens"
        )

    def _note(self, text: str) -> None:
        """Words of ours, not the model's: dimmed, and out of the way of a pipe's output."""
        self._console.print(text, style="dim")


def _printable(text: str) -> str:
    """Without what a terminal takes for a command: a model must not be able to recolour or clear it."""
    return "".join(character for character in text if character in "\n\t" or unicodedata.category(character) != "Cc")
