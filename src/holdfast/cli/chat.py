"""`holdfast chat` and `holdfast run`: a conversation in the terminal, messages from a pipe, or one
question.

prompt_toolkit and the HTTP client are imported late, because they would slow down the start of all
commands.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import functools
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import unicodedata
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias

import typer

from holdfast.cli.chat_images import ImageUnreadable, image_part, take_images, typed_path
from holdfast.cli.output import complain, count_text, plain_errors
from holdfast.cli.server_client import (
    ApiKey,
    KeyRefused,
    NotServed,
    ServerClient,
    ServerFailed,
    client_of_own,
    error_text,
    json_object,
    own_servers,
    with_scheme,
)
from holdfast.cli.settings import read_settings, settings_command
from holdfast.config import EffectiveSettings, ModelSettings, shown_value
from holdfast.errors import HoldfastError, ModelLoadError
from holdfast.front.request import DEFAULT_ANSWER_TOKENS
from holdfast.models.download import local_folder, source_of
from holdfast.models.model_folder import DEFAULT_SAMPLING
from holdfast.wire.requests import SAMPLING_RANGES
from holdfast.worker.cpu.kernels.build import uncompiled

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding.key_processor import KeyPressEvent
    from rich.console import Console

_STDIN = "-"
# if a running server takes longer than this to list its models, it is too busy to be used
_MODELS_SECONDS = 2.0
_POLL_SECONDS = 0.05
_SHUTDOWN_SECONDS = 15.0
_SHOWN_SETTINGS = ("model.path", "model.context_tokens", "server.api_key")
# of no use here: a chat uses a running server, or a new one on a loopback port
_SETTINGS_WITHOUT_OPTION = (
    "server.host",
    "server.port",
    "server.allowed_hosts",
    "server.cors_origins",
    "server.tls_key",
)
# These flags also work with a running server; any other flag starts a new server.
_CLIENT_FLAGS = frozenset(
    {"model.path", "server.api_key", "server.tls_cert", "log.level", "log.format"}
)
_SET_BY_OWN_SERVER = (
    "server.host",
    "server.port",
    "server.api_key",
    "server.tls_cert",
    "server.tls_key",
    "log.level",
)
HELP = """\
/reset          start a new conversation (the system prompt stays)
/system [TEXT]  show the system prompt, or set it and start over; /system none removes it
/image PATH     send an image with the next message; a path within a message works as well
/stats          tokens and times of the last answer and of the conversation
/help           this list
/exit           leave (also Ctrl-D)
Enter sends. Alt-Enter, or a \\ at the end of a line, starts a new line; pasted text is one message.
Ctrl-C stops an answer; the part already shown stays in the conversation.
Type two slashes to send a message that begins like a command."""
LEAVE_HINT = "(press Ctrl-C again to leave; Ctrl-D and /exit leave too)"
_COMMANDS = ("/reset", "/system", "/image", "/stats", "/help", "/exit")
_LEAVE_WORDS = frozenset({"/exit", "/quit", "/bye", "/q"})
_COMMAND_WORD = re.compile(r"/[A-Za-z?]*")  # does not match a path such as /usr/bin
# an answer that took less time arrived in one piece, so its speed means nothing
_MIN_SPEED_SECONDS = 0.05

Url: TypeAlias = Annotated[
    str, typer.Option("--url", help="URL of a running server; MODEL is then an id there.")
]
OwnServer: TypeAlias = Annotated[
    bool, typer.Option("--own-server", help="Start a new server, even if one is running.")
]
System: TypeAlias = Annotated[str, typer.Option("--system", help="System prompt.")]
Temperature: TypeAlias = Annotated[
    float | None, typer.Option(min=0, max=2, help=SAMPLING_RANGES["temperature"].meaning)
]
MaxTokens: TypeAlias = Annotated[
    int, typer.Option("--max-tokens", min=1, help="Maximum length of an answer in tokens.")
]
Images: TypeAlias = Annotated[
    list[Path] | None,
    typer.Option("--image", metavar="PATH", help="Image for the question. Can be repeated."),
]


class NotAModel(HoldfastError):
    """The argument MODEL is a question, or there is no question."""


@functools.partial(settings_command, shown=_SHOWN_SETTINGS, left_out=_SETTINGS_WITHOUT_OPTION)
def chat(
    effective: EffectiveSettings,
    prompt: Annotated[
        str,
        typer.Option(
            "--prompt",
            "-p",
            metavar="TEXT",
            help="Ask TEXT, print the answer and exit; - reads stdin.",
        ),
    ] = "",
    url: Url = "",
    own_server: OwnServer = False,
    system: System = "",
    temperature: Temperature = None,
    max_tokens: MaxTokens = DEFAULT_ANSWER_TOKENS,
    image: Images = None,
) -> None:
    """Chat with a model in the terminal.

    If your running server serves the model, the chat uses that server. Otherwise it starts a server
    for the conversation. /help lists the commands, Ctrl-C stops an answer. If the input comes from
    a pipe, each line is a message.
    """
    question = sys.stdin.read() if prompt == _STDIN else prompt
    options = {"temperature": temperature, "max_tokens": max_tokens}
    _converse(
        effective,
        question,
        url=url,
        starts_own=own_server,
        system=system,
        options=options,
        images=image or (),
        is_one_question=bool(question),
    )


def run(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", show_default=False, help="Model folder, Hub id or name."),
    ],
    prompt: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]...", show_default=False, help="The question."),
    ] = None,
    url: Url = "",
    api_key: ApiKey = None,
    own_server: OwnServer = False,
    system: System = "",
    temperature: Temperature = None,
    max_tokens: MaxTokens = DEFAULT_ANSWER_TOKENS,
    image: Images = None,
) -> None:
    """Ask a model one question, or chat with it.

    With PROMPT, or with text from a pipe, which is put before PROMPT, this prints one answer and
    exits. Without both, it is the same as `holdfast chat`; where nobody can type, an image alone is
    the question.
    """
    piped = "" if sys.stdin.isatty() else sys.stdin.read()
    question = "\n\n".join(part for part in (piped.strip("\n"), " ".join(prompt or [])) if part)
    with plain_errors():
        _check_is_no_question(model)
        if not question and not image and not sys.stdin.isatty():
            raise NotAModel(
                f'there is no question; for example: holdfast run {model} "Why is the sky blue?"'
            )
        flags = {"model.path": model}
        effective = read_settings(
            flags if api_key is None else {**flags, "server.api_key": api_key}
        )
        options = {"temperature": temperature, "max_tokens": max_tokens}
        _converse(
            effective,
            question,
            url=url,
            starts_own=own_server,
            system=system,
            options=options,
            images=image or (),
            is_one_question=bool(question) or not sys.stdin.isatty(),
        )


def _converse(
    effective: EffectiveSettings,
    question: str,
    *,
    url: str,
    starts_own: bool,
    system: str,
    options: dict[str, float | None],
    images: Sequence[Path],
    is_one_question: bool,
) -> None:
    """Answer the question, or else all typed or piped messages. Then exit.

    url: of the server; empty: a running server of the user, or a new one. starts_own: start a new
    server even if one is running. options: additional fields of each request.

    is_one_question: whether there is only the question, which may be images without a text. images:
    for the question or the first message. Raises ImageUnreadable.
    """
    from rich.console import Console

    parts = [image_part(path) for path in images]
    _check_is_no_question(effective.settings.model.path)
    interactive = not is_one_question and sys.stdin.isatty()
    console = Console(highlight=False, markup=False, soft_wrap=True)
    with contextlib.ExitStack() as stack:
        client, model = stack.enter_context(
            _server(effective, console, url=url, starts_own=starts_own, interactive=interactive)
        )
        lines: Iterator[str] = (line.rstrip("\n") for line in sys.stdin)
        keyboard = None
        if interactive:
            keyboard = stack.enter_context(_keyboard())
            lines = _typed_messages(keyboard)
        session = ChatSession(
            client,
            model,
            console,
            interactive=interactive,
            keyboard=keyboard,
            system=system,
            options={name: value for name, value in options.items() if value is not None},
        )
        for path, part in zip(images, parts, strict=True):
            session.attach(path, part)
        if is_one_question:
            if sys.stderr.isatty() and (sampling := session.sampling()):
                Console(stderr=True, highlight=False).print(sampling, style="dim")
            raise typer.Exit(0 if session.send_message(question) else 1)
        raise typer.Exit(session.run(lines))


def _check_is_no_question(model: str) -> None:
    """Raise NotAModel if the argument MODEL is a question."""
    if len(model.split()) > 1 and not Path(model).expanduser().exists():
        raise NotAModel(
            f'"{model}" is not a model. To ask one question: holdfast chat -p "…", or holdfast run '
            'MODEL "…"'
        )


def _may_be_available(model: ModelSettings) -> bool:
    """Whether the model may be available; if not, the server says why. Raises NotAModel for a local
    model without a chat template, before the server spends time loading it.
    """
    from holdfast.models.chat_templates import template_sources

    try:
        folder = local_folder(source_of(model), os.environ)
        if folder is None or template_sources(folder):
            return True
    except (ModelLoadError, OSError):
        return False
    if not (folder / "config.json").is_file():
        return False
    raise NotAModel(
        f"{model.path} has no chat template: it is a base model, which only completes text. Run "
        f"`holdfast serve {model.path}` and send a prompt to /v1/completions"
    )


@contextlib.contextmanager
def _server(
    effective: EffectiveSettings, console: Console, *, url: str, starts_own: bool, interactive: bool
) -> Iterator[tuple[ServerClient, str]]:
    """Yield a client of the server, and the model's id there. Raises ServerFailed."""
    settings = effective.settings
    if url:
        with ServerClient(
            url=with_scheme(url),
            api_key=settings.server.api_key,
            certificate=settings.server.tls_cert,
        ) as client:
            yield client, client.model(settings.model.path)["id"]
        return
    running = None if starts_own else _running_server(effective)
    if running is not None:
        client, model, pid = running
        if interactive:
            console.print(
                f"using the server at {client.url}, pid {pid} (--own-server starts another)",
                style="dim",
            )
        with client:
            yield client, model
        return
    available = _may_be_available(settings.model)
    if available and (kernels := uncompiled()):
        complain(
            f"compiling kernels for this CPU ({', '.join(kernels)}); this happens once and takes "
            "about 20 s"
        )
    with contextlib.ExitStack() as stack:
        with console.status("starting") as spinner:  # in a pipe, this shows nothing
            try:
                client = stack.enter_context(own_server(effective, on_state=spinner.update))
            except ServerFailed as error:
                hints = (
                    () if available or starts_own else _served_by_running(settings.server.api_key)
                )
                raise ServerFailed(" ".join((str(error), *hints))) from None
        yield client, client.model()["id"]


