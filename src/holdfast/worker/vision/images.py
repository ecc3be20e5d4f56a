"""The images of prompts in a worker: how many tokens they take, and their features.

Device thread only: mlx-vlm's processors create arrays.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from holdfast.errors import InvalidRequest
from holdfast.models.images import open_image
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.events import ImageFigures
from holdfast.wire.images import ImageAnswer, ImageCommand, ImageLayout, VisionInfo
from holdfast.wire.requests import TokenIds
from holdfast.worker.vision.feature_cache import FeatureCache
from holdfast.worker.vision.model import ImageFeatures, SequenceImages, VisionMisfit, VisionModel

if TYPE_CHECKING:
    from PIL import Image

MOST_PROCESSED_BYTES = 256 << 20
_LONGEST_REASON = 200
_NOT_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
_GRIDS = ("image_grid_thw",)


class ImageUnusable(InvalidRequest):
    """The model's processor cannot use an image, or its file is missing or damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedImage:
    """What a model's processor makes of an image. inputs: for the vision tower."""

    layout: ImageLayout
    inputs: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        """The memory of the inputs."""
        leaves: Any = tree_flatten(dict(self.inputs))
        return sum(leaf.nbytes for _, leaf in leaves if isinstance(leaf, mx.array))


class Processor:
    """A model's processor, for one image at a time."""

    def __init__(self, processor: Any, info: VisionInfo) -> None:
        self._processor = processor
        self.info = info

    def process(self, image: str, picture: Image.Image) -> ProcessedImage:
        """Process a picture. Raises ImageUnusable, and what the processor raises."""
        found = self._call([picture])
        ids = np.array(found["input_ids"]).reshape(-1).tolist()
        grids = [found[name] for name in _GRIDS if found.get(name) is not None]
        return ProcessedImage(
            layout=ImageLayout(
                image=image,
                token_ids=TokenIds.of(self._own_tokens(ids)),
                grid=tuple(np.array(grids[0]).reshape(-1).tolist()) if grids else (),
            ),
            inputs=_inputs(found),
        )

    def text_tokens(self, text: str) -> list[int]:
        """The tokens of a text, without special tokens."""
        ids: list[int] = self._processor.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def process_together(self, pictures: Sequence[Image.Image]) -> Mapping[str, Any]:
        """The inputs of the vision tower for several pictures. Raises what the processor raises."""
        return _inputs(self._call(pictures))

    def _call(self, pictures: Sequence[Image.Image]) -> Mapping[str, Any]:
        from mlx_vlm.models.base import to_mlx

        text = self.info.template_placeholder * len(pictures)
        # Without further arguments: LlavaProcessor passes the tokenizer's to the image processor
        # (mlx-vlm 0.7.10).
        found: Mapping[str, Any] = to_mlx(dict(self._processor(text=[text], images=list(pictures))))
        return found

    def _own_tokens(self, ids: list[int]) -> list[int]:
        """The tokens without those that belong to the text around the image."""
        special = set(self._processor.tokenizer.all_special_ids)
        special |= set(self._processor.tokenizer.added_tokens_decoder)
        around = {self._processor.tokenizer.bos_token_id, self._processor.tokenizer.eos_token_id}
        own = [at for at, each in enumerate(ids) if each in special and each not in around]
        if not own:
            raise ImageUnusable("the model's processor writes no tokens for this image")
        return ids[own[0] : own[-1] + 1]


