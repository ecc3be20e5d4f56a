"""Decodes and processes images in another process (`image_worker.py`), one at a time.

The device thread submits images and polls for results; it never waits. The process starts with the
first image and ends after a while without images. One that dies, hangs or is stopped is killed and
replaced, which affects only the image that it was processing. An image that has ended several
processes is refused. The limits on the time and memory of one image are in `image_worker.py`.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol, TypeAlias

import msgspec
import psutil

from holdfast.wire.images import ImageLayout, VisionInfo
from holdfast.worker.vision.image_worker import (
    HEAD_BYTES,
    MAX_MEMORY_BYTES,
    MAX_SECONDS,
    STARTED,
    ImageDone,
    ImageLost,
    ImageOutcome,
    ImageRefused,
    ImageTask,
    unpacked,
)

IDLE_SECONDS: Final = 300.0  # an idle process is ended after this time
STALL_SECONDS: Final = 20.0  # without any processor time: the process is stopped or blocked
_START_SECONDS: Final = 120.0  # of processor time
_CHECK_SECONDS: Final = 0.5  # time between checks of the process's resource use
_KILL_SECONDS: Final = 2.0
_MOST_DEATHS: Final = 4  # of image processes, caused by one image
_ATTEMPTS: Final = 2  # for one request
_READ_BYTES: Final = 1 << 16
_ENVIRONMENT: Final = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)

logger = logging.getLogger("holdfast.worker")


class ImageFile:
    """The output of a model's processor for an image, in an anonymous file."""

    def __init__(self, done: ImageDone, file: BinaryIO) -> None:
        """file: has the arrays; this object closes it."""
        self.layout: ImageLayout = done.layout
        self.nbytes = done.nbytes
        self._inputs = done.inputs
        self._file = file

    def inputs(self) -> Mapping[str, Any]:
        """The inputs of the vision tower, copied from the file. Device thread only."""
        if not self.nbytes:
            return unpacked(self._inputs, memoryview(b""))
        with (
            mmap.mmap(self._file.fileno(), self.nbytes, access=mmap.ACCESS_READ) as data,
            memoryview(data) as view,
        ):
            return unpacked(self._inputs, view)

    def close(self) -> None:
        self._file.close()


ImageResult: TypeAlias = ImageFile | ImageRefused | ImageLost


class ImageReader(Protocol):
    """Processes images. Device thread only."""

    @property
    def is_busy(self) -> bool:
        """Whether an image is queued or being processed."""

    def begin(self, image: str, *, max_pixels: int | None) -> None:
        """Queue an image, unless it is queued or being processed already."""

    def results(self) -> Sequence[tuple[str, ImageResult]]:
        """The results since the last call. Does not wait."""

    def close(self) -> None:
        """End the process."""


@dataclass(frozen=True, slots=True)
class _QueuedImage:
    """An image that waits to be processed, or is being processed."""

    image: str  # the name of its file
    max_pixels: int | None  # larger images are refused; None: only the limit of Pillow applies
    attempt: int = 1  # counts the processes in which it is tried


