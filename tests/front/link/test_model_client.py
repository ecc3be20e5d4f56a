"""Requests that outlive their workers, over links that only record commands."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import msgspec
import pytest

from holdfast.errors import SessionFailure, WorkerUnavailable
from holdfast.front.link.event_stream import EventStream, RequestEvent
from holdfast.front.link.model_client import (
    DEATHS_ALONE,
    DEATHS_WITHOUT_PROGRESS,
    REMEMBERED_SECONDS,
    ModelClient,
)
from holdfast.wire.commands import (
    Command,
    ReadAhead,
    ReadAheadRun,
    SequenceControl,
    SequenceRequest,
    ThinkingBudget,
    ThoughtLimit,
)
from holdfast.wire.events import (
    Accepted,
    CacheReport,
    Event,
    Finished,
    FinishReason,
    Rejected,
    TokensGenerated,
)
from holdfast.wire.images import ImageAnswer, ImageCommand
from holdfast.wire.requests import SamplingParams
from holdfast.wire.sessions import OperationName, SessionAnswer, SessionCommand
from tests.fakes.fake_worker import a_request
from tests.fakes.scripted_client import model_info

UNREAD_BYTES = 1024


class WrittenLink:
    """Records the commands for one worker."""

    def __init__(self) -> None:
        self.is_open = True
        self.sent: list[SequenceRequest] = []
        self.commands: list[SessionCommand | ImageCommand] = []
        self.steered: list[str] = []
        self.limited: list[ThoughtLimit] = []
        self.read_ahead: list[ReadAheadRun] = []

    def send(self, command: Command) -> bool:
        if not self.is_open:
            return False
        match command:
            case SequenceRequest():
                self.sent.append(command)
            case SessionCommand() | ImageCommand():
                self.commands.append(command)
            case SequenceControl():
                self.steered.append(f"{command.action} {command.request_id}")
            case ThoughtLimit():
                self.limited.append(command)
            case ReadAheadRun():
                self.read_ahead.append(command)
            case _:
                raise AssertionError(command)
        return True

    @property
    def ids(self) -> list[str]:
        return [request.request_id for request in self.sent]


class Front:
    def __init__(self) -> None:
        self.seconds = 0.0
        self.client = ModelClient(unread_bytes=UNREAD_BYTES, clock=lambda: self.seconds)
        self.worker = WrittenLink()
        self.resumed = 0

    def next_worker(self) -> WrittenLink:
        self.worker = WrittenLink()
        self.resumed += self.client.use_worker(self.worker, model_info())  # type: ignore[arg-type]
        return self.worker

    def die(self) -> tuple[str, ...]:
        self.worker.is_open = False
        return self.client.worker_lost().refused

    def die_until_suspected(self) -> WrittenLink:
        """Let workers die until all requests are suspects; returns the next worker."""
        for _ in range(DEATHS_WITHOUT_PROGRESS):
            assert self.die() == ()
            self.next_worker()
        return self.worker

    def die_on_trial(self, name: str) -> tuple[str, ...]:
        """The worker dies while this request runs alone, until the request is refused."""
        for _ in range(DEATHS_ALONE - 1):
            assert self.die() == ()
            assert self.next_worker().ids == [name]
        return self.die()

    def submit(self, *names: str) -> list[EventStream]:
        """Submit requests that have a prompt each."""
        return [
            self.client.submit(a_request(name, max_tokens=100, prompt=tuple(name.encode())))
            for name in names
        ]

    def tokens(self, *names: str, count: int = 1) -> None:
        events: list[Event] = []
        for name in names:
            events += [
                Accepted(request_id=name),
                TokensGenerated(request_id=name, token_ids=tuple(range(count))),
            ]
        self.client.deliver_events(events)


@pytest.fixture
def front() -> Front:
    made = Front()
    made.next_worker()
    return made


async def events_of(stream: EventStream) -> list[RequestEvent]:
    return [event async for event in stream]


def finished(
    name: str, reason: FinishReason = FinishReason.LENGTH, *, ram_tokens: int = 0
) -> Finished:
    memory = CacheReport(ram_tokens=ram_tokens)
    return Finished(
        request_id=name, reason=reason, prompt_tokens=3, completion_tokens=9, cache_report=memory
    )


def read_ahead(tokens: int) -> SequenceRequest:
    request = a_request("ahead", prompt=tuple(range(tokens)))
    return msgspec.structs.replace(request, read_ahead=ReadAhead(known_tokens=1))


async def test_a_request_continues_after_the_received_tokens(front: Front) -> None:
    (stream,) = front.submit("a")
    front.tokens("a", count=3)
    front.die()
    second = front.next_worker()
    (again,) = second.sent
    assert tuple(again.generated_token_ids) == (0, 1, 2)
    assert tuple(again.prompt_token_ids) == tuple(b"a")
    front.tokens("a", count=2)
    front.die()
    third = front.next_worker()
    assert tuple(third.sent[0].generated_token_ids) == (0, 1, 2, 0, 1)
    front.client.deliver_events([finished("a")])
    events = await events_of(stream)
    assert [type(event) for event in events] == [
        Accepted,
        TokensGenerated,
        TokensGenerated,
        Finished,
    ]
    assert front.resumed == 2
    assert front.client.open_streams == 0


async def test_waiting_requests_go_to_the_next_worker_in_order(front: Front) -> None:
    front.submit("a")
    front.die()
    front.submit("b", "c")
    assert front.next_worker().ids == ["a", "b", "c"]
    assert front.resumed == 0, "none was accepted by the first"


async def test_a_request_closed_by_its_reader_is_not_resent(front: Front) -> None:
    left, _ = front.submit("a", "b")
    front.die()
    await left.aclose()
    assert front.next_worker().ids == ["b"]
    assert front.client.open_streams == 1


async def test_a_request_under_a_cancelled_id_gets_no_event_of_the_cancelled_one(
    front: Front,
) -> None:
    """A request that a full queue refused is sent again, while its other choices are cancelled."""
    (left,) = front.submit("a")
    front.tokens("a", count=5)
    await left.aclose()
    (again,) = front.submit("a")
    front.client.deliver_events([TokensGenerated(request_id="a", token_ids=(5,))])
    front.client.deliver_events([finished("a", FinishReason.CANCELLED)])
    front.tokens("a", count=2)
    front.client.deliver_events([finished("a")])
    events = await events_of(again)
    assert [type(event) for event in events] == [Accepted, TokensGenerated, Finished]
    assert again.token_ids == [0, 1]


async def test_a_cancelled_id_is_free_again_when_the_worker_has_died(front: Front) -> None:
    (left,) = front.submit("a")
    await left.aclose()
    (again,) = front.submit("a")
    front.die()
    front.next_worker()
    front.tokens("a", count=2)
    assert again.token_ids == [0, 1]


async def test_an_unread_stream_stays_paused_at_the_next_worker(front: Front) -> None:
    (stream,) = front.submit("a")
    front.tokens("a", count=8)
    assert front.worker.steered == ["pause a"]
    front.die()
    assert front.next_worker().steered == ["pause a"]
    await anext(stream)
    await anext(stream)
    assert front.worker.steered == ["pause a", "resume a"]


async def test_reasoning_that_was_ended_stays_ended_at_the_next_worker(front: Front) -> None:
    budget = ThinkingBudget(tokens=0, end_token_ids=(7,))
    (stream,) = front.submit("a")
    front.tokens("a")
    stream.limit_thoughts(budget)
    assert front.worker.limited == [ThoughtLimit(request_id="a", budget=budget)]
    front.die()
    (again,) = front.next_worker().sent
    assert (again.thinking_budget, front.worker.limited) == (budget, [])


async def test_without_a_next_worker_current_requests_fail(front: Front) -> None:
    streams = front.submit("a", "b")
    front.tokens("a")
    front.die()
    front.client.end_all("it cannot be started")
    for stream in streams:
        *_, end = await events_of(stream)
        assert isinstance(end, Finished)
        assert (end.reason, end.error) == (FinishReason.FAILED, "it cannot be started")
    front.submit("c")
    assert front.next_worker().ids == ["c"]


async def test_a_closed_client_accepts_nothing(front: Front) -> None:
    (stream,) = front.submit("a")
    front.client.close("the server is shutting down")
    assert [type(event) for event in await events_of(stream)] == [Accepted, Finished]
    with pytest.raises(WorkerUnavailable, match="shutting down"):
        front.submit("b")


async def test_an_id_in_use_cannot_be_opened_twice(front: Front) -> None:
    front.submit("a")
    with pytest.raises(ValueError, match="in use"):
        front.submit("a")


async def test_a_request_that_kills_alone_is_refused_and_others_continue(front: Front) -> None:
    streams = dict(zip("abc", front.submit("a", "b", "c"), strict=True))
    front.tokens("a", "b", "c")
    front.die()
    assert front.next_worker().ids == ["a", "b", "c"]
    front.die()
    assert front.next_worker().ids == ["a", "b", "c"]
    front.die()
    alone = front.next_worker()
    assert alone.ids == ["a"]
    front.submit("new")
    assert alone.ids == ["a"]
    front.tokens("a")
    assert (alone.ids, alone.steered) == (["a", "b"], ["pause a"])
    assert front.die_on_trial("b") == ("b",)
    *_, end = await events_of(streams["b"])
    assert isinstance(end, Finished)
    assert "died 5 times" in end.error
    assert end.is_deadly
    assert "ran alone" in end.error
    last = front.next_worker()
    assert last.ids == ["a", "c", "new"]
    assert last.steered == []
    assert front.client.open_streams == 3


async def killed(front: Front) -> EventStream:
    """The stream of a request with the prompt (7, 8) that was refused for killing workers."""
    stream = front.client.submit(a_request("killer", prompt=(7, 8)))
    front.die_until_suspected()
    assert front.die_on_trial("killer") == ("killer",)
    front.next_worker()
    return stream


async def end_of(stream: EventStream) -> Finished:
    *_, end = await events_of(stream)
    assert isinstance(end, Finished)
    return end


async def test_a_request_that_killed_workers_is_refused_when_sent_again(front: Front) -> None:
    assert (await end_of(await killed(front))).is_deadly
    again = front.client.submit(a_request("again", prompt=(7, 8), max_tokens=500))
    seeded = msgspec.structs.replace(
        a_request("seeded", prompt=(7, 8)), sampling=SamplingParams(seed=99), session_id="s"
    )
    for stream in (again, front.client.submit(seeded)):
        end = await end_of(stream)
        assert (end.is_deadly, "killed the worker" in end.error) == (True, True)
    assert front.worker.ids == []
    assert front.client.open_streams == 0


async def test_other_prompts_tenants_and_adapters_are_not_refused_with_it(front: Front) -> None:
    await killed(front)
    same = a_request("b", prompt=(7, 8))
    front.client.submit(a_request("a", prompt=(7, 8, 9)))
    front.client.submit(msgspec.structs.replace(same, tenant="another"))
    front.client.submit(msgspec.structs.replace(same, request_id="c", adapter="french"))
    front.client.submit(msgspec.structs.replace(same, request_id="d", grammar="start: /a/"))
    assert front.worker.ids == ["a", "b", "c", "d"]


async def test_a_killer_is_retried_after_an_hour_or_another_load(front: Front) -> None:
    await killed(front)
    front.seconds += REMEMBERED_SECONDS + 1
    front.client.submit(a_request("later", prompt=(7, 8)))
    assert front.worker.ids == ["later"]
    other_load = Front()
    other_load.next_worker()
    other_load.client.submit(a_request("later", prompt=(7, 8)))
    assert other_load.worker.ids == ["later"]


async def test_the_same_request_sent_concurrently_kills_no_more_workers(front: Front) -> None:
    streams = [front.client.submit(a_request(name, prompt=(7, 8))) for name in ("first", "retry")]
    front.die_until_suspected()
    assert front.die_on_trial("first") == ("first",)
    assert [(await end_of(stream)).is_deadly for stream in streams] == [True, True]
    assert front.next_worker().ids == []


async def test_a_request_paused_during_its_trial_is_retried_when_resumed(front: Front) -> None:
    """Otherwise, a client that keeps reconnecting would kill one worker after another."""
    (guilty,) = front.submit("guilty")
    for _ in range(3):
        front.tokens("guilty")
        front.die()
        front.next_worker()
    front.submit("innocent")
    for _ in range(3):
        guilty.pause()
        assert front.worker.ids == ["guilty", "innocent"]
        guilty.unpause()
    later_rounds = ["pause guilty", "resume innocent", "pause innocent", "resume guilty"] * 2
    assert front.worker.steered == [
        "pause guilty",
        "pause innocent",
        "resume guilty",
        *later_rounds,
    ]
    assert front.die_on_trial("guilty") == ("guilty",)
    assert front.next_worker().ids == ["innocent"]


async def test_a_killer_with_a_token_per_life_is_refused(front: Front) -> None:
    guilty, _ = front.submit("guilty", "innocent")
    for _ in range(3):
        front.tokens("guilty")
        front.tokens("innocent", count=20)
        assert front.die() == ()
        front.next_worker()
    assert front.worker.ids == ["guilty"]
    front.tokens("guilty")
    assert front.worker.ids == ["guilty"], "it has died after as much before"
    assert front.die_on_trial("guilty") == ("guilty",)
    *_, end = await events_of(guilty)
    assert isinstance(end, Finished)
    assert "died 5 times" in end.error
    assert front.next_worker().ids == ["innocent"]


async def test_an_unread_suspect_lets_the_next_one_be_tried(front: Front) -> None:
    front.submit("a", "b")
    for _ in range(3):
        front.tokens("a", "b", count=1)
        front.die()
        front.next_worker()
    assert front.worker.ids == ["a"]
    front.tokens("a", count=2)
    assert front.worker.steered == ["pause a"]
    assert front.worker.ids == ["a", "b"]


async def test_requests_that_passed_continue_when_all_were_tried(front: Front) -> None:
    front.submit("a", "b")
    worker = front.die_until_suspected()
    front.tokens("a")
    front.tokens("a", "b")  # events on their way when it was paused
    assert worker.ids == ["a", "b"]
    assert worker.steered == ["pause a", "resume a"]


@pytest.mark.parametrize("leave", ["ends", "is left"])
async def test_a_finished_suspect_lets_the_next_one_be_tried(front: Front, leave: str) -> None:
    first, _ = front.submit("a", "b")
    worker = front.die_until_suspected()
    if leave == "ends":
        front.client.deliver_events([Accepted(request_id="a"), finished("a")])
    else:
        await first.aclose()
    assert worker.ids == ["a", "b"]


async def test_a_reader_is_woken_by_the_next_workers_event(front: Front) -> None:
    (stream,) = front.submit("a")
    reader: asyncio.Task[RequestEvent] = asyncio.create_task(_next(stream))
    await asyncio.sleep(0)
    front.die()
    front.next_worker()
    front.tokens("a")
    assert await reader == Accepted(request_id="a")


async def asked(front: Front, operation: OperationName = "get") -> asyncio.Task[SessionAnswer]:
    """A command sent by the client."""
    command = SessionCommand(
        operation=operation, tenant="", call_id="c", session_id="s", new_session_id="t"
    )
    task = asyncio.create_task(front.client.call(command))
    await asyncio.sleep(0)
    return task


def answers(front: Front, failure: SessionFailure | None = None) -> None:
    front.client.deliver_events(
        [SessionAnswer(call_id="c", failure=failure, message="so it is" if failure else "")]
    )


async def test_a_command_without_a_worker_waits_for_the_next_one(front: Front) -> None:
    front.die()
    command = await asked(front)
    assert [each.call_id for each in front.next_worker().commands] == ["c"]
    answers(front)
    assert (await command).failure is None
    assert front.next_worker().commands == []


async def test_an_image_question_is_repeated_to_the_next_worker(front: Front) -> None:
    question = ImageCommand(images=("a",), call_id="c")
    task = asyncio.create_task(front.client.call(question))
    await asyncio.sleep(0)
    front.die()
    assert front.next_worker().commands == [question]
    answer = ImageAnswer(call_id="c", failures={"a": "too wide"})
    front.client.deliver_events([answer])
    assert await task == answer


async def test_an_unanswered_command_is_resent_once_after_the_requests(front: Front) -> None:
    command = await asked(front, "close")
    front.die()
    front.submit("a")
    second = front.next_worker()
    assert (second.ids, len(second.commands)) == (["a"], 1)
    answers(front)
    assert (await command).message == ""


@pytest.mark.parametrize(
    ("operation", "failure", "is_told"),
    [
        ("close", SessionFailure.NOT_FOUND, True),
        ("fork", SessionFailure.EXISTS, True),
        ("fork", SessionFailure.NOT_FOUND, False),
        ("get", SessionFailure.NOT_FOUND, False),
    ],
)
async def test_a_failure_says_that_the_work_may_be_done(
    front: Front, operation: OperationName, failure: SessionFailure, is_told: bool
) -> None:
    command = await asked(front, operation)
    front.die()
    front.next_worker()
    answers(front, failure)
    answer = await command
    assert answer.failure is failure
    assert ("may already have carried it out" in answer.message) is is_told


async def test_a_failure_at_the_first_worker_is_passed_on_unchanged(front: Front) -> None:
    command = await asked(front, "close")
    answers(front, SessionFailure.NOT_FOUND)
    assert (await command).message == "so it is"


async def test_a_command_that_met_two_deaths_is_not_resent(front: Front) -> None:
    command = await asked(front, "import")
    front.die()
    front.next_worker()
    front.die()
    with pytest.raises(WorkerUnavailable, match="died 2 times"):
        await command
    assert front.next_worker().commands == []


async def test_a_command_waits_until_all_suspects_were_tried(front: Front) -> None:
    front.submit("a")
    last = front.die_until_suspected()
    command = await asked(front)
    assert (last.ids, last.commands) == (["a"], [])
    front.tokens("a")
    assert len(last.commands) == 1
    answers(front)
    await command


async def test_without_a_next_worker_commands_fail_with_the_reason(front: Front) -> None:
    front.die()
    command = await asked(front)
    front.client.end_all("it cannot be started")
    with pytest.raises(WorkerUnavailable, match="cannot be started"):
        await command
    front.client.close("the server is shutting down")
    with pytest.raises(WorkerUnavailable, match="shutting down"):
        await (await asked(front))


async def test_a_cancelled_command_is_not_sent(front: Front) -> None:
    front.die()
    command = await asked(front)
    command.cancel()
    await asyncio.wait([command])
    assert front.next_worker().commands == []


@pytest.mark.parametrize(
    "event", [Rejected(request_id="b", kind="invalid", message="no"), finished("ahead")]
)
async def test_neither_a_refusal_nor_idle_work_counts_as_progress(
    front: Front, event: Rejected | Finished
) -> None:
    """Else workers would be restarted without a pause while others send invalid requests."""
    front.submit("a", "b")
    front.client.submit(
        msgspec.structs.replace(a_request("ahead"), read_ahead=ReadAhead(known_tokens=1))
    )
    front.client.deliver_events([event])
    assert not front.client.worker_lost().had_progress


async def test_the_next_worker_learns_of_unused_prefilled_prompts(front: Front) -> None:
    request = read_ahead(9)
    front.client.submit(request)
    front.client.deliver_events([finished("ahead", ram_tokens=5)])
    front.die()
    run = ReadAheadRun(tenant="", token_ids=request.prompt_token_ids, start=5)
    assert front.next_worker().read_ahead == [run]
    front.client.submit(a_request("other", prompt=(*range(5), 8)))
    front.client.deliver_events([finished("other")])
    front.die()
    assert front.next_worker().read_ahead == [run]
    front.client.submit(a_request("next", prompt=tuple(range(12))))
    front.client.deliver_events([finished("next")])
    front.die()
    assert front.next_worker().read_ahead == []


async def test_an_unfinished_prefill_is_not_reported_to_the_next_worker(front: Front) -> None:
    front.client.submit(read_ahead(9))
    front.client.deliver_events([finished("ahead", FinishReason.CANCELLED)])
    front.die()
    assert front.next_worker().read_ahead == []


async def _next(stream: EventStream) -> RequestEvent:
    return await anext(stream)


class Unwalked(dict[str, Any]):
    """A dict that is only asked for single keys."""

    def _refuse(self) -> NoReturn:
        raise AssertionError("all entries are visited")

    __iter__ = keys = values = items = _refuse


def test_a_submission_does_not_visit_the_other_open_requests(front: Front) -> None:
    front.submit(*"abc")
    front.client._open_requests = Unwalked(front.client._open_requests)
    front.submit("d")
    assert front.worker.ids == [*"abcd"]
    with pytest.raises(AssertionError, match="visited"):
        front.next_worker()
