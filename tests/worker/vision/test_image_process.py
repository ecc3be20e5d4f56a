"""The process that decodes images: its results and its failures."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import psutil
import pytest

from holdfast.models.image_files import open_image
from holdfast.worker.vision import image_process, load
from holdfast.worker.vision.feature_cache import FeatureCache
from holdfast.worker.vision.image_process import ImageFile, ImageProcess, ImageResult
from holdfast.worker.vision.image_worker import (
    STARTED,
    ImageDone,
    ImageLost,
    ImageRefused,
    ImageTask,
    carry_out,
)
from holdfast.worker.vision.images import WorkerImages
from holdfast.worker.vision.model import VisionModel
from tests.fakes.images import bomb, broken_images, png
from tests.fakes.server_process import until
from tests.fakes.vision_models import FAMILIES, write_vision_model
from tests.fakes.vision_worker import VisionBeside, keep_image

FAMILY = "qwen2_5_vl"


class Clock:
    """The real time plus an offset."""

    added = 0.0

    def __call__(self) -> float:
        return self.added


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> VisionBeside:
    return VisionBeside.load(FAMILY, tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def shared(beside: VisionBeside, clock: Clock) -> Iterator[ImageProcess]:
    process = process_of(beside, clock=clock)
    yield process
    process.close()


def process_of(beside: VisionBeside, **options: Any) -> ImageProcess:
    model = beside.images.parent / "model"
    return ImageProcess(model, lambda: beside.processor.info, images=beside.images, **options)


def result_of(process: ImageProcess, image: str) -> ImageResult:
    process.begin(image, max_pixels=None)
    found: dict[str, ImageResult] = {}

    def is_there() -> bool:
        found.update(process.results())
        return image in found

    until(is_there, "an image to be processed")
    return found[image]


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if not isinstance(theirs, mx.array | np.ndarray):
        return bool(ours == theirs)
    is_equal = type(ours) is type(theirs) and ours.dtype == theirs.dtype
    return is_equal and ours.shape == theirs.shape and bool((ours == theirs).all())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_result_equals_that_of_the_models_processor(family: str, tmp_path: Path) -> None:
    folder = write_vision_model(tmp_path / "model", family)
    model = load.build(folder)
    processor = load.load_processor(folder, model)
    path = tmp_path / "image.png"
    path.write_bytes(png(3, size=(90, 50)))
    expected = processor.process("ab", open_image(path))
    with tempfile.TemporaryFile() as file:
        task = ImageTask(path=str(path), image_name="ab", info=processor.info, max_pixels=None)
        done = carry_out(task, processor._processor, file)
        assert isinstance(done, ImageDone), done
        found = ImageFile(done, file)
        inputs = found.inputs()
    assert found.layout == expected.layout
    assert inputs.keys() == expected.inputs.keys()
    for name, value in expected.inputs.items():
        assert same(inputs[name], value), name


def test_the_process_gives_the_same_images_as_the_worker(
    beside: VisionBeside, shared: ImageProcess
) -> None:
    name = keep_image(beside.images, png(1))
    expected = beside.processor.process(name, open_image(beside.images / name))
    for _ in range(2):  # the second time, it runs already
        found = result_of(shared, name)
        assert isinstance(found, ImageFile)
        assert found.layout == expected.layout
        assert all(same(found.inputs()[each], value) for each, value in expected.inputs.items())
        found.close()
    assert not shared.is_busy


@pytest.mark.parametrize("kind", ["text", "truncated PNG", "wide bomb"])
def test_a_broken_image_is_refused_and_the_process_continues(
    beside: VisionBeside, shared: ImageProcess, kind: str
) -> None:
    data, reason = broken_images()[kind]
    pid = shared.pid
    found = result_of(shared, keep_image(beside.images, data))
    assert isinstance(found, ImageRefused)
    assert reason in found.reason
    assert pid in (None, shared.pid)


def test_an_image_without_a_file_is_lost(shared: ImageProcess) -> None:
    found = result_of(shared, "0" * 64)
    assert isinstance(found, ImageLost)
    assert "missing or damaged" in found.reason


def test_a_killed_process_is_replaced(beside: VisionBeside, shared: ImageProcess) -> None:
    result_of(shared, keep_image(beside.images, png(2)))
    assert shared.pid is not None
    before = shared.pid
    os.kill(before, signal.SIGKILL)
    found = result_of(shared, keep_image(beside.images, png(3)))
    assert isinstance(found, ImageFile)
    assert shared.pid != before


def test_an_image_is_tried_again_if_its_process_starts_and_dies_between_two_polls(
    beside: VisionBeside,
) -> None:
    image = keep_image(beside.images, png(9))
    process = process_of(beside)
    process.begin(image, max_pixels=None)
    assert process._process is not None and process.pid is not None
    link = process._process._link

    def has_started() -> bool:
        with contextlib.suppress(BlockingIOError):
            return link.recv(1, socket.MSG_PEEK) == STARTED
        return False

    until(has_started, "the image process to start")
    os.kill(process.pid, signal.SIGKILL)
    psutil.Process(process.pid).wait()
    assert isinstance(result_of(process, image), ImageFile)
    process.close()


@pytest.mark.slow
def test_an_image_that_kills_processes_is_lost_then_refused(
    beside: VisionBeside, shared: ImageProcess
) -> None:
    name, other = keep_image(beside.images, bomb(6000, 6000)), keep_image(beside.images, png(4))
    for expected in (ImageLost, ImageRefused):
        shared.begin(name, max_pixels=None)
        shared.begin(other, max_pixels=None)
        found: dict[str, ImageResult] = {}
        while name not in found:
            running = shared._process
            if running is not None and running.has_started:  # so that the image is blamed
                os.kill(running.pid, signal.SIGKILL)
            found.update(shared.results())
        assert isinstance(found[name], expected)
        assert isinstance(result_of(shared, other), ImageFile)


def test_a_stopped_process_is_replaced(
    beside: VisionBeside, shared: ImageProcess, clock: Clock
) -> None:
    result_of(shared, keep_image(beside.images, png(5)))
    stopped = shared.pid
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)
    name = keep_image(beside.images, png(6))
    shared.begin(name, max_pixels=None)
    clock.added += 1  # its processor time so far
    assert shared.results() == []
    clock.added += image_process.STALL_SECONDS + 1
    assert shared.results() == []  # tried again in another process
    assert not psutil.pid_exists(stopped)
    assert isinstance(result_of(shared, name), ImageFile)


def test_an_idle_process_is_ended(beside: VisionBeside, shared: ImageProcess, clock: Clock) -> None:
    result_of(shared, keep_image(beside.images, png(7)))
    pid = shared.pid
    assert pid is not None
    features = FeatureCache(None, fingerprint="", ram_bytes=1, disk_bytes=1)
    assert isinstance(beside.loaded.model, VisionModel)
    images = WorkerImages(beside.loaded.model, beside.processor, reader=shared, features=features)
    images.poll()
    assert shared.pid == pid
    clock.added += image_process.IDLE_SECONDS + 1
    images.poll()
    assert shared.pid is None
    assert not psutil.pid_exists(pid)


def test_a_process_that_cannot_start_fails_all_images(beside: VisionBeside, tmp_path: Path) -> None:
    process = ImageProcess(tmp_path, lambda: beside.processor.info, images=beside.images)
    names = [keep_image(beside.images, png(seed)) for seed in range(3)]
    for name in names:
        process.begin(name, max_pixels=None)
    found: dict[str, ImageResult] = {}

    def is_done() -> bool:
        found.update(process.results())
        return len(found) == 3

    until(is_done, "the process to fail")
    for each in found.values():
        assert isinstance(each, ImageLost)
        assert "did not start" in each.reason
    assert not process.is_busy


def test_closing_leaves_no_process_and_no_file(beside: VisionBeside) -> None:
    process = process_of(beside)
    before = {*beside.images.iterdir()}
    name = keep_image(beside.images, bomb(3000, 3000))
    process.begin(name, max_pixels=None)
    pid = process.pid
    assert pid is not None
    process.close()
    assert not psutil.pid_exists(pid)
    assert {*beside.images.iterdir()} - before == {beside.images / name}


def test_the_process_ends_with_its_worker_even_while_busy(beside: VisionBeside) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        program = (sys.executable, "-P", "-m", "holdfast.worker.vision.image_worker")
        model = beside.images.parent / "model"
        process = subprocess.Popen(
            (*program, str(model), str(theirs.fileno())), pass_fds=[theirs.fileno()]
        )
    ours.close()
    assert process.wait(60) == 0
