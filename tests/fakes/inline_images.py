"""Processes images in the test's own process, with the code of the image process."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from holdfast.worker.vision.image_process import ImageFile, ImageResult
from holdfast.worker.vision.image_worker import ImageDone, ImageTask, carry_out
from holdfast.worker.vision.processor import Processor


class InlineImages:
    """An ImageReader without a process. Each call of `results` processes one image."""

    def __init__(self, processor: Processor, images: Path) -> None:
        self._processor = processor
        self._images = images
        self._waiting: dict[str, int | None] = {}
        self.begun: list[str] = []  # each processed image
        # this many calls of `results` return none before the first image, the second, ...
        self.delays: dict[int, int] = {}

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting)

    def begin(self, image: str, *, max_pixels: int | None) -> None:
        self._waiting.setdefault(image, max_pixels)

    def results(self) -> Sequence[tuple[str, ImageResult]]:
        """At most one."""
        if not self._waiting:
            return []
        number = len(self.begun)
        if self.delays.get(number):
            self.delays[number] -= 1
            return []
        image = next(iter(self._waiting))
        max_pixels = self._waiting.pop(image)
        self.begun.append(image)
        task = ImageTask(
            path=str(self._images / image),
            image_name=image,
            info=self._processor.info,
            max_pixels=max_pixels,
        )
        file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `ImageFile`
        outcome = carry_out(task, self._processor._processor, file)
        if isinstance(outcome, ImageDone):
            return [(image, ImageFile(outcome, file))]
        file.close()
        return [(image, outcome)]

    def close(self) -> None:
        self._waiting.clear()
