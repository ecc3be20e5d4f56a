"""`holdfast chat` as a process: through a pipe, and on a terminal with Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from holdfast.cli.chat import Answer, answer_pieces, own_server
from holdfast.cli.server_client import ServerClient, ServerFailed
from holdfast.config import EffectiveSettings, load_settings
from holdfast.files import CLAIM_PREFIX, claim
from holdfast.front.run.running_servers import RunningServer, write_server
from holdfast.models.download import DEMO_ID
from tests.fakes.command_line import holdfast, holdfast_here, only_line
from tests.fakes.echo_server import EchoServer, running_server
from tests.fakes.server_process import ServerProcess, until
from tests.fakes.tiny_models import write_tiny
from tools.terminal import ALT_ENTER, CTRL_C, CTRL_D, ENTER, Terminal

MESSAGES = [{"role": "user", "content": "hello"}]


def test_a_pipe_is_answered_line_by_line(echo: EchoServer, tmp_path: Path) -> None:
    done = holdfast(
        "chat",
        "--url",
        echo.url,
        "--system",
        "Be brief.",
        "--api-key",
        "k",
        cwd=tmp_path,
        stdin="one\ntwo\n",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "you said: one\nyou said: two\n", "")
    assert echo.requests[1]["model"] == "echo"
    assert echo.requests[1]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert echo.keys == ["Bearer k"]


def test_the_model_of_a_running_server_can_be_chosen(echo: EchoServer, tmp_path: Path) -> None:
    holdfast_here("chat", "other", "--url", echo.url, cwd=tmp_path, stdin="one\n")
    done = holdfast_here("chat", "third", "--url", echo.url, cwd=tmp_path, stdin="one\n")
    assert [request["model"] for request in echo.requests] == ["other"]
    assert done.returncode == 2
    assert (
        only_line(done.stderr)
        == f"holdfast: {echo.url} does not serve third; it serves: echo, other"
    )


def test_a_failed_answer_in_a_pipe_exits_with_code_1(echo: EchoServer, tmp_path: Path) -> None:
    echo.behaviour = "refuse"
    done = holdfast_here("chat", "--url", echo.url, cwd=tmp_path, stdin="one\n")
    assert (done.returncode, done.stderr) == (1, "holdfast: the prompt is too long\n")


def test_one_question_gets_one_answer(echo: EchoServer, tmp_path: Path) -> None:
    done = holdfast_here(
        "chat", "--url", echo.url, "-p", "one\ntwo", cwd=tmp_path, stdin="not read\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "you said: one\ntwo\n", "")
    assert len(echo.requests) == 1
    echo.behaviour = "refuse"
    assert holdfast_here("chat", "--url", echo.url, "-p", "one", cwd=tmp_path).returncode == 1


def test_all_of_the_standard_input_is_one_question(echo: EchoServer, tmp_path: Path) -> None:
    done = holdfast_here("chat", "--url", echo.url, "-p", "-", cwd=tmp_path, stdin="one\n\ntwo\n")
    assert done.returncode == 0
    assert said(echo) == ["one\n\ntwo\n"]


@pytest.mark.parametrize(
    ("prompt", "piped", "asked"),
    [
        (["Say", "hello."], "", "Say hello."),
        ([], "A note.\nAnother.\n", "A note.\nAnother."),
        (["Sum it up."], "A note.\nAnother.\n", "A note.\nAnother.\n\nSum it up."),
    ],
)
def test_run_asks_what_is_piped_and_then_the_prompt(
    echo: EchoServer, prompt: list[str], piped: str, asked: str, tmp_path: Path
) -> None:
    done = holdfast_here("run", "--url", echo.url, "other", *prompt, cwd=tmp_path, stdin=piped)
    assert done.returncode == 0, done.stderr
    assert echo.requests[-1]["model"] == "other"
    assert said(echo) == [asked]


def test_run_without_a_question_shows_how_to_ask(tmp_path: Path) -> None:
    done = holdfast_here("run", "some-model", cwd=tmp_path)
    assert done.returncode == 2
    assert 'holdfast run some-model "Why' in only_line(done.stderr)


@pytest.mark.parametrize("temperature", ["-0.1", "2.1", "hot"])
def test_an_invalid_temperature_is_refused_before_a_server_starts(
    temperature: str, tmp_path: Path
) -> None:
    done = holdfast_here("run", DEMO_ID, "Hello!", "--temperature", temperature, cwd=tmp_path)
    assert done.returncode == 2
    assert "Invalid value for '--temperature'" in done.stderr


@pytest.mark.parametrize("command", ["chat", "run"])
@pytest.mark.parametrize("stdin", ["x", ""])
def test_a_question_in_place_of_the_model_gets_a_hint(
    command: str, stdin: str, tmp_path: Path
) -> None:
    done = holdfast_here(command, "When does it leave?", cwd=tmp_path, stdin=stdin)
    assert done.returncode == 2
    assert (
        '"When does it leave?" is not a model. To ask one question: holdfast chat -p'
        in only_line(done.stderr)
    )


def test_a_running_server_is_used_only_for_a_model_it_serves(
    echo: EchoServer,
    tmp_path: Path,
) -> None:
    with announced(echo, tmp_path / "cache" / "holdfast" / "run"):
        place = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        done = holdfast_here("chat", "other", cwd=tmp_path, stdin="one\n", variables=place)
        assert (done.returncode, done.stdout) == (0, "you said: one\n")
        assert len(echo.requests) == 1
        # any other model gets a new echo, which reports errors; a mistyped name of a served model
        # is likelier than a folder
        done = holdfast_here("chat", "none", cwd=tmp_path, stdin="one\n", variables=place)
        assert done.returncode == 2
        line = only_line(done.stderr)
        assert "there is no model folder none" in line
        assert line.endswith(f" (your server at {echo.url} serves: echo, other)")
        assert len(echo.requests) == 1


@contextmanager
def announced(server: EchoServer, run_folder: Path) -> Iterator[None]:
    """Write the description that a running server of this user has."""
    run_folder.mkdir(parents=True)
    claimed = claim(run_folder, prefix=CLAIM_PREFIX)
    described = RunningServer(
        pid=os.getpid(),
        url=server.url,
        port=server.server_address[1],
        started_at=0.0,
        version="0",
        store_folder="",
        log_file="",
        certificate="",
    )
    write_server(described, claimed.folder)
    yield
    claimed.give_back()


@pytest.mark.slow
def test_a_running_server_with_the_model_is_used(tmp_path: Path) -> None:
    server = ServerProcess(DEMO_ID, "--store", "off")
    try:
        server.wait_ready()
        done = holdfast("chat", DEMO_ID, "-p", "Hello!", "--temperature", "0", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        until(
            lambda: server.log().count("POST /v1/chat/completions 200") == 1, "its line in the log"
        )
        done = holdfast(
            "chat", DEMO_ID, "--own-server", "-p", "Hello!", "--temperature", "0", cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        assert server.log().count("POST /v1/chat/completions") == 1
    finally:
        server.stop()


@contextmanager
def chat_with(server: EchoServer, folder: Path, **size: int) -> Iterator[Terminal]:
    """A chat with this server on a terminal, at its first prompt."""
    command = [sys.executable, "-m", "holdfast.cli.main", "chat", "--url", server.url]
    with Terminal(command, cwd=folder, **size) as terminal:
        terminal.wait_for("^>$")
        yield terminal


class SharedChat:
    """A terminal chat shared by successive tests; a new one replaces a chat that a test has ended."""

    def __init__(self, server: EchoServer, folder: Path, stack: ExitStack) -> None:
        self.server, self._folder, self._stack = server, folder, stack
        self._terminal: Terminal | None = None

    def terminal(self) -> Terminal:
        if self._terminal is None or self._terminal.process.poll() is not None:
            self._terminal = self._stack.enter_context(chat_with(self.server, self._folder))
        return self._terminal


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedChat]:
    with running_server() as server, ExitStack() as stack:
        yield SharedChat(server, tmp_path_factory.mktemp("chat"), stack)


@pytest.fixture
def server(shared: SharedChat) -> EchoServer:
    return shared.server


@pytest.fixture
def terminal(server: EchoServer, shared: SharedChat) -> Terminal:
    """The shared chat at the prompt of a new conversation, with a blank screen."""
    terminal = shared.terminal()
    server.behaviour = "answer"
    terminal.type("/reset" + ENTER)
    terminal.wait_for(r"\(a new conversation\)\n>$")
    terminal.screen.reset()
    terminal.type(ENTER)
    terminal.wait_for("^>$")
    terminal.wait_until(lambda: terminal.marks_pastes)
    server.requests.clear()
    server.client_left.clear()
    return terminal


def said(server: EchoServer) -> list[str]:
    """The user's messages in the last request."""
    return [
        message["content"]
        for message in server.requests[-1]["messages"]
        if message["role"] == "user"
    ]


