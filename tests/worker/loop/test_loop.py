from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.wire.commands import (
    SHUT_DOWN,
    TELL_STATISTICS,
    Command,
    SequenceControl,
    SequenceRequest,
)
from holdfast.wire.events import Finished, FinishReason, PrefillFinished, Rejected, WorkerStatistics
from holdfast.wire.requests import TokenIds
from holdfast.worker.loop.device_steps import DeviceBroken
from tests.fakes import fake_engine
from tests.fakes.fake_engine import FakeEngine, expected_tokens
from tests.fakes.looped_worker import SETTINGS, make_loop, request, serve
from tests.fakes.script_inbox import ScriptInbox, cancel


def test_a_request_is_answered_up_to_its_length() -> None:
    asked = request("a", 5, 6, max_tokens=7)
    inbox = serve([asked])
    assert inbox.tokens("a") == expected_tokens(asked)
    assert inbox.finished("a").reason is FinishReason.LENGTH
    assert (inbox.finished("a").prompt_tokens, inbox.finished("a").completion_tokens) == (2, 7)


def test_a_stop_token_ends_the_request_and_is_reported() -> None:
    stop = expected_tokens(request("a"))[3]
    asked = request("a", stop_token_ids=(stop,))
    inbox = serve([asked])
    assert inbox.tokens("a") == expected_tokens(asked)
    assert len(inbox.tokens("a")) == 4
    assert inbox.finished("a").reason is FinishReason.STOP


def test_a_cancelled_request_is_not_in_the_next_step() -> None:
    engine = FakeEngine()
    inbox = serve(
        [request("a", max_tokens=500)], [], [], [cancel("a")], [request("b")], engine=engine
    )
    assert inbox.finished("a").reason is FinishReason.CANCELLED
    steps_of_a = [
        index
        for index, plan in enumerate(engine.plans)
        if any(span.request_id == "a" for span in plan.spans)
    ]
    assert len(steps_of_a) == 3
    assert not engine.opened


def test_cancelling_an_unknown_id_is_harmless() -> None:
    assert serve([cancel("nobody"), request("a")]).finished("a").reason is FinishReason.LENGTH


def test_an_id_may_be_reused_in_the_step_after_its_end() -> None:
    first, second = request("a", 9, max_tokens=400), request("a", 4, max_tokens=3)
    inbox = ScriptInbox([[first], [], [cancel("a"), second]])
    make_loop(FakeEngine(), inbox).run()
    answers = [event.reason for event in inbox.of("a") if hasattr(event, "reason")]
    assert answers == [FinishReason.CANCELLED, FinishReason.LENGTH]
    assert inbox.tokens("a")[-3:] == expected_tokens(second)


def test_an_id_in_use_is_rejected_as_invalid() -> None:
    inbox = ScriptInbox([[request("a"), request("a")]])
    make_loop(FakeEngine(), inbox).run()
    (rejected,) = [event for event in inbox.events if isinstance(event, Rejected)]
    assert rejected.kind == "invalid"


def test_a_full_queue_rejects_with_a_retry_time() -> None:
    inbox = serve([request(str(index)) for index in range(20)])
    rejected = [event for event in inbox.events if isinstance(event, Rejected)]
    assert len(rejected) == 20 - SETTINGS.max_running - SETTINGS.max_queued
    assert {event.kind for event in rejected} == {"queue_full"}
    assert all(event.queue_limit >= event.queued > 0 for event in rejected)


def test_a_request_that_never_fits_is_rejected_without_a_field() -> None:
    inbox = serve([request("a", max_tokens=900)], budget_tokens=100)
    (rejected,) = inbox.of("a")
    assert isinstance(rejected, Rejected)
    assert (rejected.kind, rejected.field) == ("too_large", "")
    assert rejected.needed_bytes > rejected.budget_bytes > 0


def test_prompt_scores_come_once_before_the_first_token() -> None:
    prompt = tuple(range(1, 41))  # three chunks
    inbox = serve([request("a", *prompt, max_tokens=2, want_prompt_logprobs=True)])
    kinds = [type(event).__name__ for event in inbox.of("a")]
    assert kinds == [
        "Accepted",
        "PrefillFinished",
        "TokensGenerated",
        "TokensGenerated",
        "Finished",
    ]
    (scored,) = [event for event in inbox.events if isinstance(event, PrefillFinished)]
    assert [logprob.token_id for logprob in scored.logprobs] == list(prompt[1:])