def _running_server(effective: EffectiveSettings) -> tuple[ServerClient, str, int] | None:
    """Return the user's running server that serves the model, the model's id there, and the process
    id.

    If no model is named, the server at the port of the settings is used, or else the only running
    one. Returns None if a server must be started. Raises KeyRefused if a server that may serve the
    model does not accept the key: another server would load a second copy of the model.
    """
    for key, origin in effective.origins.items():
        if origin.startswith("flag") and key not in _CLIENT_FLAGS:
            return None
    wanted_model = effective.settings.model.path
    settings = effective.settings.server
    candidates = sorted(own_servers(), key=lambda server: server.port != settings.port)
    if not wanted_model and len(candidates) > 1:
        candidates = [server for server in candidates if server.port == settings.port]
    key_error: KeyRefused | None = None
    for server in candidates:
        client = client_of_own(server, api_key=settings.api_key)
        try:
            available = client.model_ids(seconds=_MODELS_SECONDS)
            if available and (not wanted_model or wanted_model in available):
                return client, wanted_model or available[0], server.pid
        except KeyRefused as error:
            key_error = key_error or error
        except ServerFailed:  # the server does not answer
            pass
        client.close()
    if key_error is not None:
        raise ServerFailed(f"{key_error}, or start another server with --own-server")
    return None