class ImageProcess:
    """An `ImageReader` that starts the process, and replaces it when it fails."""

    def __init__(
        self,
        model: Path,
        info: Callable[[], VisionInfo],
        *,
        images: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """model: the model's folder. info: how its prompts are written. images: the folder with the
        image files; results are written there, too.
        """
        self._model = model
        self._info = info
        self._images = images  # the folder
        self._clock = clock
        self._waiting: deque[_QueuedImage] = deque()
        self._current: _QueuedImage | None = None
        self._file: BinaryIO | None = None  # for the arrays of the current image
        self._process: _Process | None = None
        self._deaths: Counter[str] = Counter()  # processes that each image has ended
        self._results: list[tuple[str, ImageResult]] = []  # results that `results` has not returned
        self._last_used_at = clock()  # time of the last work

    @property
    def is_busy(self) -> bool:
        return self._current is not None or bool(self._waiting) or bool(self._results)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def begin(self, image: str, *, max_pixels: int | None) -> None:
        """Queue an image, unless it is queued or being processed already."""
        queued = (self._current, *self._waiting)
        if all(each is None or each.image != image for each in queued):
            self._waiting.append(_QueuedImage(image, max_pixels))
            self._advance()

    def results(self) -> Sequence[tuple[str, ImageResult]]:
        """The results since the last call. Does not wait."""
        self._advance()
        results = self._results
        self._results = []
        return results

    def close(self) -> None:
        """Kill the process, and forget all images."""
        if self._process is not None:
            self._process.kill()
            self._process = None
        if self._file is not None:
            self._file.close()
            self._file = None
        self._waiting.clear()
        self._current = None

    def _advance(self) -> None:
        """Take an answer, if there is one, and begin the next task."""
        if self._current is not None:
            self._take_answer(self._current)
        if self._current is None and self._waiting:
            self._begin_next()
        elif self._current is not None:
            self._last_used_at = self._clock()
        elif self._process is not None and self._clock() - self._last_used_at > IDLE_SECONDS:
            self._process.kill()
            self._process = None

    def _begin_next(self) -> None:
        """Send the first waiting image to the process, which is started if there is none."""
        queued = self._waiting.popleft()
        self._current = queued
        task = ImageTask(
            path=str(self._images / queued.image),
            image_name=queued.image,
            info=self._info(),
            max_pixels=queued.max_pixels,
        )
        try:
            self._images.mkdir(mode=0o700, parents=True, exist_ok=True)
            # closed by `ImageFile`, or when the image fails
            self._file = tempfile.TemporaryFile(dir=self._images)  # noqa: SIM115
            if self._process is None:
                self._process = _Process(self._model, clock=self._clock)
        except OSError as error:
            self._finish(ImageLost(reason=f"an image cannot be processed: {error.strerror}"))
            return
        try:
            self._process.send(task, self._file)
        except OSError:  # the process ended while idle: no image caused it
            self._discard_process(self._process, "it has ended")
            self._retry(queued, "it has ended")

    def _take_answer(self, queued: _QueuedImage) -> None:
        """Take the answer for the current image, if there is one; a failed process is replaced."""
        process = self._process
        assert process is not None, "an image is in progress without a process"
        try:
            outcome = process.answer()
        except _ProcessFailed as failure:
            self._handle_failure(process, str(failure))
            return
        if isinstance(outcome, ImageDone):
            assert self._file is not None, "the image has no file for its arrays"
            file, self._file = self._file, None
            self._finish(ImageFile(outcome, file))
        elif outcome is not None:
            self._finish(outcome)

    def _handle_failure(self, process: _Process, reason: str) -> None:
        """Kill the process, and retry its image once in another one."""
        queued = self._current
        assert queued is not None, "no image was being processed"
        self._discard_process(process, reason)
        if not process.has_started:
            lost = ImageLost(reason="the image process did not start; the log says why")
            self._results += [(each.image, lost) for each in self._waiting]
            self._waiting.clear()
            self._finish(lost)
            return
        self._deaths[queued.image] += 1
        if self._deaths[queued.image] >= _MOST_DEATHS:
            self._finish(
                ImageRefused(reason="the image cannot be processed: it crashes the decoder")
            )
        else:
            self._retry(queued, reason)

    def _discard_process(self, process: _Process, reason: str) -> None:
        """Kill the process; the next image starts another one."""
        logger.warning("the image process is replaced: %s", reason)
        process.kill()
        self._process = None

    def _retry(self, queued: _QueuedImage, reason: str) -> None:
        """Retry the current image in another process, unless it has had all its attempts."""
        if queued.attempt < _ATTEMPTS:
            self._close_file()
            self._current = None
            next_attempt = _QueuedImage(queued.image, queued.max_pixels, attempt=queued.attempt + 1)
            self._waiting.appendleft(next_attempt)
        else:
            self._finish(ImageLost(reason=f"the image process failed: {reason}; please try again"))

    def _finish(self, result: ImageResult) -> None:
        """Report the result of the current image."""
        assert self._current is not None, "no image was being processed"
        self._results.append((self._current.image, result))
        self._current = None
        self._close_file()

    def _close_file(self) -> None:
        """Close the file for the current image's arrays, unless an `ImageFile` has taken it over."""
        if self._file is not None:
            self._file.close()
            self._file = None


class _ProcessFailed(Exception):
    """The process ended, or used too much time or memory. The message says which."""


class _Process:
    """A running image process."""

    def __init__(self, model: Path, *, clock: Callable[[], float]) -> None:
        """Raises OSError if the process cannot be started."""
        self._link, process_link = socket.socketpair()
        with process_link:
            # -P: a module in the current folder must not shadow a standard library module
            program = (sys.executable, "-P", "-m", "holdfast.worker.vision.image_worker")
            try:
                self._process = subprocess.Popen(
                    (*program, str(model), str(process_link.fileno())),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[process_link.fileno()],
                    env={**os.environ, **_ENVIRONMENT},
                )
            except OSError:
                self._link.close()
                raise
        self._link.setblocking(False)
        self._clock = clock
        self._received = bytearray()
        self._limits = _ResourceLimits(self._process.pid, seconds=_START_SECONDS, clock=clock)
        self.has_started = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, task: ImageTask, file: BinaryIO) -> None:
        """Send a task, and the file for its arrays. Raises OSError if the process has ended."""
        packed = msgspec.msgpack.encode(task)
        message = len(packed).to_bytes(HEAD_BYTES, "big") + packed
        sent = socket.send_fds(self._link, [message], [file.fileno()])
        assert sent == len(message), "a task does not fit into the socket's buffer"
        if self.has_started:
            self._limits = _ResourceLimits(self.pid, seconds=MAX_SECONDS, clock=self._clock)

    def answer(self) -> ImageOutcome | None:
        """The answer to the task; None if there is none yet. Raises _ProcessFailed."""
        has_ended = self._receive()
        if not self.has_started and self._received:
            del self._received[: len(STARTED)]
            self.has_started = True
            self._limits = _ResourceLimits(self.pid, seconds=MAX_SECONDS, clock=self._clock)
        size = int.from_bytes(self._received[:HEAD_BYTES], "big")
        if len(self._received) < HEAD_BYTES or len(self._received) < HEAD_BYTES + size:
            if has_ended:
                raise _ProcessFailed("it has ended")
            self._limits.check()
            return None
        packed = bytes(self._received[HEAD_BYTES : HEAD_BYTES + size])
        self._received.clear()
        outcome: ImageOutcome = msgspec.msgpack.decode(packed, type=ImageOutcome)
        return outcome

    def _receive(self) -> bool:
        """Receive what the process has sent. Returns whether it has ended."""
        while True:
            try:
                part = self._link.recv(_READ_BYTES)
            except BlockingIOError:
                return False
            except ConnectionError:
                return True
            if not part:
                return True
            self._received += part

    def kill(self) -> None:
        """Kill the process. Waits for its end, but not for long."""
        self._process.kill()
        # it may be blocked in the kernel, for example by a dead disk
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_SECONDS)
        self._link.close()


