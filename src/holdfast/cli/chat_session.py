"""One conversation of `holdfast chat`: streamed answers, what the terminal shows, commands."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import os
import re
import signal
import sys
import termios
import time
import unicodedata
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from prompt_toolkit import PromptSession
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output, create_output
from prompt_toolkit.utils import get_cwidth

from holdfast.cli.output import complain, count_text
from holdfast.cli.server_client import ServerClient, ServerFailed, error_text, json_object

if TYPE_CHECKING:
    from rich.console import Console

HELP = """\
/reset          start a new conversation (the system prompt stays)
/system [TEXT]  show the system prompt, or set it and start over; /system none removes it
/stats          tokens and times of the last answer and of the conversation
/help           this list
/exit           leave (also Ctrl-D)
Enter sends. Alt-Enter, or a \\ at the end of a line, starts a new line; a paste is one message.
Ctrl-C stops an answer; the part already shown stays in the conversation.
Type two slashes to send a message that begins like a command."""
LEAVE_HINT = "(press Ctrl-C again to leave; Ctrl-D and /exit leave too)"

_COMMANDS = ("/reset", "/system", "/stats", "/help", "/exit")
_LEAVE = frozenset({"/exit", "/quit", "/bye", "/q"})
_COMMAND_WORD = re.compile(r"/[A-Za-z?]*")  # does not match a path such as /usr/bin
_MIN_SPEED_SECONDS = 0.05  # a shorter answer arrived in one piece and has no meaningful speed
_PROMPT = FormattedText([("fg:ansigreen bold", "> ")])
_CONTINUATION = "… "
_DIM = "\x1b[2m"
_NOT_DIM = "\x1b[22m"
_FENCE = "```"
_TAB_COLUMNS = 8
_INPUT_FLAGS = 0  # indexes into the attributes of termios
_LOCAL_FLAGS = 3


class ChatSession:
    """Keeps the messages, sends them and prints the answers."""

    def __init__(
        self,
        client: ServerClient,
        model: str,
        console: Console,
        *,
        interactive: bool,
        system: str = "",
        options: dict[str, Any] | None = None,
    ) -> None:
        """options: further fields of each request."""
        self._client = client
        self._model = model
        self._console = console
        self._interactive = interactive
        self._system = system
        self._options = options or {}
        self._messages: list[dict[str, Any]] = []
        self._answers: list[Answer] = []

    def run(self, lines: Iterable[str]) -> int:
        """Answer one line after the other until they end or one says /exit.

        Returns the exit code: 1 if an answer failed in a pipe.
        """
        if self._interactive:
            self._say(f"{self._model} · /help lists the commands")
        failed = False
        for line in lines:
            text = line.strip("\r\n")  # leading spaces may matter, for example in pasted code
            word = next(iter(text.split()), "")
            if not word:
                continue
            if word in _LEAVE or (self._interactive and text.strip() in ("exit", "quit")):
                break
            if word in _COMMANDS or (_COMMAND_WORD.fullmatch(word) and "\n" not in text):
                self._run_command(text.strip())
            else:
                message = text.removeprefix("/") if text.startswith("//") else text
                failed |= not self.ask(message)
        return 1 if failed and not self._interactive else 0

    def ask(self, text: str) -> bool:
        """Send a message and print the answer as it arrives.

        Returns False if the answer failed; stopping it is no failure.
        """
        self._messages.append({"role": "user", "content": text})
        system = [{"role": "system", "content": self._system}] if self._system else []
        body = {"model": self._model, "messages": system + self._messages, **self._options}
        answer = Answer()
        for_person = self._interactive or self._console.is_terminal
        view = AnswerView(self._console, for_person=for_person)
        try:
            stopped = asyncio.run(self._stream(body, answer, view))
        except ServerFailed as error:
            self._messages.pop()
            if view.has_shown:
                self._console.print()
            complain(str(error))
            return False
        if view.has_shown or not self._interactive:
            self._console.print()
        self._keep(answer, stopped=stopped)
        return True

    async def _stream(self, body: dict[str, Any], answer: Answer, view: AnswerView) -> bool:
        """Show an answer as it arrives. Returns whether Ctrl-C stopped it."""
        if not self._interactive:
            async for piece in answer_pieces(self._client, body, answer):
                view.show(piece)
            return False
        with _ctrl_c_cancels():
            try:
                async for piece in answer_pieces(self._client, body, answer):
                    view.show(piece)
            except asyncio.CancelledError:
                return True
        return False

    def _keep(self, answer: Answer, *, stopped: bool) -> None:
        """Add an answer to the conversation, or drop its question if it is empty."""
        if stopped:
            answer.calls.clear()  # the arguments of the last one may be cut off
        if answer.is_empty:
            # many chat templates allow no second question after one without an answer
            self._messages.pop()
        else:
            self._messages.append(answer.message())
            self._answers.append(answer)
        if stopped and answer.is_empty:
            self._say("(stopped before the answer began; the message is dropped)")
        elif stopped:
            self._say("(stopped)")
        elif answer.finish_reason == "length":
            self._say("(cut off: the limit of tokens is reached)")
        elif answer.is_empty and self._interactive:
            self._say("(an empty answer; the message is dropped)")

    def _run_command(self, text: str) -> None:
        command, *rest = text.split(maxsplit=1)
        argument = "".join(rest)
        match command:
            case "/reset":
                self._reset()
            case "/system" if argument:
                self._system = "" if argument == "none" else argument
                self._reset()
            case "/system":
                self._say(self._system or "(no system prompt)")
            case "/stats":
                self._say(self._statistics())
            case "/help":
                self._say(HELP)
            case _:
                near = difflib.get_close_matches(command, _COMMANDS, n=1)
                hint = f" did you mean {near[0]}?" if near else ""
                self._say(f"there is no command {command};{hint} /help lists the commands")

    def _reset(self) -> None:
        self._messages.clear()
        self._answers.clear()
        self._say("(a new conversation)")

    def _statistics(self) -> str:
        if not self._answers:
            return "no answer yet"
        last = self._answers[-1]
        about = "" if last.exact else "about "
        cached = f" ({last.cached_tokens} of them kept from before)" if last.cached_tokens else ""
        speed = f", then {last.tokens_per_second:.1f} tokens/s" if last.tokens_per_second else ""
        total = sum(answer.completion_tokens for answer in self._answers)
        return (
            f"last answer: {count_text(last.prompt_tokens, 'prompt token')}{cached}, "
            f"{about}{count_text(last.completion_tokens, 'answer token')}\n"
            f"first token after {last.first_token_seconds:.2f} s{speed}\n"
            f"conversation: {count_text(len(self._answers), 'answer')}, "
            f"{count_text(total, 'answer token')}"
        )

    def _say(self, text: str) -> None:
        """Print our own words, dimmed to tell them from the model's."""
        self._console.print(text, style="dim")