def _served_by_running(api_key: str) -> Iterator[str]:
    """What the user's running servers serve, one server each, for an unknown name of a model."""
    for server in own_servers():
        with (
            contextlib.suppress(ServerFailed),  # it does not answer, or needs another key
            client_of_own(server, api_key=api_key) as client,
        ):
            names = client.model_ids(seconds=_MODELS_SECONDS)
            yield f"(your server at {server.url} serves: {', '.join(names) or 'nothing'})"


class ChatSession:
    """A conversation in the terminal: stores the messages, sends them and prints the answers."""

    def __init__(
        self,
        client: ServerClient,
        model: str,
        console: Console,
        *,
        interactive: bool,
        keyboard: PromptSession[str] | None = None,
        system: str = "",
        options: dict[str, Any] | None = None,
    ) -> None:
        """keyboard: if given, its Ctrl-C stops an answer. options: additional fields of each
        request.
        """
        self._client = client
        self._model = model
        self._console = console
        self._interactive = interactive
        self._keyboard = keyboard
        self._system = system
        self._options = options or {}
        self._messages: list[dict[str, Any]] = []  # the conversation, as sent
        self._answers: list[Answer] = []  # all answers of the session
        self._attached_images: list[dict[str, Any]] = []  # images for the next message
        self._last_shown_kind = ""  # kind of the last piece that was shown of the current answer

    def run(self, lines: Iterable[str]) -> int:
        """Answer one line after the other, until there are no more lines or one says /exit.

        Returns the exit code: 1 if an answer failed in a pipe, otherwise 0.
        """
        if self._interactive:
            self._say(f"{self._model} · /help lists the commands")
            if sampling := self.sampling():
                self._say(sampling)
        failed = False
        for line in lines:
            # leading spaces are kept, because they may matter, for example in pasted code
            text = line.strip("\r\n")
            first_word = next(iter(text.split()), "")
            if not first_word:
                continue
            if first_word in _LEAVE_WORDS or (
                self._interactive and text.strip() in ("exit", "quit")
            ):
                break
            if first_word in _COMMANDS or (
                _COMMAND_WORD.fullmatch(first_word) and "\n" not in text
            ):
                self._run_command(text.strip())
            else:
                message = text.removeprefix("/") if text.startswith("//") else text
                if self._interactive:
                    message = self._attach_named_images(message)
                failed |= not self.send_message(message)
        return 1 if failed and not self._interactive else 0

    def attach(self, path: Path, part: dict[str, Any]) -> None:
        """Send an image with the next message. part: see `image_part`."""
        self._attached_images.append(part)
        if self._interactive:
            self._say(f"(attached {path.name})")

    def _attach_named_images(self, text: str) -> str:
        """Attach the image files whose paths are in a message. Returns the rest of the message."""
        images_taken = take_images(text)
        self._attach_files(images_taken.images)
        return images_taken.text

    def _attach_files(self, paths: Iterable[Path]) -> None:
        """Attach image files; if one cannot be read, say so and skip the rest."""
        try:
            for path in paths:
                self.attach(path, image_part(path))
        except ImageUnreadable as error:
            self._say(str(error))

    def send_message(self, text: str) -> bool:
        """Send a message and print the answer as it arrives.

        Returns False if the answer failed. An answer that was stopped has not failed.
        """
        images, self._attached_images = self._attached_images, []
        content: Any = text
        if images:
            content = [*images, *([{"type": "text", "text": text}] if text else [])]
        self._messages.append({"role": "user", "content": content})
        system = [{"role": "system", "content": self._system}] if self._system else []
        body = {"model": self._model, "messages": system + self._messages, **self._options}
        answer = Answer()
        self._last_shown_kind = ""
        try:
            was_stopped = asyncio.run(self._stream(body, answer))
        except ServerFailed as error:
            self._messages.pop()
            if self._last_shown_kind:
                self._console.print()
            complain(str(error))
            return False
        if self._last_shown_kind or not self._interactive:
            self._console.print()
        self._add_answer(answer, was_stopped=was_stopped)
        return True

    async def _stream(self, body: dict[str, Any], answer: Answer) -> bool:
        """Show an answer as it arrives. Returns whether Ctrl-C stopped it."""
        try:
            with _ctrl_c_cancels(self._keyboard):
                async for piece in answer_pieces(self._client, body, answer):
                    self._show(piece)
        except asyncio.CancelledError:
            if not self._interactive:
                raise
            return True
        return False

    def _show(self, piece: AnswerPiece) -> None:
        """Print a piece of an answer. Reasoning and tool calls are dimmed.

        If the output is a pipe, reasoning is not printed, and text is printed exactly as generated.
        """
        kind, text = piece
        is_for_person = self._interactive or self._console.is_terminal
        if kind == "reasoning" and not is_for_person:
            return
        if is_for_person or kind == "call":
            text = _printable(text)
        if self._last_shown_kind and (kind != self._last_shown_kind or kind == "call"):
            self._console.file.write("\n")
        self._last_shown_kind = kind
        if kind == "call":
            text = " ".join(text.split())
        if kind == "text":
            self._console.file.write(text)  # rich would change tabs and emoji codes
        else:
            self._console.print(text, style="dim", emoji=False, end="")
        self._console.file.flush()

    def _add_answer(self, answer: Answer, *, was_stopped: bool) -> None:
        """Add an answer to the conversation. If it is empty, remove its question instead."""
        if was_stopped:
            answer.calls.clear()  # the arguments of the last call may be cut off
        if answer.is_empty:
            # many chat templates allow no second question if the first one has no answer
            self._messages.pop()
        else:
            self._messages.append(answer.message())
            self._answers.append(answer)
        if was_stopped and answer.is_empty:
            self._say("(stopped before the answer began; your message is dropped)")
        elif was_stopped:
            self._say("(stopped)")
        elif answer.finish_reason == "length":
            self._say(
                f"(cut off after {count_text(answer.completion_tokens, 'token')}; "
                "--max-tokens sets the limit)"
            )
        elif answer.is_empty and self._interactive:
            self._say("(the answer is empty; your message is dropped)")

    def _run_command(self, text: str) -> None:
        """Carry out a command, which begins with a slash."""
        command, *arguments = text.split(maxsplit=1)
        argument = "".join(arguments)
        match command:
            case "/reset":
                self._reset()
            case "/system" if argument:
                self._system = "" if argument == "none" else argument
                self._reset()
            case "/system":
                self._say(self._system or "(no system prompt)")
            case "/image" if argument:
                self._attach_files([typed_path(argument)])
            case "/image":
                self._say("which image? /image PATH")
            case "/stats":
                self._say(self._statistics())
            case "/help":
                self._say(HELP)
            case _:
                similar_commands = difflib.get_close_matches(command, _COMMANDS, n=1)
                hint = f" did you mean {similar_commands[0]}?" if similar_commands else ""
                self._say(f"there is no command {command};{hint} /help lists the commands")

    def _reset(self) -> None:
        """Start a new conversation; the system prompt stays."""
        self._messages.clear()
        self._attached_images.clear()
        self._answers.clear()
        self._say("(a new conversation)")

    def sampling(self) -> str:
        """The sampling parameters and where they come from; empty if unknown."""
        default_values: dict[str, float] = {}
        with contextlib.suppress(NotServed):  # the model was removed
            default_values = self._client.model(self._model).get("default_sampling") or {}
        chosen_values = {
            name: value for name, value in self._options.items() if name == "temperature"
        }
        used_values = chosen_values or default_values
        values_text = ", ".join(f"{name} {value:g}" for name, value in used_values.items())
        if not used_values:
            return ""
        source = "as the model recommends"
        if chosen_values:
            source = "as you asked"
        elif default_values == DEFAULT_SAMPLING:
            source = "Holdfast's defaults, because the model recommends none"
        return f"sampling: {values_text} ({source})"

    def _statistics(self) -> str:
        """Tokens and times of the last answer and of the conversation, in words."""
        if not self._answers:
            return "no answer yet"
        last = self._answers[-1]
        about = "" if last.has_exact_counts else "about "
        cached_note = (
            f" ({last.cached_tokens} of them kept from before)" if last.cached_tokens else ""
        )
        speed_note = (
            f", then {last.tokens_per_second:.1f} tokens/s" if last.tokens_per_second else ""
        )
        total_tokens = sum(answer.completion_tokens for answer in self._answers)
        return (
            f"last answer: {count_text(last.prompt_tokens, 'prompt token')}{cached_note}, "
            f"{about}{count_text(last.completion_tokens, 'answer token')}\n"
            f"first token after {last.first_token_seconds:.2f} s{speed_note}\n"
            f"conversation: {count_text(len(self._answers), 'answer')}, "
            f"{count_text(total_tokens, 'answer token')}\n"
            f"{self.sampling()}"
        ).rstrip()

    def _say(self, text: str) -> None:
        """Print a message of this program, dimmed to distinguish it from the model's text."""
        self._console.print(text, style="dim")


