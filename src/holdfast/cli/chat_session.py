"""One conversation of `holdfast chat`: messages, commands and statistics."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import re
import signal
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from holdfast.cli.chat_answer_view import AnswerView
from holdfast.cli.chat_client import AnswerStatistics, answer_pieces
from holdfast.cli.output import complain, count_text
from holdfast.cli.server_client import ServerClient, ServerFailed

if TYPE_CHECKING:
    from rich.console import Console

HELP = """\
/reset          forget the conversation (the system prompt stays)
/system [TEXT]  show the system prompt, or set it and start over; /system none removes it
/stats          tokens and times of the last answer and of the whole conversation
/help           this list
/exit           leave (Ctrl-D too)
Enter sends. Several lines: Alt-Enter, or a \\ at the end of the line; what is pasted is one message, however many lines it has.
Ctrl-C stops an answer; the part already shown stays in the conversation. A message that begins like a command is written with
two slashes."""
_COMMANDS = ("/reset", "/system", "/stats", "/help", "/exit")
_LEAVE = frozenset({"/exit", "/quit", "/bye", "/q"})
_LIKE_A_COMMAND = re.compile(r"/[A-Za-z?]*")  # so that a path is a message


class ChatSession:
    """Keeps the messages, sends them, prints the answers."""

    def __init__(
        self, client: ServerClient, model: str, console: Console, *, interactive: bool
    ) -> None:
        self.system = ""
        self.options: dict[str, Any] = {}  # further fields of each request; None: not sent
        self._client, self._model, self._console, self._interactive = (
            client,
            model,
            console,
            interactive,
        )
        self._messages: list[dict[str, Any]] = []
        self._answers: list[AnswerStatistics] = []

    def run(self, lines: Iterable[str]) -> int:
        """Answer line after line until they end or /exit.

        Returns the exit code: 1 when an answer failed in a pipe.
        """
        if self._interactive:
            self._say(f"{self._model} · /help lists the commands")
        failed = False
        for line in lines:
            # and not more: what is pasted may begin with spaces that mean something
            text = line.strip("\r\n")
            word = next(iter(text.split()), "")
            if not word:
                continue
            if word in _LEAVE or (self._interactive and text.strip() in ("exit", "quit")):
                break
            if word in _COMMANDS or (_LIKE_A_COMMAND.fullmatch(word) and "\n" not in text):
                self._obey(text.strip())
            else:
                failed |= not self._answer(
                    text.removeprefix("/") if text.startswith("//") else text
                )
        return 1 if failed and not self._interactive else 0

    def ask(self, question: str) -> bool:
        """Answer one question; returns whether the answer came to its end."""
        return self._answer(question)

    def _obey(self, text: str) -> None:
        command, *rest = text.split(maxsplit=1)
        argument = "".join(rest)
        match command:
            case "/reset":
                self._reset()
            case "/system":
                self._set_system(argument.strip())
            case "/stats":
                self._say(self._statistics())
            case "/help":
                self._say(HELP)
            case _:
                near = difflib.get_close_matches(command, _COMMANDS, n=1)
                self._say(
                    f"there is no {command};{f' did you mean {near[0]}?' if near else ''} /help "
                    "lists the commands"
                )

    def _reset(self) -> None:
        self._messages.clear()
        self._answers.clear()
        self._say("(a new conversation)")

    def _set_system(self, text: str) -> None:
        if text:
            self.system = "" if text == "none" else text
            self._reset()
        else:
            self._say(self.system or "(no system prompt)")

    def _answer(self, text: str) -> bool:
        """Send one message and print the answer as it comes.

        Returns whether it came to an end (or was stopped on purpose).
        """
        self._messages.append({"role": "user", "content": text})
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {"model": self._model, "messages": system + self._messages}
        body |= {name: value for name, value in self.options.items() if value is not None}
        for_person = self._interactive or self._console.is_terminal
        statistics, view = AnswerStatistics(), AnswerView(self._console, interactive=for_person)
        try:
            stopped = asyncio.run(self._shown(body, statistics, view))
        except ServerFailed as error:
            self._messages.pop()
            if view.has_shown:
                self._console.print()
            complain(str(error))
            return False
        self._end_answer(view, statistics, stopped=stopped)
        return True

    async def _shown(
        self, body: dict[str, Any], statistics: AnswerStatistics, view: AnswerView
    ) -> bool:
        """Show an answer as it comes. Returns whether a person has stopped it. Raises ServerFailed."""
        # a pipe ends with Ctrl-C
        with _interruptible() if self._interactive else contextlib.nullcontext():
            try:
                async for piece in answer_pieces(self._client, body, statistics):
                    view.show(piece)
            except asyncio.CancelledError:
                if not self._interactive:
                    raise
                return True
        return False

    def _end_answer(self, view: AnswerView, statistics: AnswerStatistics, *, stopped: bool) -> None:
        """End the answer on the screen, and put what was said into the conversation."""
        if view.has_shown or not self._interactive:
            self._console.print()
        if view.is_empty:
            # a question without an answer: many chat templates allow no second one behind it
            self._messages.pop()
        else:
            self._messages.append(view.message())
        if stopped:
            self._say(
                "(stopped before the answer began; the message is forgotten)"
                if view.is_empty
                else "(stopped)"
            )
        elif statistics.finish_reason == "length":
            self._say("(cut off: no more tokens allowed)")
        elif view.is_empty and self._interactive:
            self._say("(an empty answer; the message is forgotten)")
        if not view.is_empty:
            self._answers.append(statistics)

    def _statistics(self) -> str:
        if not self._answers:
            return "no answer yet"
        last = self._answers[-1]
        about = "" if last.exact else "about "
        cached = f" ({last.cached_tokens} of them kept from before)" if last.cached_tokens else ""
        speed = f", then {last.tokens_per_second:.1f} tokens/s" if last.tokens_per_second else ""
        spoken = sum(answer.completion_tokens for answer in self._answers)
        return (
            f"last answer: {count_text(last.prompt_tokens, 'prompt token')}{cached}, "
            f"{about}{count_text(last.completion_tokens, 'answer token')}\n"
            f"first token after {last.first_token_seconds:.2f} s{speed}\n"
            f"conversation: {count_text(len(self._answers), 'answer')}, "
            f"{count_text(spoken, 'answer token')}"
        )

    def _say(self, text: str) -> None:
        """Words of ours, not the model's: dimmed, and out of the way of a pipe's output."""
        self._console.print(text, style="dim")


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C cancels the task that runs here: at one of its own waits, where all that it holds is
    given back.

    More of them change nothing.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    presses = 0

    def interrupt(number: int, frame: object) -> None:
        nonlocal presses
        presses += 1
        if presses == 1 and task is not None:
            loop.call_soon_threadsafe(task.cancel)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
