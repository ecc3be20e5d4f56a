"""The program that decodes and processes images for one worker, in a separate process.

Decoding and resizing a large image takes seconds and gigabytes, and the decoders are native code
that reads untrusted files. So they run neither on the device thread nor in the front. The worker
(`image_process.py`) may kill this process at any time. The process also limits its own memory and
processor time, and ends when the worker ends.

Tasks arrive over a socket, each with an open file into which the arrays are written.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias

import mlx.core as mx
import msgspec
import numpy as np
import psutil

from holdfast.models.image_files import ImageUnusable, open_image
from holdfast.wire.images import ImageLayout, VisionInfo
from holdfast.worker.vision import load
from holdfast.worker.vision.processor import ProcessedImage, Processor

HEAD_BYTES: Final = 8  # size of the length before a task or an answer
STARTED: Final = b"+"  # the first byte that the process writes
MAX_MEMORY_BYTES: Final = 6 << 30  # beyond what the process uses after its start
MAX_SECONDS: Final = 60  # of processor time, for one image
_LONGEST_REASON: Final = 200
_NICENESS: Final = 5  # text generation is more urgent than images
_BFLOAT16: Final = "bfloat16"  # numpy does not have it


class ImageTask(msgspec.Struct, frozen=True, kw_only=True):
    """An image to process."""

    path: str  # of the file with the encoded image
    image_name: str  # in hexadecimal digits; also the name of the file
    info: VisionInfo
    max_pixels: int | None


class PackedArray(msgspec.Struct, frozen=True, kw_only=True, tag="array"):
    """An array in the file of a task."""

    is_mlx: bool
    dtype: str
    shape: tuple[int, ...]
    start: int  # in bytes


class PackedList(msgspec.Struct, frozen=True, kw_only=True, tag="list"):
    """A list of packed values."""

    items: list[Packed]


class PackedPlain(msgspec.Struct, frozen=True, kw_only=True, tag="plain"):
    """A number, a text or None."""

    value: bool | int | float | str | None


Packed: TypeAlias = PackedArray | PackedList | PackedPlain


class ImageDone(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """An image was processed. inputs: for the vision tower; nbytes: of the file with their arrays."""

    layout: ImageLayout
    inputs: dict[str, Packed]
    nbytes: int


class ImageRefused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The contents of an image cannot be used, now or later."""

    reason: str


class ImageLost(msgspec.Struct, frozen=True, kw_only=True, tag="lost"):
    """An image could not be processed, but not because of its contents; a retry may work."""

    reason: str


ImageOutcome: TypeAlias = ImageDone | ImageRefused | ImageLost


def main() -> None:
    """Carry out tasks until the worker closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the server
    folder, descriptor = sys.argv[1:]
    link = socket.socket(fileno=int(descriptor))
    threading.Thread(target=_end_when_closed, args=(link,), daemon=True).start()
    mx.set_default_device(mx.cpu)
    os.nice(_NICENESS)
    _make_first_to_be_killed()
    processor = load.own_processor(Path(folder))
    _limit_memory()
    link.sendall(STARTED)
    decoder = msgspec.msgpack.Decoder(ImageTask)
    while True:
        head, descriptors, _, _ = socket.recv_fds(link, HEAD_BYTES, 1, socket.MSG_WAITALL)
        if not head:
            return
        task = decoder.decode(_receive_exactly(link, int.from_bytes(head, "big")))
        _limit_time()
        with open(descriptors[0], "wb") as file:
            answer = msgspec.msgpack.encode(carry_out(task, processor, file))
        link.sendall(len(answer).to_bytes(HEAD_BYTES, "big") + answer)


def carry_out(task: ImageTask, processor: Any, file: BinaryIO) -> ImageOutcome:
    """Decode and process an image, and write its arrays to a file. processor: mlx-vlm's."""
    try:
        picture = open_image(Path(task.path), max_pixels=task.max_pixels)
        processed = Processor(processor, task.info).process(task.image_name, picture)
    except ImageUnusable as refusal:
        return ImageRefused(reason=str(refusal))
    except OSError:
        return ImageLost(
            reason="the file of an image is missing or damaged; please send the request again"
        )
    except MemoryError:
        return ImageRefused(reason="the image takes too much memory to be processed")
    except Exception as error:  # third-party code that reads an untrusted image
        reason = " ".join(str(error).split())[:_LONGEST_REASON]
        return ImageRefused(reason=f"the model cannot use this image: {reason}")
    try:
        return _write_arrays(processed, file)
    except OSError as error:
        return ImageLost(reason=f"a processed image cannot be written: {error.strerror or error}")