@dataclass(slots=True, kw_only=True)
class Answer:
    """One answer: its parts so far, its token counts, and its times as measured by this client."""

    text: str = ""
    reasoning: str = ""
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)  # by index
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    has_exact_counts: bool = False  # sent by the server; if False, pieces of text are counted
    first_token_seconds: float = 0.0  # from the request to the first text
    total_seconds: float = 0.0  # from the request to the end
    finish_reason: str = ""  # empty: not ended

    @property
    def is_empty(self) -> bool:
        """Whether the answer has neither text nor tool calls.

        Reasoning alone does not count as an answer.
        """
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
    """Stream one answer through OpenAI's API, and fill in `answer` at the same time.

    To stop the answer, cancel the task that iterates. Raises ServerFailed.
    """
    began = time.monotonic()
    options = {"include_usage": True}
    if server.is_holdfast:  # other servers may reject this field
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
    """Add a chunk of the stream to the answer, and yield the new pieces to show."""
    if usage := chunk.get("usage"):
        answer.has_exact_counts = True
        answer.prompt_tokens = usage.get("prompt_tokens", 0)
        answer.completion_tokens = usage.get("completion_tokens", 0)
        details = usage.get("prompt_tokens_details") or {}
        answer.cached_tokens = details.get("cached_tokens", answer.cached_tokens)
    for choice in chunk.get("choices", ()):
        delta = choice.get("delta") or {}
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        text = delta.get("content")
        if not answer.has_exact_counts and (reasoning or text):
            answer.completion_tokens += 1
        if reasoning:
            answer.reasoning += reasoning
            yield AnswerPiece("reasoning", reasoning)
        if text:
            answer.text += text
            yield AnswerPiece("text", text)
        for call_delta in delta.get("tool_calls") or ():
            _extend_calls(answer.calls, call_delta)
        if reason := choice.get("finish_reason"):
            answer.finish_reason = reason
            for call in answer.calls.values():
                function = call["function"]
                yield AnswerPiece("call", f"→ {function['name']} {function['arguments']}")


