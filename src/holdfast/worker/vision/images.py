"""The images of prompts in a worker: how many tokens they take, and their features.

Images are decoded and processed in another process (`image_process.py`); only the vision tower runs
here. Device thread only.

An image is identified by its name, a hash in hexadecimal digits (`image` in the code). Its layout
is the tokens that it takes in a prompt. It is unusable if its contents are refused, or if it could
not be processed for another reason (it is then lost, until it is tried again).
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import mlx.core as mx

from holdfast.errors import WorkerUnavailable
from holdfast.models.image_files import ImageUnusable
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.events import ImageFigures
from holdfast.wire.images import ImageAnswer, ImageCommand, ImageLayout, VisionInfo
from holdfast.worker.vision.feature_cache import FeatureCache
from holdfast.worker.vision.image_process import ImageFile, ImageReader
from holdfast.worker.vision.image_worker import ImageLost, ImageRefused
from holdfast.worker.vision.model import (
    ImageFeatures,
    SequenceImages,
    UnsupportedVision,
    VisionModel,
)
from holdfast.worker.vision.processor import ProcessedImage, Processor

if TYPE_CHECKING:
    from PIL import Image

MOST_INPUT_BYTES = 256 << 20  # inputs of the vision tower, in memory
_MOST_FILE_BYTES = 1 << 30  # of processed images, on disk
_MOST_FILES = 64
_MOST_LAYOUTS = 10_000  # in memory
_NOT_PROCESSED = "an image is not processed yet; please try again"
_PREPARED_AHEAD = 4  # images of a prompt that are processed before the first one has features


@dataclass(slots=True)
class _Question:
    """A command that waits for its images to be processed.

    lost: the images that could not be processed meanwhile, and why. They are kept for each command,
    because a later command has them tried again.
    """

    command: ImageCommand
    lost: dict[str, str] = field(default_factory=dict)


class WorkerImages:
    """Answers questions about images, and provides the features of those in prompts."""

    def __init__(
        self,
        model: VisionModel,
        processor: Processor,
        *,
        reader: ImageReader,
        features: FeatureCache,
    ) -> None:
        """processor: for the pictures of the load-time probe. reader: for all other images."""
        self._model = model
        self._processor = processor
        self._reader = reader
        self._features = features
        self._pictures: dict[str, ProcessedImage] = {}  # of the load-time probe
        self._files: OrderedDict[str, ImageFile] = OrderedDict()
        self._layouts: OrderedDict[str, ImageLayout | ImageRefused] = OrderedDict()
        self._lost: dict[str, str] = {}  # images that could not be processed recently, and why
        self._questions: dict[str, _Question] = {}  # without an answer yet, by call id
        self._processing: set[str] = set()  # by `prepare_span`, without a result yet
        self._may_compute = True  # whether `prepare_span` has computed nothing since `poll`
        self.figures = ImageFigures()

    @property
    def info(self) -> VisionInfo:
        """How prompts for this model are written; the load-time probe may still refuse images."""
        return self._processor.info

    @property
    def attends_both_ways(self) -> bool:
        """Whether the tokens of an image attend to each other in both directions."""
        return self._model.attends_both_ways

    @property
    def marker_tokens(self) -> tuple[int, ...]:
        """The tokens that precede an image in prompts, if positions depend on them; else empty."""
        return self._model.marker

    @property
    def is_busy(self) -> bool:
        return self._reader.is_busy

    def text_tokens(self, text: str) -> list[int]:
        return self._processor.text_tokens(text)

    def add_picture(self, picture: Image.Image) -> ImageLayout:
        """Process a picture that is not in a file, and return its layout. For tests of the model."""
        image = hashlib.sha256(picture.tobytes()).hexdigest()
        self._pictures[image] = self._processor.process(image, picture)
        return self._pictures[image].layout

    def reference(self, pictures: Sequence[Image.Image], token_ids: Sequence[int]) -> mx.array:
        """The logits, [vocabulary], that mlx-vlm computes for a prompt with these pictures."""
        return self._model.reference(token_ids, self._processor.process_together(pictures))

    def request_layouts(self, command: ImageCommand) -> None:
        """Request the layouts of the images in a command. Once all of them are processed, `answers`
        yields the result.
        """
        self._questions[command.call_id] = _Question(command)
        for image in command.images:
            self._lost.pop(image, None)  # tried again

    def answers(self) -> Iterator[ImageAnswer]:
        """Yield the answers to commands whose images are all processed, and begin to process the
        images of the others.
        """
        self._take_results()
        for question in tuple(self._questions.values()):
            answer = self._answer_if_complete(question)
            if answer is not None:
                del self._questions[answer.call_id]
                yield answer

    def _answer_if_complete(self, question: _Question) -> ImageAnswer | None:
        """The answer to a command; None if not all of its images are processed, which then begins."""
        command = question.command
        lost = question.lost
        for image in command.images:
            if image in self._lost:
                lost[image] = self._lost[image]
            elif image not in self._layouts and image not in lost:
                self._reader.begin(image, max_pixels=command.max_pixels)
        if any(image not in self._layouts and image not in lost for image in command.images):
            return None
        results = {
            image: self._layouts[image] for image in command.images if image in self._layouts
        }
        return ImageAnswer(
            call_id=command.call_id,
            layouts=tuple(result for result in results.values() if isinstance(result, ImageLayout)),
            failures={
                image: result.reason
                for image, result in results.items()
                if isinstance(result, ImageRefused)
            },
            lost={image: lost[image] for image in lost if image not in results},
        )

    def poll(self) -> None:
        """Take processed images, end the process when it is idle, and let `prepare_span` compute
        again. Call it before each step.
        """
        self._take_results()
        self._may_compute = True

    def free_cached(self) -> None:
        """Free processed images, and the features in RAM."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._features.free_ram()

    def close(self) -> None:
        self.free_cached()
        self._reader.close()

    def open(self, request: SequenceRequest) -> SequenceImages:
        """The images of a sequence, without features yet."""
        return self._model.sequence_images(
            request.images, prompt_tokens=len(request.prompt_token_ids)
        )

    def unprepared(
        self, request: SequenceRequest, *, start: int, prepared: Container[str]
    ) -> list[ImageLayout]:
        """The images of a prompt from a position on that are not prepared and have no features."""
        return [
            span.layout
            for span in request.images
            if span.end > start
            and span.layout.image not in prepared
            and not self._features.has(span.layout.image)
        ]

    def prepare(self, request: SequenceRequest, *, start: int, prepared: set[str]) -> bool:
        """Start processing the images of a prompt from a position on, or compute the features of
        one that has been processed. Waits for the vision tower, but not for image processing.

        Returns whether features were computed.

        prepared: the images that need nothing more before `provide`, including unusable ones, for
        which `provide` raises an error. Images are added to it.
        """
        self._take_results()
        unprepared_layouts = self.unprepared(request, start=start, prepared=prepared)
        for layout in unprepared_layouts[:_PREPARED_AHEAD]:
            image = layout.image
            if self._is_unusable(image):
                prepared.add(image)
            elif image not in self._files:
                self._reader.begin(image, max_pixels=None)
            else:
                prepared.add(image)  # only once; features that do not fit are computed later
                self._features_of(layout)
                return True
        return False

    def prepare_span(self, images: SequenceImages, *, start: int, tokens: int) -> bool:
        """Add features that are cached, compute those of one processed image per step, and begin to
        process others. Waits for the vision tower. Returns whether `provide` will not wait for
        images to be processed.
        """
        self._take_results()
        missing_images = 0
        for index, span in images.overlapping(start, tokens):
            image = span.layout.image
            if index in images.features or self._is_unusable(image):
                continue
            if image in self._processing:
                missing_images += 1
                continue
            is_cached = self._cached_features(span.layout) is not None
            if is_cached or (self._is_processed(image) and self._may_compute):
                self._may_compute &= is_cached
                images.features[index] = self._features_of(span.layout)
                continue
            missing_images += 1
            if missing_images <= _PREPARED_AHEAD and not self._is_processed(image):
                self._reader.begin(image, max_pixels=None)
                self._processing.add(image)
        return not missing_images

    def has_all(self, images: SequenceImages, *, end: int) -> bool:
        """Whether all images before a position can be provided without processing one again."""
        return all(
            self._is_unusable(span.layout.image)
            or self._is_processed(span.layout.image)
            or self._cached_features(span.layout) is not None
            for _, span in images.overlapping(0, end)
        )

    def _is_unusable(self, image: str) -> bool:
        """Whether waiting does not help: `provide` raises an error for this image."""
        return image in self._lost or isinstance(self._layouts.get(image), ImageRefused)

    def _is_processed(self, image: str) -> bool:
        """Whether the inputs of the vision tower for this image are there."""
        return image in self._files or image in self._pictures

    def provide(self, images: SequenceImages, *, start: int, tokens: int) -> None:
        """Add the features of the images in a span, unless they are there.

        Waits for the vision tower if the features of an image are not cached. Raises ImageUnusable,
        and WorkerUnavailable if an image is not processed; `prepare_span` processes it.
        """
        for index, span in images.overlapping(start, tokens):
            if index not in images.features:
                images.features[index] = self._features_of(span.layout)

    def _cached_features(self, layout: ImageLayout) -> ImageFeatures | None:
        """The cached features of an image; None if there are none that fit this layout."""
        features = self._features.find(layout.image)
        if features is None or features.is_visual.size != len(layout.token_ids):
            return None
        return features

    def _features_of(self, layout: ImageLayout) -> ImageFeatures:
        """The features of an image, cached or computed. Waits for the vision tower. Raises
        ImageUnusable and WorkerUnavailable, as `provide` does.
        """
        cached_features = self._cached_features(layout)
        if cached_features is not None:
            self.figures.reused += 1
            return cached_features
        processed = self._processed_image(layout.image)
        if processed.layout != layout:
            raise ImageUnusable(
                "the model's processor processed this image differently than before"
            )
        began_at = time.perf_counter()
        try:
            features = self._model.features(layout, processed.inputs)
        except UnsupportedVision as error:
            raise ImageUnusable(f"the model cannot be given images: {error}") from error
        self.figures.encoded += 1
        self.figures.encode_seconds += time.perf_counter() - began_at
        if self._features.add(layout.image, features):
            self._forget_file(layout.image)
        # Otherwise the file stays: if the prompt's features do not fit the memory, they are computed
        # again, and the sequence should not wait until the image has been decoded again.
        return features

    def _processed_image(self, image: str) -> ProcessedImage:
        """The processor's output. Raises ImageUnusable, and WorkerUnavailable if there is none yet."""
        if image in self._pictures:
            return self._pictures[image]
        file = self._files.get(image)
        if file is None:
            layout = self._layouts.get(image)
            if isinstance(layout, ImageRefused):
                raise ImageUnusable(layout.reason)
            raise WorkerUnavailable(self._lost.pop(image, _NOT_PROCESSED))
        return ProcessedImage(layout=file.layout, inputs=file.inputs())

    def _take_results(self) -> None:
        """Take what the image process has finished, and free the oldest files beyond the limits."""
        for image, result in self._reader.results():
            self._processing.discard(image)
            self._forget_file(image)
            if isinstance(result, ImageLost):
                self._lost[image] = result.reason
                continue
            self._lost.pop(image, None)
            if isinstance(result, ImageFile):
                self._files[image] = result
                self._layouts[image] = result.layout
            else:
                self._layouts[image] = result
            if len(self._layouts) > _MOST_LAYOUTS:
                self._layouts.popitem(last=False)
        file_bytes = sum(each.nbytes for each in self._files.values())
        while len(self._files) > 1 and (
            file_bytes > _MOST_FILE_BYTES or len(self._files) > _MOST_FILES
        ):
            file_bytes -= self._forget_file(next(iter(self._files)))

    def _forget_file(self, image: str) -> int:
        """Free the file of a processed image, if there is one. Returns its size."""
        file = self._files.pop(image, None)
        if file is None:
            return 0
        file.close()
        return file.nbytes