def _write_arrays(processed: ProcessedImage, file: BinaryIO) -> ImageDone:
    """Write the inputs of the vision tower to the file of the task. Raises OSError."""
    inputs = {name: _pack(value, file) for name, value in processed.inputs.items()}
    file.flush()
    return ImageDone(layout=processed.layout, inputs=inputs, nbytes=file.tell())


def _pack(value: Any, file: BinaryIO) -> Packed:
    """Describe a value so that `_unpack` can restore it. Arrays are written to the file."""
    if isinstance(value, list | tuple):
        return PackedList(items=[_pack(each, file) for each in value])
    if isinstance(value, bool | int | float | str) or value is None:
        return PackedPlain(value=value)
    dtype = ""
    array = value
    if isinstance(value, mx.array):
        dtype = str(value.dtype).removeprefix("mlx.core.")
        array = np.array(value.view(mx.uint16) if dtype == _BFLOAT16 else value)
    array = np.ascontiguousarray(array)
    start = file.tell()
    file.write(array.data.cast("B") if array.size else b"")
    return PackedArray(
        is_mlx=isinstance(value, mx.array),
        dtype=dtype or str(array.dtype),
        shape=np.shape(value),
        start=start,
    )


def unpacked(inputs: Mapping[str, Packed], data: memoryview) -> dict[str, Any]:
    """The inputs of the vision tower, as the processor returned them. Device thread only.

    data: the file of the task. Arrays are copied.
    """
    return {name: _unpack(value, data) for name, value in inputs.items()}


def _unpack(packed: Packed, data: memoryview) -> Any:
    """The inverse of `_pack`. data: the file of the task."""
    if isinstance(packed, PackedList):
        return [_unpack(each, data) for each in packed.items]
    if isinstance(packed, PackedPlain):
        return packed.value
    is_bfloat16 = packed.dtype == _BFLOAT16
    array = np.frombuffer(
        data,
        dtype=np.dtype(np.uint16 if is_bfloat16 else packed.dtype.rstrip("_")),
        count=int(np.prod(packed.shape)),
        offset=packed.start if np.prod(packed.shape) else 0,
    ).reshape(packed.shape)
    if not packed.is_mlx:
        return array.copy()
    copied = mx.array(array)
    return copied.view(mx.bfloat16) if is_bfloat16 else copied


def _receive_exactly(link: socket.socket, size: int) -> bytes:
    """Receive `size` bytes. Raises EOFError if the other end closes the socket before."""
    received = bytearray()
    while len(received) < size:
        part = link.recv(size - len(received))
        if not part:
            raise EOFError
        received += part
    return bytes(received)


def _end_when_closed(link: socket.socket) -> None:
    """End this process when the other end of the socket is closed, even while it is busy."""
    hangup = select.poll()
    hangup.register(link, select.POLLHUP)
    while not any(event & (select.POLLHUP | select.POLLERR) for _, event in hangup.poll()):
        pass
    os._exit(0)


def _make_first_to_be_killed() -> None:
    """On Linux: if memory runs out, the kernel kills this process instead of the worker."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _limit_memory() -> None:
    """Limit the address space of this process, so that a huge image raises MemoryError."""
    used_bytes = psutil.Process().memory_info().vms
    with contextlib.suppress(ValueError, OSError):  # macOS does not limit the address space
        limit_bytes = used_bytes + MAX_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))


def _limit_time() -> None:
    """Limit the processor time of a task, in case the worker cannot."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit_seconds = int(usage.ru_utime + usage.ru_stime) + MAX_SECONDS + 5
    resource.setrlimit(
        resource.RLIMIT_CPU, (limit_seconds, resource.getrlimit(resource.RLIMIT_CPU)[1])
    )


if __name__ == "__main__":
    main()