def _extend_calls(calls: dict[int, dict[str, Any]], call_delta: dict[str, Any]) -> None:
    """Add the delta of a tool call to the call with the same index."""
    function = {"name": "", "arguments": ""}
    new_call = {"id": call_delta.get("id", ""), "type": "function", "function": function}
    call = calls.setdefault(call_delta.get("index", 0), new_call)
    function_delta = call_delta.get("function") or {}
    call["function"]["name"] = call["function"]["name"] or function_delta.get("name") or ""
    call["function"]["arguments"] += function_delta.get("arguments") or ""


def _printable(text: str) -> str:
    """Remove control characters from a text: a model must not recolour or clear the terminal."""
    return "".join(
        character
        for character in text
        if character in "\n\t" or unicodedata.category(character) != "Cc"
    )


@contextlib.contextmanager
def _keyboard() -> Iterator[PromptSession[str]]:
    """Yield the terminal's keyboard. Keys pressed during an answer are kept for the next prompt."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output

    keys = KeyBindings()
    keys.add("enter")(_enter)
    keys.add("escape", "enter")(lambda event: event.current_buffer.newline(copy_margin=False))
    # suppresses a warning about terminals that do not report their cursor position
    os.environ.setdefault("PROMPT_TOOLKIT_NO_CPR", "1")
    keyboard: PromptSession[str] = PromptSession(
        multiline=True,
        enable_suspend=True,
        key_bindings=keys,
        prompt_continuation="… ",
        output=create_output(always_prefer_tty=True),
    )
    try:
        with keyboard.input.raw_mode():  # raw mode also applies between two prompts
            yield keyboard
    finally:
        keyboard.output.disable_bracketed_paste()
        keyboard.output.flush()


def _enter(event: KeyPressEvent) -> None:
    """Send the message. After a backslash, start a new line instead."""
    buffer = event.current_buffer
    document = buffer.document
    if document.text_before_cursor.endswith("\\") and not document.text_after_cursor:
        buffer.delete_before_cursor()
        buffer.newline(copy_margin=False)
    else:
        buffer.validate_and_handle()


def _typed_messages(keyboard: PromptSession[str]) -> Iterator[str]:
    """Yield the messages that a person types.

    Ends after Ctrl-D at an empty prompt, or after a second Ctrl-C.
    """
    about_to_leave = False
    while True:
        try:
            message = keyboard.prompt([("fg:ansigreen bold", "> ")])
        except EOFError:
            return
        except KeyboardInterrupt:
            if about_to_leave:
                return
            # otherwise Ctrl-C has discarded a line
            about_to_leave = not keyboard.default_buffer.text
            if about_to_leave:
                typer.echo(LEAVE_HINT)
            continue
        about_to_leave = False
        keyboard.output.enable_bracketed_paste()  # prompt_toolkit switches it off after each prompt
        keyboard.output.flush()
        yield message


@contextlib.contextmanager
def _ctrl_c_cancels(keyboard: PromptSession[str] | None) -> Iterator[None]:
    """Let Ctrl-C cancel the current task. All other keys are kept for the next prompt."""
    if keyboard is None:
        yield
        return
    from prompt_toolkit.input.typeahead import store_typeahead
    from prompt_toolkit.keys import Keys

    task = asyncio.current_task()
    assert task is not None

    def read_keys() -> None:
        pressed = keyboard.input.read_keys()
        typed = [press for press in pressed if press.key != Keys.ControlC]
        store_typeahead(keyboard.input, typed)
        if len(typed) < len(pressed) and not task.cancelling():
            task.cancel()

    with keyboard.input.attach(read_keys):
        yield


@contextlib.contextmanager
def own_server(
    effective: EffectiveSettings, *, on_state: Callable[[str], None]
) -> Iterator[ServerClient]:
    """Run a server with these settings on a free loopback port, with its own API key.

    on_state: called with the server's state until the server is ready. Raises ServerFailed if the
    server exits before that.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    key = secrets.token_urlsafe(24)
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")
    }
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            _server_command(effective, port),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**environ, "HOLDFAST_SERVER_API_KEY": key},
            start_new_session=True,  # so that Ctrl-C stops the answer, not the server
        )
        client = ServerClient(url=f"http://127.0.0.1:{port}", api_key=key)
        try:
            limit_seconds = effective.settings.model.startup_seconds
            _wait_until_ready(client, server, log, limit_seconds=limit_seconds, on_state=on_state)
            yield client
        finally:
            client.close()
            _stop_server(server)