@dataclass(slots=True, kw_only=True)
class Answer:
    """One answer: what arrived, and its counts and times as measured here."""

    text: str = ""
    reasoning: str = ""
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)  # by index
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    exact: bool = False  # the server sent the counts; otherwise pieces of text are counted
    first_token_seconds: float = 0.0
    total_seconds: float = 0.0
    finish_reason: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether it has neither text nor tool calls; reasoning alone is no answer."""
        return not self.text and not self.calls

    @property
    def tokens_per_second(self) -> float:
        """Speed after the first token; 0 if it cannot be measured."""
        seconds = self.total_seconds - self.first_token_seconds
        if self.completion_tokens < 2 or seconds <= _MIN_SPEED_SECONDS:
            return 0.0
        return (self.completion_tokens - 1) / seconds

    def message(self) -> dict[str, Any]:
        """The answer as a message of the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = list(self.calls.values())
        return message


class AnswerPiece(NamedTuple):
    """A piece of an answer to show. A tool call is one piece, sent when it is complete."""

    kind: Literal["text", "reasoning", "call"]
    text: str


async def answer_pieces(
    server: ServerClient, body: dict[str, Any], answer: Answer
) -> AsyncGenerator[AnswerPiece, None]:
    """Stream one answer through OpenAI's API and fill in `answer` on the way.

    Cancel the task that iterates to stop the answer. Raises ServerFailed.
    """
    began = time.monotonic()
    options = {"include_usage": True}
    if server.is_holdfast:  # other servers may reject the field
        options["continuous_usage_stats"] = True
    request = {**body, "stream": True, "stream_options": options}
    async with server.lines("/v1/chat/completions", request) as lines:
        async for line in lines:
            name, _, value = line.partition(":")
            if name != "data" or value.strip() == "[DONE]":
                continue
            chunk = json_object(value)
            if "error" in chunk:
                raise ServerFailed(error_text(value))
            for piece in _take_chunk(chunk, answer):
                answer.total_seconds = time.monotonic() - began
                answer.first_token_seconds = answer.first_token_seconds or answer.total_seconds
                yield piece
    if not answer.finish_reason:
        raise ServerFailed("the server closed the connection before the answer was complete")


