"""Runs a model's own image processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from holdfast.models.image_files import ImageUnusable
from holdfast.wire.images import ImageLayout, VisionInfo
from holdfast.wire.requests import TokenIds

if TYPE_CHECKING:
    from PIL import Image

_NOT_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
_GRIDS = ("image_grid_thw",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedImage:
    """The output of a model's processor for an image. inputs: for the vision tower."""

    layout: ImageLayout
    inputs: Mapping[str, Any]


class Processor:
    """A model's processor, for one image at a time."""

    def __init__(self, processor: Any, info: VisionInfo) -> None:
        self._processor = processor
        self.info = info

    def process(self, image: str, picture: Image.Image) -> ProcessedImage:
        """Process a picture. Raises ImageUnusable, and the errors of the processor.

        image: the name under which the image is known (a hash).
        """
        outputs = self._run_processor([picture])
        ids = np.array(outputs["input_ids"]).reshape(-1).tolist()
        grids = [outputs[name] for name in _GRIDS if outputs.get(name) is not None]
        return ProcessedImage(
            layout=ImageLayout(
                image=image,
                token_ids=TokenIds.of(self._image_tokens(ids)),
                grid=tuple(np.array(grids[0]).reshape(-1).tolist()) if grids else (),
            ),
            inputs=_inputs(outputs),
        )

    def text_tokens(self, text: str) -> list[int]:
        """The tokens of a text, without special tokens."""
        ids: list[int] = self._processor.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def process_together(self, pictures: Sequence[Image.Image]) -> Mapping[str, Any]:
        """The inputs of the vision tower for several pictures. Raises what the processor raises."""
        return _inputs(self._run_processor(pictures))

    def _run_processor(self, pictures: Sequence[Image.Image]) -> Mapping[str, Any]:
        """The processor's output for a prompt that has only these pictures, as mlx arrays."""
        from mlx_vlm.models.base import to_mlx

        text = self.info.template_placeholder * len(pictures)
        # No further arguments: LlavaProcessor passes those of the tokenizer to the image processor
        # (mlx-vlm 0.7.10).
        outputs: Mapping[str, Any] = to_mlx(
            dict(self._processor(text=[text], images=list(pictures)))
        )
        return outputs

    def _image_tokens(self, ids: list[int]) -> list[int]:
        """The tokens of the image, without those of the text around it: from the first special
        token to the last. Raises ImageUnusable if there is none.
        """
        special_ids = set(self._processor.tokenizer.all_special_ids)
        special_ids |= set(self._processor.tokenizer.added_tokens_decoder)
        boundary_ids = {
            self._processor.tokenizer.bos_token_id,
            self._processor.tokenizer.eos_token_id,
        }
        image_indices = [
            index
            for index, each in enumerate(ids)
            if each in special_ids and each not in boundary_ids
        ]
        if not image_indices:
            raise ImageUnusable("the model's processor writes no tokens for this image")
        return ids[image_indices[0] : image_indices[-1] + 1]


def _inputs(processed: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments for the vision tower: arrays, and lists of arrays that differ in shape."""
    return {
        name: value
        for name, value in processed.items()
        if name not in _NOT_INPUTS and value is not None
    }
