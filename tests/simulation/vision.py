"""Images in the simulated worker: the real image cache and vision model over a toy of mlx-vlm's, and
the image process as a process of the world, behind simulated sockets.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import itertools
import math
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias

import mlx.core as mx
import msgspec
import numpy as np

from holdfast.wire.images import VisionInfo
from holdfast.worker.engine.sequence import SequenceSpan
from holdfast.worker.vision import image_process
from holdfast.worker.vision.feature_cache import FeatureCache
from holdfast.worker.vision.image_process import ImageProcess
from holdfast.worker.vision.image_worker import HEAD_BYTES, STARTED, ImageTask, carry_out
from holdfast.worker.vision.images import WorkerImages
from holdfast.worker.vision.model import VisionModel
from holdfast.worker.vision.processor import Processor
from tests.simulation.disk import disk_now
from tests.simulation.links import LEAST_SECONDS, MOST_SECONDS
from tests.simulation.pictures import PLACEHOLDER, number_of, parts_of, pixels_of
from tests.simulation.world import Killed, Process, world

Vision: TypeAlias = Literal["", "one way", "both ways"]
VISION = VisionInfo(template_placeholder=PLACEHOLDER, written=PLACEHOLDER, placeholder=PLACEHOLDER)
RAM_BYTES, DISK_BYTES = 3000, 6000  # of features
STALL_SECONDS = 2.0  # in place of 20 s, in which the worker's loop polls 20,000 times
TASK_SECONDS = 5  # in place of 60 s
_IMAGE_TOKEN = 0  # the placeholder's


class ImageFault(enum.Enum):
    """How the image process fails."""

    DIES = "dies"
    HANGS = "hangs"
    SPINS = "computes without end"
    SLOW = "is slow"
    NO_START = "does not start"
    NO_FEATURES = "is not to blame, but the vision tower fails"


_OF_A_TASK = {ImageFault.DIES, ImageFault.HANGS, ImageFault.SPINS, ImageFault.SLOW}


# -- the model


class _ToyModel:
    """In place of a model of mlx-vlm."""

    def __init__(self, weights: str, vision: Vision) -> None:
        self._weights, self._worker = weights, world().here
        both_ways = "vision" if vision == "both ways" else None
        text_config = SimpleNamespace(use_bidirectional_attention=both_ways)
        self.config = SimpleNamespace(image_token_id=_IMAGE_TOKEN, text_config=text_config)
        self.language_model = SimpleNamespace()

    def get_input_embeddings(self, ids: mx.array, *, mask: mx.array, pixels: mx.array) -> Any:
        """The features of an image: float32 [1, tokens, parts]."""
        found = world()
        found.block(found.random.uniform(0.0005, 0.02))
        if _planned(self._worker, {ImageFault.NO_FEATURES}):
            raise TowerFailed("the simulated vision tower failed")
        parts = parts_of(np.array(pixels).tobytes(), ids.size, self._weights)
        embeddings = mx.array(np.array([parts], np.float32))
        return SimpleNamespace(to_dict=lambda: {"inputs_embeds": embeddings})


class TowerFailed(RuntimeError):
    """The vision tower fails, as a real one does with a RuntimeError."""


class _ToyProcessor:
    """In place of a processor of mlx-vlm: a token for each pixel."""

    def __init__(self) -> None:
        self.tokenizer = SimpleNamespace(
            all_special_ids=[_IMAGE_TOKEN],
            added_tokens_decoder={},
            bos_token_id=None,
            eos_token_id=None,
        )

    def __call__(self, *, text: Sequence[str], images: Sequence[Any]) -> Mapping[str, Any]:
        (picture,) = images
        ids = [_IMAGE_TOKEN] * (picture.width * picture.height)
        return {"input_ids": [ids], "pixels": mx.array(np.frombuffer(pixels_of(picture), np.uint8))}


def open_images(
    folder: Path, *, weights: str, fingerprint: str, vision: Vision
) -> WorkerImages | None:
    """The images of a worker; None if its model has no vision. folder: of the image files."""
    if not vision:
        return None
    return WorkerImages(
        VisionModel(_ToyModel(weights, vision)),
        Processor(_ToyProcessor(), VISION),
        reader=ImageProcess(Path("/models"), lambda: VISION, images=folder),
        features=FeatureCache(
            folder / "features",
            fingerprint=hashlib.sha256(fingerprint.encode()).hexdigest(),
            ram_bytes=RAM_BYTES,
            disk_bytes=DISK_BYTES,
        ),
    )


def with_images(each: SequenceSpan, tokens: list[int]) -> list[int]:
    """The tokens of a span, with what the model sees in place of those of images."""
    images = each.sequence.images
    if images is None:
        return tokens
    start, end = each.span.start, each.span.start + len(tokens)
    seen = list(tokens)
    for index, image in images.overlapping(start, len(tokens)):
        if images.attend_both_ways:
            assert start <= image.start and image.end <= end, "a span divides an image"
        rows = np.array(images.features[index].by_token["inputs_embeds"])
        assert len(rows) == image.end - image.start, "these are the features of another image"
        for place, row in enumerate(rows, image.start):
            if start <= place < end:
                seen[place - start] = number_of([int(part) for part in row])
    return seen


# -- the image process


class _End:
    """One end of a pair of sockets. To its owner it is a file, which its process's death closes."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.peer: _End = self
        self.process: Process | None = None  # an image process, if it has this end
        self.received = bytearray()
        self.descriptors: list[int] = []
        self.on_news: Callable[[], None] = lambda: None
        self.is_closed = self.peer_is_closed = False
        self._arrives_at = 0.0

    def fileno(self) -> int:
        return self.number

    def setblocking(self, blocks: bool) -> None:
        pass

    def send(self, data: bytes) -> None:
        """Raises OSError if the other end is closed."""
        if self.peer.is_closed:
            raise BrokenPipeError
        self._later(lambda: self.peer._arrive(data))

    def recv(self, size: int) -> bytes:
        """Raises BlockingIOError."""
        if not self.received and not self.peer_is_closed:
            raise BlockingIOError
        data = bytes(self.received[:size])
        del self.received[:size]
        return data

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._later(self.peer._notice_end)

    def __enter__(self) -> _End:
        return self

    def __exit__(self, *_: object) -> None:
        """The parent closes its copy of an end that its child has."""

    def _later(self, act: Callable[[], None]) -> None:
        found = world()
        at = found.now + found.random.uniform(LEAST_SECONDS, MOST_SECONDS)
        self._arrives_at = at = max(at, self._arrives_at)  # in order
        found.after(at - found.now, act)

    def _arrive(self, data: bytes) -> None:
        self.received += data
        self.on_news()

    def _notice_end(self) -> None:
        self.peer_is_closed = True
        self.on_news()