def _take_chunk(chunk: dict[str, Any], answer: Answer) -> Iterator[AnswerPiece]:
    if usage := chunk.get("usage"):
        answer.exact = True
        answer.prompt_tokens = usage.get("prompt_tokens", 0)
        answer.completion_tokens = usage.get("completion_tokens", 0)
        details = usage.get("prompt_tokens_details") or {}
        answer.cached_tokens = details.get("cached_tokens", answer.cached_tokens)
    for choice in chunk.get("choices", ()):
        delta = choice.get("delta") or {}
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        text = delta.get("content")
        if not answer.exact and (reasoning or text):
            answer.completion_tokens += 1
        if reasoning:
            answer.reasoning += reasoning
            yield AnswerPiece("reasoning", reasoning)
        if text:
            answer.text += text
            yield AnswerPiece("text", text)
        for part in delta.get("tool_calls") or ():
            _extend_calls(answer.calls, part)
        if reason := choice.get("finish_reason"):
            answer.finish_reason = reason
            for call in answer.calls.values():
                function = call["function"]
                yield AnswerPiece("call", f"→ {function['name']} {function['arguments']}")


def _extend_calls(calls: dict[int, dict[str, Any]], part: dict[str, Any]) -> None:
    """Add the delta of a tool call to the call with its index."""
    function = {"name": "", "arguments": ""}
    new = {"id": part.get("id", ""), "type": "function", "function": function}
    call = calls.setdefault(part.get("index", 0), new)
    added = part.get("function") or {}
    call["function"]["name"] = call["function"]["name"] or added.get("name") or ""
    call["function"]["arguments"] += added.get("arguments") or ""