def test_a_prompt_can_be_scored_without_generation() -> None:
    inbox = serve([request("a", 1, 2, 3, max_tokens=0, want_prompt_logprobs=True)])
    assert [type(event).__name__ for event in inbox.of("a")] == [
        "Accepted",
        "PrefillFinished",
        "Finished",
    ]


@pytest.mark.parametrize(
    "guilty",
    [fake_engine.RAISES_AT_DISPATCH, fake_engine.RAISES_AT_COLLECT, fake_engine.FAILS_ALONE],
)
def test_only_the_guilty_request_of_a_failing_step_fails(guilty: int) -> None:
    innocent = [request(f"i{index}", *range(1, 12 + index), max_tokens=20) for index in range(3)]
    inbox = serve(innocent, [], [], [request("g", 1, guilty)], [request("late")])
    assert inbox.finished("g").reason is FinishReason.FAILED
    assert inbox.finished("g").error
    for asked in (*innocent, request("late")):
        assert inbox.tokens(asked.request_id) == expected_tokens(asked)
        assert inbox.finished(asked.request_id).reason is FinishReason.LENGTH


def test_a_request_that_cannot_be_opened_fails_alone() -> None:
    inbox = serve([request("a"), request("g", fake_engine.RAISES_AT_OPEN), request("b")])
    assert inbox.finished("g").reason is FinishReason.FAILED
    assert inbox.tokens("a") == inbox.tokens("b") == expected_tokens(request("a"))


def test_a_step_that_fails_once_costs_no_token() -> None:
    asked = [
        request("a", 1, fake_engine.RAISES_ONCE, max_tokens=12),
        request("b", 4, max_tokens=12),
    ]
    inbox = serve(asked)
    assert [inbox.tokens(each.request_id) for each in asked] == [
        expected_tokens(each) for each in asked
    ]


def test_a_broken_device_ends_the_loop_and_leaves_requests_open() -> None:
    inbox = ScriptInbox([[request(str(index)) for index in range(6)]])
    loop = make_loop(FakeEngine(is_broken=True), inbox)
    with pytest.raises(DeviceBroken):
        loop.run()
    assert set(inbox.open_requests()) == {str(index) for index in range(6)}


def test_a_single_request_on_a_broken_device_is_left_open() -> None:
    inbox = ScriptInbox([[request("only")]])
    with pytest.raises(DeviceBroken, match="no longer computes anything"):
        make_loop(FakeEngine(is_broken=True), inbox).run()
    assert set(inbox.open_requests()) == {"only"}


def test_an_answer_continues_after_the_tokens_of_another_worker() -> None:
    whole = request("a", 1, 2, 3, max_tokens=12)
    told = expected_tokens(whole)
    rest = [
        msgspec.structs.replace(
            request(str(count), 1, 2, 3, max_tokens=12),
            generated_token_ids=TokenIds.of(told[:count]),
        )
        for count in range(1, 12)
    ]
    inbox = ScriptInbox([rest])
    make_loop(FakeEngine(), inbox).run()
    inbox.check_protocol(generated_before={str(count): count for count in range(1, 12)})
    for count in range(1, 12):
        assert inbox.tokens(str(count)) == told[count:]
        assert inbox.finished(str(count)).completion_tokens == 12
        assert [type(event).__name__ for event in inbox.of(str(count))[:2]] == [
            "Accepted",
            "TokensGenerated",
        ]


def test_a_complete_answer_is_refused() -> None:
    asked = request("a", max_tokens=3)
    inbox = serve(
        [msgspec.structs.replace(asked, generated_token_ids=TokenIds.of(expected_tokens(asked)))]
    )
    assert isinstance(inbox.of("a")[0], Rejected)


def test_shutdown_cancels_running_requests_and_rejects_new_ones() -> None:
    engine = FakeEngine()
    inbox = serve([request("a", max_tokens=900)], [], [SHUT_DOWN, request("b")], engine=engine)
    assert inbox.finished("a").reason is FinishReason.CANCELLED
    (rejected,) = inbox.of("b")
    assert isinstance(rejected, Rejected)
    assert rejected.kind == "shutting_down"
    assert not engine.pending


def test_a_loop_without_work_rests_once() -> None:
    rests: list[int] = []
    inbox = ScriptInbox([[], [], [request("a", max_tokens=3)], *([[]] * 20), [request("b")]])
    loop = make_loop(FakeEngine(), inbox)
    loop._on_rest = lambda: rests.append(len(inbox.events))
    loop.run()
    assert len(rests) == 2