_numbers = itertools.count(1_500_000)
_ends: dict[int, _End] = {}  # of image processes, by number


def _socketpair() -> tuple[_End, _End]:
    one, other = _End(), _End()
    one.peer, other.peer = other, one
    _ends[other.number] = other
    world().here.ends.append(one.close)
    return one, other


def _send_fds(link: _End, messages: Sequence[bytes], descriptors: Sequence[int]) -> int:
    (message,), (descriptor,) = messages, descriptors
    disk, process = disk_now(), link.peer.process
    assert disk is not None and process is not None
    if process.is_dead:
        raise BrokenPipeError
    link.peer.descriptors.append(disk.duplicate(descriptor, process))
    link.send(message)
    return len(message)


class _Program:
    """An image process, in place of `subprocess.Popen`."""

    def __init__(self, command: Sequence[str], **_: Any) -> None:
        found = world()
        self.worker = found.here
        self._machine = _machines[self.worker]
        if self._machine.failing_starts:
            found.on_fault(self.worker, "no image process starts")
            raise OSError(11, os.strerror(11))
        self.link = _ends[int(command[-1])]
        self.process = found.process(f"images of {self.worker.name}")
        self.link.process = self.process
        self.pid = self.process.pid
        self.is_working = False  # without a fault
        self._work_began = -math.inf  # the latest piece of work
        self._work_seconds = self._earlier_seconds = 0.0
        self.process.ends.append(self.link.close)
        _programs[self.pid] = self
        task = self.process.spawn(self._main, "main")
        self.link.on_news = lambda: self._look(task)

    def _look(self, task: Any) -> None:
        """Continue with a message, or end with the worker."""
        if self.link.peer_is_closed:
            self.process.kill()
        elif not self.process.is_dead:
            world().wake(task)

    def kill(self) -> None:
        world().on_kill(self.process)
        self.process.kill()

    def wait(self, seconds: float) -> None:
        pass

    @property
    def cpu_seconds(self) -> float:
        """The processor time that it has used."""
        return self._earlier_seconds + min(world().now - self._work_began, self._work_seconds)

    def _work(self, seconds: float) -> None:
        self._earlier_seconds += self._work_seconds
        self._work_began, self._work_seconds = world().now, seconds
        world().block(seconds)

    def _main(self) -> None:
        with contextlib.suppress(OSError):  # it ends, as the real one would
            self._serve()
        self.process.exit(1)
        raise Killed

    def _serve(self) -> None:
        found = world()
        self._work(found.random.uniform(0.05, 1.0))
        if _planned(self.worker, {ImageFault.NO_START}):
            return
        self.link.send(STARTED)
        while True:
            while len(self.link.received) < HEAD_BYTES:
                found.block()
            size = int.from_bytes(self.link.recv(HEAD_BYTES), "big")
            task = msgspec.msgpack.decode(self.link.recv(size), type=ImageTask)
            self._carry_out(task, self.link.descriptors.pop(0))

    def _carry_out(self, task: ImageTask, descriptor: int) -> None:
        found = world()
        fault = _planned(self.worker, _OF_A_TASK)
        self.is_working = fault is None
        if fault is not ImageFault.SLOW and fault is not None:
            self._machine.image_faults_of[task.image_name] += 1
        if fault is ImageFault.HANGS:
            found.block()
        self._work({ImageFault.SPINS: 1e9, ImageFault.SLOW: found.random.uniform(0.5, 4.0)}.get(
            fault, found.random.uniform(0.001, 0.03)
        ))  # fmt: skip
        with open(descriptor, "wb") as file:
            answer = msgspec.msgpack.encode(carry_out(task, _ToyProcessor(), file))
        message = len(answer).to_bytes(HEAD_BYTES, "big") + answer
        if fault is ImageFault.DIES:
            self.link.send(message[: found.random.randrange(len(message))])
            self.process.kill()
            found.block()
        self.is_working = False
        half = found.random.randrange(1, len(message))
        self.link.send(message[:half])
        found.yield_now()
        self.link.send(message[half:])