def _inputs(found: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments for the vision tower: arrays, and lists of arrays that differ in shape."""
    return {
        name: value
        for name, value in found.items()
        if name not in _NOT_INPUTS and value is not None
    }


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
        self._asked: dict[str, dict[str, ImageLayout | str]] = {}  # what is known, by call id
        self.figures = ImageFigures()

    @property
    def info(self) -> VisionInfo:
        """How prompts for this model are written, before it was examined."""
        return self._processor.info

    @property
    def attends_both_ways(self) -> bool:
        """Whether the tokens of an image attend to each other in both directions."""
        return self._model.attends_both_ways

    @property
    def before(self) -> tuple[int, ...]:
        """The tokens that precede an image in prompts, if positions depend on them."""
        return self._model.marker

    def text_tokens(self, text: str) -> list[int]:
        """The tokens of a text, without special tokens."""
        return self._processor.text_tokens(text)

    def add_picture(self, picture: Image.Image) -> ImageLayout:
        """Process a picture that is not in a file, and return its layout. For tests of the model."""
        image = hashlib.sha256(picture.tobytes()).hexdigest()
        self._processed[image] = self._processor.process(image, picture)
        return self._processed[image].layout

    def reference(self, pictures: Sequence[Image.Image], token_ids: Sequence[int]) -> mx.array:
        """The logits, [vocabulary], that mlx-vlm computes for a prompt with these pictures."""
        return self._model.reference(token_ids, self._processor.process_together(pictures))

    def answer(self, command: ImageCommand) -> ImageAnswer | None:
        """How the model sees the images of a command. One call processes at most one image, and
        returns None until all are processed.
        """
        known = self._asked.setdefault(command.call_id, {})
        image = next((each for each in command.images if each not in known), None)
        if image is not None:
            known[image] = self._layout_or_reason(image)
        if any(each not in known for each in command.images):
            return None
        del self._asked[command.call_id]
        return ImageAnswer(
            call_id=command.call_id,
            layouts=tuple(each for each in known.values() if isinstance(each, ImageLayout)),
            failures={image: each for image, each in known.items() if isinstance(each, str)},
        )

    def _layout_or_reason(self, image: str) -> ImageLayout | str:
        try:
            return self._process(image).layout
        except ImageUnusable as refusal:
            return str(refusal)
        except Exception as error:  # foreign code, fed with a stranger's image
            reason = " ".join(str(error).split())[:_LONGEST_REASON]
            return f"the model cannot use this image: {reason}"

    def drop_kept(self) -> None:
        """Free what is kept in memory for later use, because memory is short."""
        self._processed.clear()
        self._features.drop_held()

    def open(self, request: SequenceRequest) -> SequenceImages:
        """The images of a sequence, without features yet."""
        return self._model.sequence_images(
            request.images, prompt_tokens=len(request.prompt_token_ids)
        )

    def provide(self, images: SequenceImages, *, start: int, tokens: int) -> None:
        """Add the features of the images in a span, unless they are there.

        Waits for the vision tower if the features of an image are not kept. Raises ImageUnusable.
        """
        for index, span in images.overlapping(start, tokens):
            if index not in images.features:
                images.features[index] = self._features_of(span.layout)

    def _features_of(self, layout: ImageLayout) -> ImageFeatures:
        found = self._features.find(layout.image)
        if found is not None and found.is_visual.size == len(layout.token_ids):
            self.figures.reused += 1
            return found
        processed = self._process(layout.image)
        if processed.layout != layout:
            raise ImageUnusable(
                "the model's processor processed this image differently than before"
            )
        began_at = time.perf_counter()
        try:
            features = self._model.features(layout, processed.inputs)
        except VisionMisfit as misfit:
            raise ImageUnusable(f"the model cannot be given images: {misfit}") from misfit
        self.figures.encoded += 1
        self.figures.encode_seconds += time.perf_counter() - began_at
        self._features.add(layout.image, features)
        self._processed.pop(layout.image, None)
        return features

    def _process(self, image: str) -> ProcessedImage:
        found = self._processed.get(image)
        if found is not None:
            self._processed.move_to_end(image)
        else:
            found = self._processor.process(image, self._open(image))
            self._processed[image] = found
            held = sum(each.nbytes for each in self._processed.values())
            while held > MOST_PROCESSED_BYTES and len(self._processed) > 1:
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