@contextlib.contextmanager
def _ctrl_c_cancels() -> Iterator[None]:
    """The first Ctrl-C cancels the current task; further ones are ignored.

    A task is cancelled at an await, where the HTTP client cleans up. KeyboardInterrupt could strike
    anywhere and leave its locks taken.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    presses = 0

    def interrupt(number: int, frame: object) -> None:
        nonlocal presses
        presses += 1
        if presses == 1:
            loop.call_soon_threadsafe(task.cancel)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class AnswerView:
    """Prints an answer: wraps lines between words and dims reasoning and tool calls.

    A pipe gets no reasoning, and the text exactly as the model wrote it.
    """

    def __init__(self, console: Console, *, for_person: bool) -> None:
        self._file = console.file
        self._for_person = for_person
        self._is_styled = for_person and console.is_terminal and not console.is_dumb_terminal
        self._wrap = WordWrap(console.width)
        self._last_kind = ""

    @property
    def has_shown(self) -> bool:
        """Whether anything was printed."""
        return bool(self._last_kind)

    def show(self, piece: AnswerPiece) -> None:
        """Print one piece."""
        kind, text = piece
        if kind == "reasoning" and not self._for_person:
            return
        if kind == "call":
            text = " ".join(_printable(text).split())
        elif self._for_person:
            text = _printable(text)
        separator = "\n" if self._last_kind and (kind != self._last_kind or kind == "call") else ""
        self._last_kind = kind
        if self._is_styled:
            separator = self._wrap.wrapped(separator)
            text = self._wrap.wrapped(text)
            if kind != "text":
                text = f"{_DIM}{text}{_NOT_DIM}"
        # not console.print: rich would expand tabs and emoji codes
        self._file.write(separator + text)
        self._file.flush()


class WordWrap:
    """Breaks streamed text between words, where a terminal would break it anywhere.

    Text is shown at once. A word that reaches the edge is erased and written again on the next line.
    The last column stays empty: a cursor there would be ambiguous. Fenced code is not wrapped, so
    that it can be copied.
    """

    def __init__(self, columns: int) -> None:
        self._columns = max(columns - 1, 2)
        self._column = 0
        self._word = ""  # since the last space
        self._line = ""  # as the model wrote it
        self._is_code = False

    def wrapped(self, text: str) -> str:
        """The text with line breaks, and with the sequences that move a word to the next line."""
        return "".join(self._next(character) for character in text)

    def _next(self, character: str) -> str:
        if character == "\n":
            if self._line.lstrip().startswith(_FENCE):
                self._is_code = not self._is_code
            self._line = ""
            self._begin_line("")
            return character
        self._line += character
        width = get_cwidth(character)
        if character == "\t":
            width = _TAB_COLUMNS - self._column % _TAB_COLUMNS
        if self._is_code or self._column + width <= self._columns:
            self._column += width
            self._word = "" if character.isspace() else self._word + character
            return character
        if character.isspace():
            self._begin_line("")
            return "\n"
        erased = get_cwidth(self._word)
        if 0 < erased < self._column:
            word = self._word + character
            self._begin_line(word)
            return f"\x1b[{erased}D\x1b[K\n{word}"
        self._begin_line(character)
        return f"\n{character}"

    def _begin_line(self, word: str) -> None:
        self._word = word
        self._column = get_cwidth(word)


def _printable(text: str) -> str:
    """The text without control characters: a model must not recolour or clear the terminal."""
    return "".join(
        character
        for character in text
        if character in "\n\t" or unicodedata.category(character) != "Cc"
    )


@contextlib.contextmanager
def typed_messages() -> Iterator[Iterator[str]]:
    """The messages that a person types, until Ctrl-D at an empty prompt or Ctrl-C twice.

    Inside the context the terminal keeps what is typed between two prompts, unseen, for the next
    prompt. prompt_toolkit reads the keys, because `input` takes each line of a paste for a message:
    Python switches bracketed paste off in GNU readline, and libedit on macOS has none.
    """
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    quiet = termios.tcgetattr(keyboard)
    quiet[_INPUT_FLAGS] &= ~termios.ICRNL
    quiet[_LOCAL_FLAGS] &= ~(termios.ECHO | termios.ICANON)
    quiet[_LOCAL_FLAGS] |= termios.NOFLSH  # Ctrl-C does not discard what was typed
    # suppresses a warning about terminals that do not report their cursor position
    os.environ.setdefault("PROMPT_TOOLKIT_NO_CPR", "1")
    output = create_output(always_prefer_tty=True)
    termios.tcsetattr(keyboard, termios.TCSANOW, quiet)
    output.enable_bracketed_paste()
    output.flush()
    try:
        yield _prompted(output)
    finally:
        output.disable_bracketed_paste()
        output.flush()
        termios.tcsetattr(keyboard, termios.TCSANOW, before)


def _prompted(output: Output) -> Iterator[str]:
    session: PromptSession[str] = PromptSession(
        multiline=True,
        enable_suspend=True,
        key_bindings=_key_bindings(),
        prompt_continuation=_CONTINUATION,
        output=output,
    )
    # Ctrl-C is a key at the prompt and stops the answer during one; in between it is ignored.
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    about_to_leave = False
    try:
        while True:
            try:
                message = session.prompt(_PROMPT, handle_sigint=False)
            except EOFError:
                return
            except KeyboardInterrupt:
                if about_to_leave:
                    return
                about_to_leave = not session.default_buffer.text  # else it discarded a line
                if about_to_leave:
                    print(LEAVE_HINT, flush=True)  # noqa: T201
                continue
            about_to_leave = False
            output.enable_bracketed_paste()  # the prompt has switched it off
            output.flush()
            yield message
    finally:
        signal.signal(signal.SIGINT, before)


def _key_bindings() -> KeyBindings:
    """Enter sends; Alt-Enter, or Enter after a backslash, starts a new line."""
    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        document = buffer.document
        if document.text_before_cursor.endswith("\\") and not document.text_after_cursor:
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return keys