POEM = "The ferry leaves at noon.\n\n    The shed is locked.\nWhat is the code?"


def test_a_paste_of_several_lines_is_one_message(server: EchoServer, terminal: Terminal) -> None:
    terminal.paste(POEM)
    terminal.wait_for("What is the code")
    assert server.requests == []
    terminal.type(" Please." + ENTER)
    terminal.wait_for(r"you said: The ferry")
    terminal.wait_for(r"^>$")
    assert said(server) == [POEM + " Please."]


def test_alt_enter_or_a_backslash_starts_a_new_line(server: EchoServer, terminal: Terminal) -> None:
    terminal.type("one" + ALT_ENTER + "two\\" + ENTER + "thr\\ee" + ENTER)
    terminal.wait_for("you said: one")
    assert said(server) == ["one\ntwo\nthr\\ee"]


def test_a_message_may_exceed_a_terminals_line_buffer(
    server: EchoServer, terminal: Terminal
) -> None:
    long = "word " * 4000 + "end"
    terminal.paste(long)
    terminal.type(ENTER)
    terminal.wait_for("you said: word")
    assert said(server) == [long]


def test_input_during_an_answer_appears_at_the_next_prompt(
    server: EchoServer, terminal: Terminal
) -> None:
    server.behaviour = "wait"
    terminal.type("one" + ENTER)
    terminal.wait_for("^you$")
    terminal.type("between ")
    terminal.paste("two\nlines")
    terminal.read_for(0.2)
    assert "between" not in terminal.text
    server.behaviour = "answer"
    terminal.type(CTRL_C)
    terminal.wait_for(r"\(stopped\)")
    terminal.wait_for("^> between two")
    terminal.type(ENTER)
    terminal.wait_for("you said: between")
    assert said(server) == ["one", "between two\nlines"]


