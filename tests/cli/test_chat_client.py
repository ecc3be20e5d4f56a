"""What a chat needs of a server, against a small real one."""

from __future__ import annotations

import contextlib
import socket

import pytest

from holdfast.cli.chat_client import AnswerPiece, AnswerStatistics, answer_pieces
from holdfast.cli.server_client import ServerClient, ServerFailed
from tests.fakes.echo_server import running_server

HELLO = {"model": "echo", "messages": [{"role": "user", "content": "hello wörld"}]}


async def all_pieces(
    client: ServerClient, statistics: AnswerStatistics | None = None
) -> list[AnswerPiece]:
    return [piece async for piece in answer_pieces(client, HELLO, statistics or AnswerStatistics())]


async def one_piece(client: ServerClient, statistics: AnswerStatistics) -> AnswerPiece:
    """The first one; then the answer is left."""
    async with contextlib.aclosing(answer_pieces(client, HELLO, statistics)) as pieces:
        return await anext(pieces)


async def test_an_answer_comes_in_pieces_with_its_statistics() -> None:
    with running_server() as server:
        client, statistics = ServerClient(url=server.url), AnswerStatistics()
        pieces = await all_pieces(client, statistics)
    assert pieces == [AnswerPiece("text", text) for text in ("you", " said:", " hello", " wörld")]
    assert (statistics.prompt_tokens, statistics.cached_tokens, statistics.completion_tokens) == (
        11,
        4,
        4,
    )
    assert statistics.exact
    assert statistics.finish_reason == "stop"
    assert 0 < statistics.first_token_seconds <= statistics.total_seconds
    assert server.requests[0]["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_a_url_may_end_as_people_write_it(ending: str) -> None:
    with running_server() as server:
        assert ServerClient(url=server.url + ending, api_key="k").model_ids() == ("echo", "other")
        assert server.keys == ["Bearer k"]


def test_health_is_read_even_while_the_server_starts() -> None:
    with running_server() as server:
        assert ServerClient(url=server.url).health()["models"] == [
            {"id": "echo", "state": "loading"}
        ]


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [("refuse", "the prompt is too long"), ("fail", "the worker died; please try again")],
)
async def test_what_the_server_says_of_an_error_is_passed_on(behaviour: str, message: str) -> None:
    with running_server() as server:
        server.behaviour = behaviour
        with pytest.raises(ServerFailed, match=message):
            await all_pieces(ServerClient(url=server.url))


async def test_an_answer_without_an_end_is_an_error() -> None:
    with running_server() as server:
        server.behaviour = "break"
        with pytest.raises(ServerFailed, match="broke off"):
            await all_pieces(ServerClient(url=server.url))


async def test_leaving_an_answer_early_closes_its_connection() -> None:
    with running_server() as server:
        server.behaviour = "wait"
        client, statistics = ServerClient(url=server.url), AnswerStatistics()
        assert (await one_piece(client, statistics)).text == "you"
        assert server.client_left.wait(60)
    assert not statistics.exact
    assert statistics.completion_tokens == 1


async def test_an_answer_that_is_left_early_has_the_counts_so_far_where_the_server_can_tell_them() -> (
    None
):
    with running_server() as server:
        server.behaviour = "wait"
        client, statistics = ServerClient(url=server.url), AnswerStatistics()
        client.model_ids()
        await one_piece(client, statistics)
    assert (statistics.exact, statistics.prompt_tokens, statistics.completion_tokens) == (
        True,
        11,
        1,
    )


async def test_only_holdfast_is_asked_for_counts_on_the_way_because_others_may_refuse_the_question() -> (
    None
):
    with running_server() as server:
        server.owner = "somebody else"
        client = ServerClient(url=server.url)
        client.model_ids()
        await all_pieces(client)
    assert server.requests[0]["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("url", ["not a url", "http://", "ftp://x"])
def test_what_is_no_url_is_said_to_be_none(url: str) -> None:
    with pytest.raises(ServerFailed):
        ServerClient(url=url).model_ids()


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ServerFailed, match=f"no answer from {url}"):
            ServerClient(url=url).model_ids()


def test_a_certificate_that_cannot_be_read_is_named() -> None:
    with pytest.raises(
        ServerFailed, match=r"server\.tls_cert: missing\.pem: No such file or directory"
    ):
        ServerClient(url="https://127.0.0.1:1", certificate="missing.pem")


def test_speed_is_measured_after_the_first_token() -> None:
    statistics = AnswerStatistics(completion_tokens=11, first_token_seconds=1.0, total_seconds=3.0)
    assert statistics.tokens_per_second == pytest.approx(5.0)
    burst = AnswerStatistics(completion_tokens=15, first_token_seconds=1.0, total_seconds=1.0004)
    assert burst.tokens_per_second == 0.0
    assert (
        AnswerStatistics(
            completion_tokens=1, first_token_seconds=1.0, total_seconds=1.0
        ).tokens_per_second
        == 0.0
    )


async def test_a_thought_comes_apart_and_each_call_whole() -> None:
    with running_server() as server:
        server.behaviour = "call"
        pieces = await all_pieces(ServerClient(url=server.url))
    assert pieces == [
        AnswerPiece("reasoning", "Let me "),
        AnswerPiece("reasoning", "see\x1b[31m."),
        AnswerPiece("text", "I look."),
        call_of("c1", "look_up", '{"word": "ferry"}'),
        call_of("c2", "add", '{"a":\n1}'),
    ]


def call_of(call_id: str, name: str, arguments: str) -> AnswerPiece:
    return AnswerPiece(
        "call",
        call={
            "id": call_id,
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        },
    )