class _ResourceLimits:
    """Checks the resources that a process uses from now on against the limits."""

    def __init__(self, pid: int, *, seconds: float, clock: Callable[[], float]) -> None:
        """seconds: the limit of processor time."""
        self._pid = pid
        self._limit_seconds = seconds
        self._clock = clock
        self._checked_at = clock()
        self._last_growth_at = clock()  # when its processor time was seen to grow
        # processor time: at the first check (None: not checked yet), and at the latest growth
        self._seconds_at_start: float | None = None
        self._used_seconds = 0.0

    def check(self) -> None:
        """Raise _ProcessFailed if a limit is exceeded."""
        now = self._clock()
        if now - self._checked_at < _CHECK_SECONDS:
            return
        self._checked_at = now
        try:
            process = psutil.Process(self._pid)
            times = process.cpu_times()
            resident_bytes = process.memory_info().rss
        except psutil.Error:
            return  # it has ended; reading from the socket will show that
        cpu_seconds = times.user + times.system
        if self._seconds_at_start is None:
            self._seconds_at_start = cpu_seconds
        if cpu_seconds > self._used_seconds:
            self._used_seconds = cpu_seconds
            self._last_growth_at = now
        # for systems that cannot limit the address space of a process
        if resident_bytes > MAX_MEMORY_BYTES:
            raise _ProcessFailed(f"it took more than {MAX_MEMORY_BYTES >> 30} GiB of memory")
        if cpu_seconds - self._seconds_at_start > self._limit_seconds:
            raise _ProcessFailed(f"it took more than {self._limit_seconds:g} s for an image")
        if now - self._last_growth_at > STALL_SECONDS:
            raise _ProcessFailed(f"it did nothing for {STALL_SECONDS:g} s")