def test_repeated_ctrl_c_only_stops_the_answer(server: EchoServer, terminal: Terminal) -> None:
    server.behaviour = "wait"
    terminal.type("one" + ENTER)
    terminal.wait_for("^you$")
    terminal.type(CTRL_C + CTRL_C)
    terminal.wait_for(r"\(stopped\)\n(.*\n)*>$")
    assert server.client_left.wait(60)
    server.behaviour = "answer"
    terminal.type("two" + ENTER)
    terminal.wait_for("you said: two")
    assert [message["content"] for message in server.requests[1]["messages"]] == [
        "one",
        "you",
        "two",
    ]
    assert "Traceback" not in terminal.text


def test_ctrl_c_right_after_enter_never_leaves(server: EchoServer, terminal: Terminal) -> None:
    for number in range(5):
        terminal.type(f"message {number}" + ENTER + CTRL_C)
        terminal.wait_for(rf"message {number}\n(.*\n)*>$")
    terminal.type("still here" + ENTER)
    terminal.wait_for("you said: still here")
    assert "Traceback" not in terminal.text


def test_an_interrupt_from_outside_stops_the_answer(server: EchoServer, terminal: Terminal) -> None:
    server.behaviour = "wait"
    terminal.type("one" + ENTER)
    terminal.wait_for("^you$")
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for(r"\(stopped\)\n(.*\n)*>$")
    assert server.client_left.wait(60)


