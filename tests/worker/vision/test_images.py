"""Image commands and image features: nothing waits for an image, and no image ends the worker."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from holdfast.errors import WorkerUnavailable
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.images import ImageAnswer, ImageCommand, ImageSpan
from holdfast.wire.requests import TokenIds
from holdfast.worker.vision.images import WorkerImages
from tests.fakes.caching_worker import greedy
from tests.fakes.images import broken_images, png
from tests.fakes.vision_worker import VisionBeside, keep_image


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> VisionBeside:
    return VisionBeside.load("qwen2_5_vl", tmp_path_factory.mktemp("vision"))


def answer_of(images: WorkerImages, *names: str, max_pixels: int | None = None) -> ImageAnswer:
    command = ImageCommand(images=names, max_pixels=max_pixels)
    images.request_layouts(command)
    while not (answers := list(images.answers())):
        pass
    (answer,) = answers
    assert answer.call_id == command.call_id
    return answer


def prompt_of(images: WorkerImages, *names: str) -> SequenceRequest:
    """A prompt that consists of these images."""
    spans = []
    end = 0
    for layout in answer_of(images, *names).layouts:
        spans.append(ImageSpan(start=end, layout=layout))
        end = spans[-1].end
    return greedy("r", TokenIds.of([1] * (end + 1)), images=tuple(spans))


def test_a_question_is_answered_when_its_images_are_processed(qwen: VisionBeside) -> None:
    images = qwen.worker_images()
    names = tuple(keep_image(qwen.images, png(seed)) for seed in range(3))
    command = ImageCommand(images=names)
    images.request_layouts(command)
    assert list(images.answers()) == []
    assert images.is_busy
    while not (answers := list(images.answers())):
        pass
    (answer,) = answers
    assert tuple(layout.image for layout in answer.layouts) == names
    assert not images.is_busy
    assert list(images.answers()) == []  # answered once
    again = answer_of(images, *names)
    assert again == msgspec.structs.replace(answer, call_id=again.call_id)


def test_questions_may_be_concurrent(qwen: VisionBeside) -> None:
    images = qwen.worker_images()
    first, second, third = (keep_image(qwen.images, png(seed)) for seed in (4, 5, 6))
    one, other = ImageCommand(images=(first, second)), ImageCommand(images=(second, third))
    images.request_layouts(one)
    images.request_layouts(other)
    found: dict[str, ImageAnswer] = {}
    while len(found) < 2:
        found |= {answer.call_id: answer for answer in images.answers()}
    assert [layout.image for layout in found[one.call_id].layouts] == [first, second]
    assert [layout.image for layout in found[other.call_id].layouts] == [second, third]


def test_an_image_is_processed_once_for_question_and_prompt(qwen: VisionBeside) -> None:
    images = qwen.worker_images()
    names = [keep_image(qwen.images, png(seed)) for seed in (7, 8)]
    request = prompt_of(images, *names)
    prepared: set[str] = set()
    assert images.prepare(request, start=0, prepared=prepared)
    assert images.figures.encoded == 1  # one per call
    assert images.unprepared(request, start=0, prepared=prepared)
    assert images.prepare(request, start=0, prepared=prepared)
    assert not images.unprepared(request, start=0, prepared=prepared)
    assert not images.prepare(request, start=0, prepared=prepared)
    images.provide(images.open(request), start=0, tokens=len(request.prompt_token_ids))
    assert images.figures.encoded == 2
    assert images._reader.begun == names  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_stored", [False, True])
def test_images_whose_features_exceed_the_memory_are_processed_once(
    qwen: VisionBeside, tmp_path: Path, is_stored: bool
) -> None:
    images = qwen.worker_images(tmp_path if is_stored else None, ram_bytes=1)
    names = [keep_image(qwen.images, png(seed)) for seed in range(20, 24)]
    request = prompt_of(images, *names)
    prepared: set[str] = set()
    while images.unprepared(request, start=0, prepared=prepared):
        images.prepare(request, start=0, prepared=prepared)
    sequence = images.open(request)
    for span in request.images:
        images.provide(sequence, start=span.start, tokens=1)
    assert images._reader.begun == names  # type: ignore[attr-defined]


def test_images_within_the_cached_prefix_are_not_prepared(qwen: VisionBeside) -> None:
    images = qwen.worker_images()
    names = [keep_image(qwen.images, png(seed)) for seed in (9, 10)]
    request = prompt_of(images, *names)
    (missing,) = images.unprepared(request, start=request.images[0].end, prepared=())
    assert missing.image == names[1]
    assert not images.unprepared(request, start=request.images[1].end, prepared=())


def test_a_lost_image_costs_one_request(qwen: VisionBeside) -> None:
    images = qwen.worker_images()
    name = keep_image(qwen.images, png(11))
    request = prompt_of(images, name)
    images.free_cached()
    (qwen.images / name).unlink()
    prepared: set[str] = set()
    while images.unprepared(request, start=0, prepared=prepared):
        assert not images.prepare(request, start=0, prepared=prepared)
    with pytest.raises(WorkerUnavailable, match="missing or damaged"):
        images.provide(images.open(request), start=0, tokens=1)
    keep_image(qwen.images, png(11))
    sequence = images.open(request)
    while not images.prepare_span(sequence, start=0, tokens=1):
        pass
    images.provide(sequence, start=0, tokens=1)


def test_the_features_of_one_image_are_computed_between_two_steps(qwen: VisionBeside) -> None:
    images = qwen.worker_images()
    names = [keep_image(qwen.images, png(seed)) for seed in (40, 41, 42)]
    sequences = [images.open(prompt_of(images, name)) for name in names]
    computed = []
    for _ in range(4):
        images.poll()
        before = images.figures.encoded
        able = [images.prepare_span(sequence, start=0, tokens=1) for sequence in sequences]
        computed.append((images.figures.encoded - before, sum(able)))
    assert computed == [(1, 1), (1, 2), (1, 3), (0, 3)]


def test_an_image_with_too_many_pixels_is_refused(qwen: VisionBeside) -> None:
    name = keep_image(qwen.images, png(12))
    answer = answer_of(qwen.worker_images(), name, max_pixels=48 * 32 - 1)
    assert "at most 1,535 are allowed" in answer.failures[name]


def test_a_question_without_images_is_answered(qwen: VisionBeside) -> None:
    answer = answer_of(qwen.worker_images())
    assert not answer.layouts
    assert not answer.failures


@pytest.mark.parametrize("kind", broken_images())
def test_a_broken_file_has_a_reason_instead_of_a_layout(qwen: VisionBeside, kind: str) -> None:
    data, _ = broken_images()[kind]
    answer = answer_of(qwen.worker_images(), keep_image(qwen.images, data))
    # too many pixels for the front's limit in its tests are fine for a model
    assert answer.failures or kind in ("PNG bomb", "slightly too large")


def test_cached_images_are_freed_when_memory_is_short(qwen: VisionBeside) -> None:
    images = qwen.worker_images()
    names = [keep_image(qwen.images, png(seed)) for seed in (13, 14)]
    answer_of(images, *names)
    files = list(images._files.values())
    images.free_cached()
    assert all(file._file.closed for file in files)
    assert not images._files
