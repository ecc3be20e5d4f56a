"""The images of prompts in a worker: how many tokens they take, and their features.

Device thread only: mlx-vlm's processors create arrays.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from holdfast.errors import InvalidRequest
from holdfast.models.images import open_image
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.images import ImageAnswer, ImageCommand, ImageLayout, VisionInfo
from holdfast.wire.requests import TokenIds
from holdfast.worker.vision.feature_cache import FeatureCache
from holdfast.worker.vision.model import ImageFeatures, SequenceImages, VisionMisfit, VisionModel

if TYPE_CHECKING:
    from PIL import Image

_MOST_PROCESSED_BYTES = 256 << 20
_NOT_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
_GRIDS = ("image_grid_thw",)


class ImageUnusable(InvalidRequest):
    """The model's processor cannot use an image, or its file is missing or damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedImage:
    """What a model's processor makes of an image. inputs: for the vision tower."""

    layout: ImageLayout
    inputs: Mapping[str, mx.array]

    @property
    def nbytes(self) -> int:
        """The memory of the inputs."""
        return sum(array.nbytes for array in self.inputs.values())


class Processor:
    """A model's processor, for one image at a time."""

    def __init__(self, processor: Any, info: VisionInfo) -> None:
        self._processor = processor
        self.info = info

    def process(self, image: str, picture: Image.Image) -> ProcessedImage:
        """Process a picture. Raises ImageUnusable if the processor cannot."""
        from mlx_vlm.models.base import to_mlx

        try:
            # Without further arguments: LlavaProcessor passes the tokenizer's to the image
            # processor (mlx-vlm 0.7.10).
            found = to_mlx(
                dict(self._processor(text=[self.info.template_placeholder], images=[picture]))
            )
        except Exception as error:  # foreign code, fed with a stranger's image
            reason = " ".join(str(error).split())[:200]
            raise ImageUnusable(f"the model cannot use this image: {reason}") from error
        ids = np.array(found["input_ids"]).reshape(-1).tolist()
        grids = [found[name] for name in _GRIDS if found.get(name) is not None]
        return ProcessedImage(
            layout=ImageLayout(
                image=image,
                token_ids=TokenIds.of(self._own_tokens(ids)),
                grid=tuple(np.array(grids[0]).reshape(-1).tolist()) if grids else (),
            ),
            inputs={
                name: value
                for name, value in found.items()
                if name not in _NOT_INPUTS and isinstance(value, mx.array)
            },
        )

    def _own_tokens(self, ids: list[int]) -> list[int]:
        """The tokens without those that belong to the text around the image."""
        special = set(self._processor.tokenizer.all_special_ids)
        special |= set(self._processor.tokenizer.added_tokens_decoder)
        around = {self._processor.tokenizer.bos_token_id, self._processor.tokenizer.eos_token_id}
        own = [at for at, each in enumerate(ids) if each in special and each not in around]
        if not own:
            raise ImageUnusable("the model's processor writes no tokens for this image")
        return ids[own[0] : own[-1] + 1]


class WorkerImages:
    """Answers questions about images, and provides the features of those in prompts."""

    def __init__(
        self, model: VisionModel, processor: Processor, *, folder: Path, features: FeatureCache
    ) -> None:
        """folder: where the front keeps the files of images."""
        self._model = model
        self._processor = processor
        self._folder = folder
        self._features = features
        self._processed: OrderedDict[str, ProcessedImage] = OrderedDict()
        self.tower_runs = 0  # how often the features of an image were computed

    @property
    def info(self) -> VisionInfo:
        """How prompts for this model are written."""
        return self._processor.info

    def answer(self, command: ImageCommand) -> ImageAnswer:
        """How the model sees the images of a command."""
        layouts = []
        failures = {}
        for image in command.images:
            try:
                layouts.append(self._process(image).layout)
            except ImageUnusable as refusal:
                failures[image] = str(refusal)
        return ImageAnswer(call_id=command.call_id, layouts=tuple(layouts), failures=failures)

    def open(self, request: SequenceRequest, *, prefilled_tokens: int) -> SequenceImages:
        """The images of a sequence, with the features of those that are not prefilled yet.

        Waits for the vision tower if the features of an image are not kept. Raises ImageUnusable.
        """
        images = self._model.sequence_images(
            request.images, prompt_tokens=len(request.prompt_token_ids)
        )
        for index, span in enumerate(request.images):
            if span.end > prefilled_tokens:
                images.features[index] = self._features_of(span.layout)
        return images

    def _features_of(self, layout: ImageLayout) -> ImageFeatures:
        found = self._features.find(layout.image)
        if found is not None and found.is_visual.size == len(layout.token_ids):
            return found
        processed = self._process(layout.image)
        if processed.layout != layout:
            raise ImageUnusable("the model's processor makes something else of this image now")
        try:
            features = self._model.features(layout, processed.inputs)
        except VisionMisfit as misfit:
            raise ImageUnusable(f"the model cannot be given images: {misfit}") from misfit
        self.tower_runs += 1
        self._features.add(layout.image, features)
        self._processed.pop(layout.image, None)
        return features

    def _process(self, image: str) -> ProcessedImage:
        found = self._processed.get(image)
        if found is None:
            found = self._processor.process(image, self._open(image))
            self._processed[image] = found
            held = sum(each.nbytes for each in self._processed.values())
            while held > _MOST_PROCESSED_BYTES and len(self._processed) > 1:
                _, dropped = self._processed.popitem(last=False)
                held -= dropped.nbytes
        return found

    def _open(self, image: str) -> Image.Image:
        try:
            return open_image(self._folder / image)
        except OSError as error:
            raise ImageUnusable(
                "the file of an image is missing or damaged; send the request again"
            ) from error
