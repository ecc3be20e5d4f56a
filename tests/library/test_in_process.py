from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from holdfast.errors import WorkerUnavailable
from holdfast.library.in_process import InProcessClient, QueueInbox
from holdfast.wire.events import Finished, FinishReason, TokensGenerated, WorkerFailed, WorkerReady
from holdfast.worker.loop.inbox import Pulse
from holdfast.worker.loop.process import live
from tests.fakes.fake_engine import expected_tokens
from tests.fakes.fake_worker import a_request, fake_loop, fake_settings

ENDLESS = 900_000


def run_worker(inbox: QueueInbox, behaviour: str = "good") -> object:
    return live(
        inbox, lambda inbox, progress: fake_loop(inbox, fake_settings(behaviour), progress, Pulse())
    )


@contextmanager
def client(behaviour: str = "good") -> Iterator[InProcessClient]:
    made = InProcessClient(lambda inbox: run_worker(inbox, behaviour))
    try:
        yield made
    finally:
        made.close()
        assert not [thread for thread in threading.enumerate() if thread.name == "holdfast-device"]


def test_a_plain_thread_reads_a_whole_answer() -> None:
    with client() as link:
        assert isinstance(link.wait_started(), WorkerReady)
        events = list(link.submit(a_request()))
        assert [
            token
            for event in events
            if isinstance(event, TokensGenerated)
            for token in event.token_ids
        ] == expected_tokens(a_request())
        assert isinstance(events[-1], Finished)
        assert link.statistics().finished == 1


def test_closing_a_stream_early_stops_the_work() -> None:
    with client() as link:
        link.wait_started()
        stream = link.submit(a_request(max_tokens=ENDLESS))
        next(stream)
        stream.close()
        assert list(stream) == []
        assert link.statistics().cancelled == 1


def test_several_threads_share_one_engine() -> None:
    with client() as link:
        link.wait_started()
        answers: dict[int, list[int]] = {}

        def ask(number: int) -> None:
            events = list(link.submit(a_request(str(number), prompt=(number, 2))))
            answers[number] = [
                token
                for event in events
                if isinstance(event, TokensGenerated)
                for token in event.token_ids
            ]

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == {
        number: expected_tokens(a_request(prompt=(number, 2))) for number in range(8)
    }


def test_a_model_that_cannot_be_loaded_is_reported() -> None:
    with client("bad") as link:
        assert link.wait_started() == WorkerFailed(message="the folder is bad", fatal_input=True)
        with pytest.raises(WorkerUnavailable):
            _ = link.info


def test_closing_ends_running_requests_and_refuses_new_ones() -> None:
    with client() as link:
        link.wait_started()
        stream = link.submit(a_request(max_tokens=ENDLESS))
        next(stream)
        link.close()
        *_, last = stream
        assert isinstance(last, Finished)
        assert last.reason is FinishReason.CANCELLED
        with pytest.raises(WorkerUnavailable):
            link.submit(a_request("late"))
        with pytest.raises(WorkerUnavailable):
            link.statistics()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_device_thread_that_fails_ends_its_streams() -> None:
    with client("broken-device") as link:
        link.wait_started()
        *_, last = link.submit(a_request())
        assert isinstance(last, Finished)
        assert last.reason is FinishReason.FAILED
