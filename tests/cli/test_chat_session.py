"""A conversation: messages, commands, statistics, errors."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator

import pytest
from rich.console import Console

from holdfast.cli.chat import Answer, AnswerPiece, ChatSession, answer_pieces
from holdfast.cli.server_client import ServerClient, ServerFailed
from tests.fakes.conversing import converse
from tests.fakes.echo_server import EchoServer, running_server

HELLO = {"model": "echo", "messages": [{"role": "user", "content": "hello wörld"}]}


@pytest.fixture
def server() -> Iterator[EchoServer]:
    with running_server() as running:
        yield running


def contents(server: EchoServer, request: int) -> list[tuple[str, str]]:
    return [
        (message["role"], message["content"]) for message in server.requests[request]["messages"]
    ]


def test_each_line_is_answered_as_the_next_turn(server: EchoServer) -> None:
    assert converse(server, "one", "", "two") == (0, "you said: one\nyou said: two\n")
    assert contents(server, 1) == [("user", "one"), ("assistant", "you said: one"), ("user", "two")]


def test_reset_forgets_the_conversation_and_keeps_the_system_prompt(server: EchoServer) -> None:
    converse(server, "one", "/reset", "two", system="Be brief.")
    assert contents(server, 1) == [("system", "Be brief."), ("user", "two")]


def test_system_sets_shows_and_removes_the_system_prompt(server: EchoServer) -> None:
    _, output = converse(
        server, "/system", "/system Be brief.", "/system", "one", "/system none", "two"
    )
    assert "(no system prompt)" in output
    assert "Be brief." in output
    assert contents(server, 0) == [("system", "Be brief."), ("user", "one")]
    assert contents(server, 1) == [("user", "two")]


def test_stats_show_tokens_and_times(server: EchoServer) -> None:
    _, output = converse(server, "/stats", "one", "one two", "/stats")
    assert "no answer yet" in output
    assert (
        "last answer: 11 prompt tokens (4 of them kept from before), 4 answer tokens\nfirst token "
        "after " in output
    )
    assert "conversation: 2 answers, 7 answer tokens" in output


def test_exit_ends_the_conversation(server: EchoServer) -> None:
    assert converse(server, "/exit", "one") == (0, "")
    assert server.requests == []


def test_help_and_unknown_commands_send_nothing(server: EchoServer) -> None:
    _, output = converse(server, "/help", "/rest")
    assert "/reset" in output
    assert "there is no command /rest; did you mean /reset? /help lists the commands" in output
    assert server.requests == []


@pytest.mark.parametrize(
    "message", ["/usr/bin/env is a path", "/one\n/two", "  indented\n    code"]
)
def test_text_that_only_starts_like_a_command_is_a_message(
    server: EchoServer, message: str
) -> None:
    converse(server, message)
    assert contents(server, 0) == [("user", message)]


def test_a_system_prompt_may_have_several_lines(server: EchoServer) -> None:
    converse(server, "/system Be brief.\nBe kind.", "one")
    assert contents(server, 0)[0] == ("system", "Be brief.\nBe kind.")


@pytest.mark.parametrize("line", ["exit", "quit", "/bye", "/q", "/exit now"])
def test_a_person_leaves_by_any_usual_word(server: EchoServer, line: str) -> None:
    converse(server, line, "one", interactive=True)
    assert server.requests == []


def test_a_pipe_may_say_exit(server: EchoServer) -> None:
    assert converse(server, "exit", "one")[1] == "you said: exit\nyou said: one\n"


def test_two_slashes_begin_a_message_with_one(server: EchoServer) -> None:
    converse(server, "//reset")
    assert contents(server, 0) == [("user", "/reset")]


def test_only_given_options_are_sent_and_cut_answers_are_marked(server: EchoServer) -> None:
    _, output = converse(server, "one", temperature=0.0, max_tokens=3)
    assert (server.requests[0]["temperature"], server.requests[0]["max_tokens"]) == (0.0, 3)
    assert "(cut off after 3 tokens; --max-tokens sets the limit)" in output
    converse(server, "one")
    assert "temperature" not in server.requests[1]


def test_text_of_the_model_is_never_taken_for_markup(server: EchoServer) -> None:
    assert converse(server, "[bold]x[/bold] :smile:")[1] == "you said: [bold]x[/bold] :smile:\n"


def test_control_characters_reach_a_pipe_but_no_terminal(server: EchoServer) -> None:
    assert "you said: a[31m\tb\n" in converse(server, "a\x1b[31m\tb\x07", interactive=True)[1]
    assert converse(server, "a\x1b[31m\tb")[1] == "you said: a\x1b[31m\tb\n"


def test_a_failed_answer_is_dropped_and_fails_a_pipe(
    server: EchoServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.behaviour = "refuse"
    assert converse(server, "one")[0] == 1
    assert capsys.readouterr().err == "holdfast: the prompt is too long\n"
    assert converse(server, "one", interactive=True)[0] == 0
    assert contents(server, -1) == [("user", "one")]


def test_after_a_failed_answer_its_question_is_not_sent_again(server: EchoServer) -> None:
    def lines() -> Iterator[str]:
        server.behaviour = "fail"
        yield "one"
        server.behaviour = "answer"
        yield "two"

    output = io.StringIO()
    ChatSession(ServerClient(url=server.url), "echo", Console(file=output), interactive=True).run(
        lines()
    )
    assert contents(server, 1) == [("user", "two")]


def test_a_pipe_gets_no_reasoning_and_one_line_per_call(
    server: EchoServer,
) -> None:
    server.behaviour = "call"
    assert converse(server, "one") == (0, 'I look.\n→ look_up {"word": "ferry"}\n→ add {"a": 1}\n')


def test_a_terminal_shows_reasoning_dimmed_and_without_control_characters(
    server: EchoServer,
) -> None:
    server.behaviour = "call"
    _, output = converse(server, "one", interactive=True, terminal=True)
    shown = output.partition("lists the commands")[2].removeprefix("\x1b[0m\n")
    assert shown == (
        "\x1b[2mLet me \x1b[0m\x1b[2msee[31m.\x1b[0m\nI look.\n"
        '\x1b[2m→ look_up {"word": "ferry"}\x1b[0m\n\x1b[2m→ add {"a": 1}\x1b[0m\n'
    )


def test_reasoning_and_calls_go_into_the_conversation(server: EchoServer) -> None:
    server.behaviour = "call"
    converse(server, "one", "two")
    message = server.requests[1]["messages"][1]
    assert (message["content"], message["reasoning_content"]) == ("I look.", "Let me see\x1b[31m.")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["look_up", "add"]


async def all_pieces(client: ServerClient, answer: Answer | None = None) -> list[AnswerPiece]:
    return [piece async for piece in answer_pieces(client, HELLO, answer or Answer())]


async def one_piece(client: ServerClient, answer: Answer) -> AnswerPiece:
    """Read only the first piece, then leave the answer."""
    async with contextlib.aclosing(answer_pieces(client, HELLO, answer)) as pieces:
        return await anext(pieces)


async def test_an_answer_is_streamed_with_its_counts(echo: EchoServer) -> None:
    client, answer = ServerClient(url=echo.url), Answer()
    pieces = await all_pieces(client, answer)
    assert pieces == [AnswerPiece("text", text) for text in ("you", " said:", " hello", " wörld")]
    assert (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens) == (
        11,
        4,
        4,
    )
    assert answer.has_exact_counts
    assert answer.finish_reason == "stop"
    assert 0 < answer.first_token_seconds <= answer.total_seconds
    assert echo.requests[0]["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [("refuse", "the prompt is too long"), ("fail", "the worker died; please try again")],
)
async def test_the_servers_error_message_is_passed_on(
    echo: EchoServer, behaviour: str, message: str
) -> None:
    echo.behaviour = behaviour
    with pytest.raises(ServerFailed, match=message):
        await all_pieces(ServerClient(url=echo.url))


async def test_an_answer_without_an_end_is_an_error(echo: EchoServer) -> None:
    echo.behaviour = "break"
    with pytest.raises(ServerFailed, match="closed the connection before the answer was complete"):
        await all_pieces(ServerClient(url=echo.url))


async def test_leaving_an_answer_early_closes_its_connection(echo: EchoServer) -> None:
    echo.behaviour = "wait"
    client, answer = ServerClient(url=echo.url), Answer()
    assert (await one_piece(client, answer)).text == "you"
    assert echo.client_left.wait(60)
    assert not answer.has_exact_counts
    assert answer.completion_tokens == 1


async def test_an_aborted_answer_has_holdfasts_counts_so_far(echo: EchoServer) -> None:
    echo.behaviour = "wait"
    client, answer = ServerClient(url=echo.url), Answer()
    client.model_ids()
    await one_piece(client, answer)
    assert (answer.has_exact_counts, answer.prompt_tokens, answer.completion_tokens) == (
        True,
        11,
        1,
    )


async def test_only_holdfast_is_asked_for_continuous_counts(echo: EchoServer) -> None:
    echo.owner = "somebody else"
    client = ServerClient(url=echo.url)
    client.model_ids()
    await all_pieces(client)
    assert echo.requests[0]["stream_options"] == {"include_usage": True}


def test_speed_is_measured_after_the_first_token() -> None:
    answer = Answer(completion_tokens=11, first_token_seconds=1.0, total_seconds=3.0)
    assert answer.tokens_per_second == pytest.approx(5.0)
    burst = Answer(completion_tokens=15, first_token_seconds=1.0, total_seconds=1.0004)
    assert burst.tokens_per_second == 0.0
    assert (
        Answer(completion_tokens=1, first_token_seconds=1.0, total_seconds=1.0).tokens_per_second
        == 0.0
    )


async def test_reasoning_is_streamed_and_each_call_is_one_piece(echo: EchoServer) -> None:
    echo.behaviour = "call"
    pieces = await all_pieces(ServerClient(url=echo.url))
    assert pieces == [
        AnswerPiece("reasoning", "Let me "),
        AnswerPiece("reasoning", "see\x1b[31m."),
        AnswerPiece("text", "I look."),
        AnswerPiece("call", '→ look_up {"word": "ferry"}'),
        AnswerPiece("call", '→ add {"a":\n1}'),
    ]
