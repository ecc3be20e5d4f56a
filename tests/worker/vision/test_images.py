"""Questions about images: one image is processed per call, and no image ends the worker."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from holdfast.wire.images import ImageCommand
from tests.fakes.images import broken_images, png
from tests.fakes.vision_worker import VisionBeside


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> VisionBeside:
    return VisionBeside.load("qwen2_5_vl", tmp_path_factory.mktemp("vision"))


def kept(folder: Path, data: bytes) -> str:
    name = hashlib.sha256(data).hexdigest()
    (folder / name).write_bytes(data)
    return name


def test_one_call_processes_one_image(qwen: VisionBeside) -> None:
    images = qwen.worker_images()
    names = tuple(kept(qwen.images, png(seed)) for seed in range(3))
    command = ImageCommand(images=names)
    assert images.answer(command) is None
    assert images.answer(command) is None
    answer = images.answer(command)
    assert answer is not None
    assert tuple(layout.image for layout in answer.layouts) == names


def test_questions_may_be_asked_beside_each_other(qwen: VisionBeside) -> None:
    images = qwen.worker_images()
    first, second = (kept(qwen.images, png(seed)) for seed in (4, 5))
    one, other = ImageCommand(images=(first, second)), ImageCommand(images=(second,))
    assert images.answer(one) is None
    found = images.answer(other)
    assert found is not None
    assert [layout.image for layout in found.layouts] == [second]
    both = images.answer(one)
    assert both is not None
    assert [layout.image for layout in both.layouts] == [first, second]


def test_a_question_without_images_is_answered(qwen: VisionBeside) -> None:
    answer = qwen.worker_images().answer(ImageCommand(images=()))
    assert answer is not None
    assert not answer.layouts
    assert not answer.failures


@pytest.mark.parametrize("kind", broken_images())
def test_a_broken_file_has_a_reason_instead_of_a_layout(qwen: VisionBeside, kind: str) -> None:
    data, _ = broken_images()[kind]
    images = qwen.worker_images()
    answer = images.answer(ImageCommand(images=(kept(qwen.images, data),)))
    assert answer is not None
    # too many pixels for the front's limit in its tests are no obstacle for a model
    assert answer.failures or kind in (
        "PNG bomb",
        "slightly too large",
        "thin",
        "tall",
        "endless scans",
    )


def test_what_is_kept_is_freed_when_memory_is_short(qwen: VisionBeside) -> None:
    images = qwen.worker_images()
    name = kept(qwen.images, png(7))
    images.answer(ImageCommand(images=(name,)))
    images.drop_kept()
    (qwen.images / name).unlink()
    answer = images.answer(ImageCommand(images=(name,)))
    assert answer is not None
    assert "missing or damaged" in answer.failures[name]