def _server_command(effective: EffectiveSettings, port: int) -> list[str]:
    """The command that starts the server with exactly these settings.

    The server reads no settings file and no environment variables.
    """
    command = [sys.executable, "-P", "-m", "holdfast.cli.main", "serve"]
    command += ["--config", os.devnull, "--until-stdin-closes"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    level = effective.settings.log.level
    if effective.origins["log.level"] == "default":
        level = "error"
    command += ["--log-level", level]
    if effective.origins["log.file"] == "default":
        command += ["--log-file", "off"]  # the log goes to the temporary file
    if effective.origins["store.folder"] == "default":
        # cached blocks belong to an API key, and nobody will use this server's key again
        command += ["--set", "store.folder=off"]
    for key, origin in effective.origins.items():
        if origin != "default" and key not in _SET_BY_OWN_SERVER:
            command += ["--set", f"{key}={shown_value(effective.settings, key)}"]
    return command


def _wait_until_ready(
    client: ServerClient,
    server: subprocess.Popen[bytes],
    log: IO[bytes],
    *,
    limit_seconds: float,
    on_state: Callable[[str], None],
) -> None:
    """Poll the new server until its model is loaded. Raises ServerFailed if it exits or takes too
    long.
    """
    deadline = time.monotonic() + limit_seconds
    while server.poll() is None:
        if time.monotonic() > deadline:
            raise ServerFailed(
                f"the model was not ready after {limit_seconds:.0f} s; for a slow model, raise "
                "model.startup_seconds"
            )
        with contextlib.suppress(ServerFailed):  # the server does not listen yet
            health = client.health()
            if health.get("status") == "ok":
                return
            states = [str(model.get("state")) for model in health.get("models", ())]
            on_state(", ".join(states) or "starting")
        time.sleep(_POLL_SECONDS)
    raise ServerFailed(_last_error(log) or f"the server ended with code {server.returncode}")


def _last_error(log: IO[bytes]) -> str:
    """The error line of a server that has exited; if there is none, the server's last line."""
    log.seek(0)
    last_line = ""
    last_error = ""
    for line in log.read().decode(errors="replace").splitlines():
        last_line = line.strip() or last_line
        if line.startswith("holdfast: "):
            last_error = line.removeprefix("holdfast: ")
        # for log.format json
        last_error = json_object(line).get("message") or last_error
    return last_error or last_line


def _stop_server(server: subprocess.Popen[bytes]) -> None:
    """Stop a server that this process started, and wait for its exit."""
    server.terminate()
    try:
        server.wait(_SHUTDOWN_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    if server.stdin is not None:
        server.stdin.close()