def test_after_ctrl_c_the_prompts_tokens_are_known(server: EchoServer, terminal: Terminal) -> None:
    server.behaviour = "wait"
    terminal.type("one" + ENTER)
    terminal.wait_for("^you$")
    terminal.type(CTRL_C)
    terminal.wait_for(r"\(stopped\)")
    terminal.type("/stats" + ENTER)
    shown = terminal.wait_for(r"first token after")
    assert "last answer: 11 prompt tokens, 1 answer token\n" in shown


def test_an_answer_stopped_before_it_began_drops_its_question(
    server: EchoServer, terminal: Terminal
) -> None:
    server.behaviour = "think"
    terminal.type("one" + ENTER)
    until(lambda: bool(server.requests), "the request")
    terminal.type(CTRL_C)
    terminal.wait_for("stopped before the answer began")
    terminal.type("/stats" + ENTER)
    terminal.wait_for("no answer yet")
    server.behaviour = "answer"
    terminal.type("two" + ENTER)
    terminal.wait_for("you said: two")
    assert said(server) == ["two"]


def test_ctrl_c_discards_a_line_and_twice_leaves(server: EchoServer, terminal: Terminal) -> None:
    terminal.type("a mistake")
    terminal.wait_for("> a mistake")
    terminal.type(CTRL_C)
    terminal.wait_for(r"^>$")
    assert "press Ctrl-C again" not in terminal.text
    terminal.type(CTRL_C)
    terminal.wait_for("press Ctrl-C again to leave")
    terminal.type(ENTER + "   " + ENTER + "still here" + ENTER)
    terminal.wait_for(r"^you said: still here\n>$")
    assert said(server) == ["still here"]
    terminal.type(CTRL_C)
    terminal.wait_for(r"(?s)leave too\).*leave too\)")
    terminal.type(CTRL_C)
    assert terminal.wait(60) == 0
    assert "Traceback" not in terminal.text


def test_ctrl_d_leaves_and_restores_the_terminal(terminal: Terminal) -> None:
    assert terminal.marks_pastes
    terminal.type(CTRL_D)
    assert terminal.wait(60) == 0
    assert not terminal.marks_pastes
    assert terminal.echoes


def test_a_mistyped_command_sends_nothing(server: EchoServer, terminal: Terminal) -> None:
    terminal.type("/stat" + ENTER)
    terminal.wait_for("there is no command /stat; did you mean /stats")
    assert server.requests == []


def settings(model: Path, **further: object) -> EffectiveSettings:
    return load_settings(
        file=None, environ={}, flags={"model.path": str(model), "log.level": "warning", **further}
    )


async def read(client: ServerClient, body: dict[str, object], answer: Answer) -> None:
    async for _ in answer_pieces(client, body, answer):
        pass


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_chat_serves_with_its_settings_and_ends_its_server(tmp_path: Path) -> None:
    write_tiny(tmp_path / "model", "qwen3")
    before, told = children(), list[str]()
    with own_server(
        settings(tmp_path / "model", **{"model.name": "my model"}), on_state=told.append
    ) as client:
        assert client.model_ids() == ("my model",)
        answer = Answer()
        body = {"model": "my model", "messages": MESSAGES, "max_tokens": 3, "temperature": 0}
        asyncio.run(read(client, body, answer))
        assert answer.completion_tokens == 3
        started = children() - before
        assert len(started) >= 2  # the server and its worker
        with pytest.raises(
            ServerFailed, match="needs an API key"
        ):  # other users of the machine cannot reach it
            ServerClient(url=client.url).model_ids()
    assert not any(psutil.pid_exists(pid) for pid in started)


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_model_that_cannot_be_loaded_is_one_clear_line(tmp_path: Path, log_format: str) -> None:
    before, wished = children(), settings(tmp_path / "none", **{"log.format": log_format})
    with (
        pytest.raises(ServerFailed, match=r"^there is no model folder"),
        own_server(wished, on_state=print),
    ):
        pass
    assert children() == before
