"""A sequence with unavailable images waits for them while others continue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.wire.events import FinishReason, TokensGenerated, WaitReason
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.plan import StepPlan
from holdfast.worker.loop.loop import WorkerLoop
from holdfast.worker.vision import images
from holdfast.worker.vision.feature_cache import FeatureCache
from tests.fakes.caching_worker import CachingWorker, greedy, random_prompt
from tests.fakes.inline_images import InlineImages
from tests.fakes.pictures import image_file
from tests.fakes.script_inbox import ScriptInbox
from tests.fakes.vision_oracle import user
from tests.fakes.vision_worker import FEATURES, VisionBeside

SQUARE = image_file(32, 32, seed=1)
WIDE = image_file(60, 24, seed=3)
ONE = [user("Look: ", SQUARE, " What is it?")]
TWO = [user("The first ", SQUARE, " and the second ", WIDE, " differ.")]
TEXT = greedy("text", random_prompt(20), max_tokens=30)
LONG = 300  # polls; the text needs 30 steps


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> VisionBeside:
    return VisionBeside.load("qwen3_vl", tmp_path_factory.mktemp("vision"))


@pytest.fixture
def little_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_MOST_FILES", 1)


def reader_of(worker: CachingWorker) -> InlineImages:
    assert worker.engine.images is not None
    reader: Any = worker.engine.images._reader
    assert isinstance(reader, InlineImages)
    return reader


def forgetful(beside: VisionBeside, **more: Any) -> CachingWorker:
    """A worker that keeps the features of one image, in memory only."""
    worker = beside.worker(**more)
    worker.engine.images = beside.worker_images(ram_bytes=1)
    return worker


def place(inbox: ScriptInbox, event: object) -> int:
    return next(index for index, each in enumerate(inbox.events) if each is event)


def check_text_went_on(inbox: ScriptInbox, *others: str) -> None:
    """The text was complete before the other requests advanced."""
    assert len(inbox.tokens("text")) == 30
    end = place(inbox, inbox.finished("text"))
    for other in others:
        first = next(
            event
            for event in inbox.of(other)
            if isinstance(event, TokensGenerated) or event is inbox.finished(other)
        )
        assert place(inbox, first) > end


def test_a_damaged_feature_file_stops_only_its_sequence(
    beside: VisionBeside, tmp_path: Path
) -> None:
    request = beside.request("image", ONE, is_kept=False)
    expected = beside.worker(tmp_path).serve([[request]]).tokens("image")
    (file,) = (tmp_path / FEATURES).iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    worker = beside.worker(tmp_path)
    reader_of(worker).delays[0] = LONG
    inbox = worker.serve([[TEXT, request]])
    check_text_went_on(inbox, "image")
    assert inbox.tokens("image") == expected
    assert inbox.finished("image").timings.waited.keys() >= {WaitReason.IMAGES}


@pytest.mark.usefixtures("little_is_kept")
def test_too_many_images_stop_only_their_sequence(beside: VisionBeside) -> None:
    request = beside.request("images", TWO)
    expected = beside.worker().serve([[request]]).tokens("images")
    worker = forgetful(beside)
    reader_of(worker).delays[3] = LONG  # it is processed again
    inbox = worker.serve([[TEXT, request]])
    check_text_went_on(inbox, "images")
    assert inbox.tokens("images") == expected


def test_a_second_sequence_with_a_lost_image_stops_only_itself(beside: VisionBeside) -> None:
    requests = [beside.request(name, ONE, is_kept=False) for name in ("first", "second")]
    (beside.images / requests[0].images[0].layout.image).unlink()
    worker = beside.worker()
    reader_of(worker).delays[1] = LONG
    inbox = worker.serve([[TEXT, *requests]])
    check_text_went_on(inbox, "second")
    for name in ("first", "second"):
        assert inbox.finished(name).reason is FinishReason.FAILED
        assert "missing or damaged" in inbox.finished(name).error


class FailsOnce(Engine):
    """Fails on the first step that has an image."""

    has_failed = False

    def dispatch(self, plan: StepPlan) -> Any:
        shown = [span for span in plan.spans if self._sequences[span.request_id].images is not None]
        if shown and not self.has_failed:
            self.has_failed = True
            raise RuntimeError("out of memory")
        return super().dispatch(plan)


def test_the_disk_is_not_read_at_every_poll(
    beside: VisionBeside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = beside.request("image", ONE, is_kept=False)
    beside.worker(tmp_path).serve([[request]])
    (file,) = (tmp_path / FEATURES).iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    worker = beside.worker(tmp_path)
    reader_of(worker).delays[0] = LONG
    reads: list[str] = []
    read = FeatureCache.find

    def find(features: FeatureCache, image: str) -> Any:
        reads.append(image)
        return read(features, image)

    monkeypatch.setattr(FeatureCache, "find", find)
    worker.serve([[TEXT, request]])
    assert 0 < len(reads) < 10


@pytest.mark.usefixtures("little_is_kept")
def test_a_failed_sequence_waits_for_its_images_before_its_retry(
    beside: VisionBeside,
) -> None:
    request = beside.request("images", TWO)
    expected = beside.worker().serve([[request]]).tokens("images")
    worker = forgetful(beside, engine=FailsOnce)
    reader_of(worker).delays[4] = LONG
    inbox = worker.serve([[TEXT, request]])
    check_text_went_on(inbox, "images")
    assert inbox.tokens("images") == expected


class AlwaysFails(Engine):
    """Fails on every step that has an image."""

    def dispatch(self, plan: StepPlan) -> Any:
        if any(self._sequences[span.request_id].images is not None for span in plan.spans):
            raise RuntimeError("out of memory")
        return super().dispatch(plan)


@pytest.mark.usefixtures("little_is_kept")
def test_a_sequence_that_always_fails_ends(beside: VisionBeside) -> None:
    worker = forgetful(beside, engine=AlwaysFails)
    inbox = worker.serve([[TEXT, beside.request("images", TWO)]])
    assert inbox.finished("images").reason is FinishReason.FAILED
    assert len(inbox.tokens("text")) == 30


def test_a_worker_that_waits_for_images_does_not_rest(
    beside: VisionBeside, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = beside.request("image", ONE, is_kept=False)
    worker = beside.worker()
    reader_of(worker).delays[0] = LONG
    open_at_rest: list[int] = []
    begin = WorkerLoop.__init__

    def make(loop: WorkerLoop, **parts: Any) -> None:
        inbox = parts["inbox"]
        begin(loop, on_rest=lambda: open_at_rest.append(len(inbox.open_requests())), **parts)

    monkeypatch.setattr(WorkerLoop, "__init__", make)
    worker.serve([[], [], [request]])
    assert set(open_at_rest) == {0}