def program_of(process: Process) -> _Program | None:
    """The image process that a process of the world is."""
    return _programs.get(process.pid)


def _planned(worker: Process, kinds: Set[ImageFault]) -> ImageFault | None:
    """The next planned fault of these kinds, which happens now; None if there is none."""
    faults = _machines[worker].image_faults
    for fault in faults:
        if fault in kinds:
            faults.remove(fault)
            world().on_fault(worker, f"the image process {fault.value}")
            world().tell(f"the image process of {worker.name} {fault.value}")
            return fault
    return None


_programs: dict[int, _Program] = {}
_machines: dict[Process, Any] = {}  # of workers


def belongs_to(machine: Any, worker: Process) -> None:
    """Let a worker start image processes on a machine."""
    _machines[worker] = machine


class _Measured:
    """In place of `psutil.Process`."""

    def __init__(self, pid: int) -> None:
        self._program = _programs[pid]
        if self._program.process.is_dead:
            raise _Gone

    def cpu_times(self) -> SimpleNamespace:
        return SimpleNamespace(user=self._program.cpu_seconds, system=0.0)

    def memory_info(self) -> SimpleNamespace:
        return SimpleNamespace(rss=1 << 20)


class _Gone(Exception):
    """In place of `psutil.Error`."""


def _run_processor(processor: Processor, pictures: Sequence[Any]) -> Mapping[str, Any]:
    """In place of a method that converts arrays with mlx-vlm, which may not be installed."""
    text = processor.info.template_placeholder * len(pictures)
    return dict(processor._processor(text=[text], images=list(pictures)))


def install() -> None:
    """Replace the calls that start the image process, connect to it and measure it."""
    image_process.socket = SimpleNamespace(socketpair=_socketpair, send_fds=_send_fds)  # type: ignore[assignment]
    image_process.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=_Program, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
    image_process.psutil = SimpleNamespace(Process=_Measured, Error=_Gone)  # type: ignore[assignment]
    image_process.STALL_SECONDS = STALL_SECONDS  # type: ignore[misc]
    image_process.MAX_SECONDS = TASK_SECONDS  # type: ignore[misc]
    Processor._run_processor = _run_processor  # type: ignore[method-assign]
