"""Pauses in the worker's loop: a paused sequence generates nothing, and its answer is the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.wire.commands import Command, ControlAction, SequenceControl
from holdfast.wire.events import FinishReason, WaitReason, WorkerStatistics
from tests.fakes.fake_engine import FakeEngine, expected_tokens
from tests.fakes.looped_worker import make_loop, request, serve
from tests.fakes.script_inbox import ScriptInbox, cancel, pause, resume

NAMES = "abcde"


def test_a_paused_sequence_draws_nothing_until_resumed() -> None:
    engine = FakeEngine()
    nothing: list[Command] = []
    script = [[request("a", max_tokens=30)], nothing, nothing, [pause("a")], *[nothing] * 20]
    inbox = serve(*script, [resume("a")], engine=engine)
    assert inbox.tokens("a") == expected_tokens(request("a", max_tokens=30))
    assert len(engine.plans) == 30  # one step per token, none because of the pause
    waits = [event.waits for event in inbox.events if isinstance(event, WorkerStatistics)]
    assert {"a": WaitReason.READER} in waits
    assert inbox.finished("a").timings.waited[WaitReason.READER] > 0


def test_a_paused_sequence_makes_room_and_continues_afterwards() -> None:
    # as many as may run
    first = [request(name, index, max_tokens=40) for index, name in enumerate("abcd", start=1)]
    second = [request(name, index, max_tokens=6) for index, name in enumerate("efgh", start=5)]
    nothing: list[Command] = []
    pauses: list[Command] = [pause(asked.request_id) for asked in first]
    resumes: list[Command] = [resume(asked.request_id) for asked in first]
    inbox = serve(first, nothing, nothing, [*pauses, *second], *[nothing] * 30, resumes)
    for asked in (*first, *second):
        assert inbox.tokens(asked.request_id) == expected_tokens(asked)
    ends = [event.request_id for event in inbox.events if type(event).__name__ == "Finished"]
    assert set(ends[:4]) == set("efgh")


def test_a_paused_sequence_that_is_cancelled_leaves_nothing_behind() -> None:
    engine = FakeEngine()
    inbox = ScriptInbox(
        [
            [request("a", max_tokens=500)],
            [],
            [pause("a")],
            [],
            [cancel("a")],
        ]
    )
    loop = make_loop(engine, inbox)
    loop.run()
    assert inbox.finished("a").reason is FinishReason.CANCELLED
    assert not engine.opened
    assert loop.statistics().kv_reserved_bytes == 0


@given(
    commands=st.lists(
        st.tuples(st.sampled_from(["pause", "resume"]), st.sampled_from(NAMES)), max_size=60
    ),
    budget_tokens=st.sampled_from([80, 120, 10_000]),
)
def test_a_pause_at_any_time_does_not_change_the_answer(
    commands: list[tuple[ControlAction, str]], budget_tokens: int
) -> None:
    asked = [request(name, index, 2, 3, max_tokens=20 + index) for index, name in enumerate(NAMES)]
    script: list[list[Command]] = [[*asked], []]
    script += [[SequenceControl(action=action, request_id=name)] for action, name in commands]
    script.append([resume(name) for name in NAMES])
    inbox = serve(*script, budget_tokens=budget_tokens)
    for each in asked:
        assert inbox.tokens(each.request_id) == expected_tokens(each)