def test_statistics_count_the_work_done() -> None:
    inbox = serve([request("a", 1, 2, 3, 4, max_tokens=5)], *([[]] * 10), [TELL_STATISTICS])
    told = [event for event in inbox.events if isinstance(event, WorkerStatistics)][-1]
    assert (
        told.prompt_tokens,
        told.generated_tokens,
        told.finished,
        told.running,
        told.queued,
    ) == (4, 5, 1, 0, 0)
    assert told.step_seconds is not None
    assert sum(told.step_seconds.counts) == told.steps == 5


def generated_before(asked: SequenceRequest, tokens: int) -> SequenceRequest:
    """A request with this many tokens of its answer from another worker; by default all except the
    last.
    """
    generated = expected_tokens(asked)[:-1][:tokens]
    return msgspec.structs.replace(asked, generated_token_ids=TokenIds.of(generated))


commands = st.one_of(
    st.builds(
        lambda index, prompt, max_tokens, stop, scored, generated: generated_before(
            request(
                f"r{index}",
                *prompt,
                max_tokens=max_tokens,
                stop_token_ids=tuple(stop),
                want_prompt_logprobs=scored,
            ),
            generated,
        ),
        st.integers(0, 12),
        st.lists(
            st.one_of(st.integers(1, 20), st.sampled_from((666, 667, 668, 669, 670))),
            min_size=1,
            max_size=30,
        ),
        st.integers(0, 30),
        st.lists(st.integers(0, 600), max_size=60),
        st.booleans(),
        st.integers(0, 10),
    ),
    st.builds(lambda index: cancel(f"r{index}"), st.integers(0, 12)),
    st.just(TELL_STATISTICS),
)


@given(
    script=st.lists(st.lists(commands, max_size=3), max_size=40),
    budget_tokens=st.integers(40, 300),
    runs_ahead=st.booleans(),
)
def test_each_accepted_request_gets_exactly_one_finished(
    script: list[list[Command]], budget_tokens: int, runs_ahead: bool
) -> None:
    numbered = _with_ids_of_their_own(script)
    asked = {
        command.request_id: command
        for batch in numbered
        for command in batch
        if isinstance(command, SequenceRequest)
    }
    engine = FakeEngine(runs_ahead=runs_ahead)
    inbox = ScriptInbox(numbered)
    loop = make_loop(engine, inbox, budget_tokens=budget_tokens)
    inbox._on_receive = loop.check_invariants
    before = {request_id: len(command.generated_token_ids) for request_id, command in asked.items()}
    try:
        loop.run()
    except DeviceBroken:  # enough of the generated prompts make every step fail
        inbox.check_protocol(generated_before=before, all_have_ended=False)
    else:
        inbox.check_protocol(generated_before=before)
        assert not engine.opened
        assert not inbox.open_requests()
    for request_id, command in asked.items():
        events = inbox.of(request_id)
        if not events or not isinstance(events[-1], Finished):
            continue
        reason = inbox.finished(request_id).reason
        tokens, expected = inbox.tokens(request_id), expected_tokens(command)[before[request_id] :]
        assert tokens == expected[: len(tokens)]
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert tokens == expected
            assert (reason is FinishReason.STOP) == bool(
                tokens and tokens[-1] in command.stop_token_ids
            )


def test_a_cancel_stops_the_prefill_after_the_running_step() -> None:
    engine = FakeEngine(runs_ahead=False)
    script: list[list[Command]] = [
        [request("a", *range(1, 200))],
        [],
        [],
        [cancel("a")],
        [],
        [],
    ]
    serve(*script, engine=engine)
    assert len(engine.plans) == 3


def _with_ids_of_their_own(script: list[list[Command]]) -> list[list[Command]]:
    """Each request of a script gets an unused id; a cancel refers to the latest request of its
    number.
    """
    count, latest = 0, {}
    numbered: list[list[Command]] = []
    for batch in script:
        made: list[Command] = []
        for command in batch:
            if isinstance(command, SequenceRequest):
                count += 1
                latest[command.request_id] = f"{command.request_id}-{count}"
                made.append(
                    SequenceRequest(
                        **{**_fields(command), "request_id": latest[command.request_id]}
                    )
                )
            elif isinstance(command, SequenceControl):
                made.append(cancel(latest.get(command.request_id, "nobody")))
            else:
                made.append(command)
        numbered.append(made)
    return numbered


def _fields(command: SequenceRequest) -> dict[str, object]:
    return {name: getattr(command, name) for name in command.__struct_fields__}
