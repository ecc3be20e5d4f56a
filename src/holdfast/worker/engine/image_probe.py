"""Checks that prompts with images give the same results in the engine as in mlx-vlm.

A prompt with two images is computed whole, in chunks that divide an image, with another sequence,
and from a state that was copied behind the first image. Its logits must be those of mlx-vlm, which
computes the whole prompt alone, in one forward pass. Errors are relative to the effect of other
pictures: in 16 bits, another token of the text can change less than rounding does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
import msgspec
import numpy as np

from holdfast.errors import InvalidRequest
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.images import ImageLayout, ImageSpan, VisionInfo, image_keys
from holdfast.wire.requests import SamplingParams, TokenIds
from holdfast.worker.engine.layouts import Runner
from holdfast.worker.engine.plan import Span
from holdfast.worker.engine.probe import LAYOUT_ERRORS, is_close
from holdfast.worker.engine.sequence import EngineSequence, SequenceSpan, copy_everything
from holdfast.worker.engine.views import StepContext
from holdfast.worker.kv.live import LiveState, Snapshot
from holdfast.worker.vision.images import WorkerImages

if TYPE_CHECKING:
    from PIL import Image

_SIZES = ((84, 56), (56, 112))
_TEXTS = ("Look at this", "and at this.", "Which one is larger?")  # around the images
_LONGEST_REASON = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class _ImagePrompt:
    """A prompt with two images. token_ids: the model's own tokens."""

    token_ids: tuple[int, ...]
    spans: tuple[ImageSpan, ...]

    @staticmethod
    def of(images: WorkerImages, layouts: Sequence[ImageLayout]) -> _ImagePrompt:
        """A prompt with text before, between and after the images."""
        token_ids: list[int] = []
        spans = []
        for text, layout in zip(_TEXTS, layouts, strict=False):
            token_ids += (*images.text_tokens(text), *images.before)
            spans.append(ImageSpan(start=len(token_ids), layout=layout))
            token_ids += layout.token_ids
        return _ImagePrompt(
            token_ids=(*token_ids, *images.text_tokens(_TEXTS[-1])), spans=tuple(spans)
        )

    def sequence(
        self, runner: Runner, images: WorkerImages, snapshots: Sequence[Snapshot] = ()
    ) -> EngineSequence:
        keyed = list(self.token_ids)
        for span in self.spans:
            keyed[span.start : span.end] = image_keys(span.layout)
        request = SequenceRequest(
            request_id="images",
            prompt_token_ids=TokenIds.of(keyed),
            images=self.spans,
            max_tokens=1,
            sampling=SamplingParams(temperature=0.0, seed=0),
        )
        live = LiveState(runner.fresh_layers())
        sequence = EngineSequence.begin(request, live=live, vocab_size=1)
        sequence.start_from(None, snapshots)
        sequence.images = images.open(request)
        sequence.live.reserve(len(keyed))
        return sequence


def probe_images(runner: Runner, images: WorkerImages) -> VisionInfo:
    """Compare prompts with images to mlx-vlm's results. Device thread only.

    Returns how prompts are written, and the forms refused because their results are wrong.
    """
    if any(leaf.is_foreign for layer in runner.fresh_layers() for leaf in layer.leaves()):
        return msgspec.structs.replace(images.info, refused="it runs in the layout solo")
    name = "whole"
    try:
        pictures = [_picture(size) for size in _SIZES]
        layouts = [images.add_picture(picture) for picture in pictures]
        case = _ImagePrompt.of(images, layouts)
        expected = images.reference(pictures, case.token_ids)
        changed = images.reference([*map(_inverted, pictures)], case.token_ids)
        for name, compute in _COMPUTATIONS.items():
            if not is_close(compute(runner, images, case), expected, changed=changed):
                return _refused(images.info, name, "the results differ from those of mlx-vlm")
    except (*LAYOUT_ERRORS, InvalidRequest) as error:
        return _refused(images.info, name, f"{type(error).__name__}: {error}")
    return images.info


def _refused(info: VisionInfo, name: str, reason: str) -> VisionInfo:
    why = " ".join(f"a test prompt with images, computed {name}, failed: {reason}".split())
    field = "reuse_refused" if name == _FROM_COPY else "refused"
    return msgspec.structs.replace(info, **{field: why[:_LONGEST_REASON]})


def _picture(size: tuple[int, int]) -> Image.Image:
    """Noise, the same each time. size: width and height."""
    from PIL import Image

    width, height = size
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def _inverted(picture: Image.Image) -> Image.Image:
    from PIL import ImageOps

    return ImageOps.invert(picture)


def _read(
    runner: Runner, images: WorkerImages, sequence: EngineSequence, ends: Sequence[int]
) -> mx.array:
    """Prefill a sequence in chunks with these ends. Returns the logits after the last token."""
    logits = None
    for end in ends:
        start = sequence.live.tokens
        assert sequence.images is not None
        images.provide(sequence.images, start=start, tokens=end - start)
        logits = _step(runner, [(sequence, end - start)])
    assert logits is not None
    return logits[-1]


def _step(runner: Runner, chunks: Sequence[tuple[EngineSequence, int]]) -> mx.array | None:
    """One step with a chunk of each sequence. Returns the logits after each."""
    spans = [
        SequenceSpan(
            sequence,
            Span(request_id=f"{index}", start=sequence.live.tokens, tokens=tokens, samples=True),
        )
        for index, (sequence, tokens) in enumerate(chunks)
    ]
    logits = runner.forward(spans, StepContext()).to_sample
    for each in spans:
        each.sequence.live.tokens = each.span.start + each.span.tokens
    mx.eval(logits, [list(sequence.live.arrays()) for sequence, _ in chunks])
    return logits


def _whole(runner: Runner, images: WorkerImages, case: _ImagePrompt) -> mx.array:
    return _read(runner, images, case.sequence(runner, images), [len(case.token_ids)])


def _divided(runner: Runner, images: WorkerImages, case: _ImagePrompt) -> mx.array:
    """Chunks end within each image, or after it if the image must not be divided."""
    ends = [
        span.end if images.attends_both_ways else (span.start + span.end) // 2
        for span in case.spans
    ]
    return _read(runner, images, case.sequence(runner, images), [*ends, len(case.token_ids)])


def _beside(runner: Runner, images: WorkerImages, case: _ImagePrompt) -> mx.array:
    """The last token is in a step with that of another sequence, whose positions differ."""
    sequence = case.sequence(runner, images)
    other = _ImagePrompt.of(images, [case.spans[1].layout])
    beside = other.sequence(runner, images)
    _read(runner, images, beside, [len(other.token_ids) - 1])
    _read(runner, images, sequence, [len(case.token_ids) - 1])
    logits = _step(runner, [(beside, 1), (sequence, 1)])
    assert logits is not None
    return logits[-1]


def _from_copy(runner: Runner, images: WorkerImages, case: _ImagePrompt) -> mx.array:
    first = case.sequence(runner, images)
    _read(runner, images, first, [case.spans[0].end])
    copies = copy_everything(first)
    mx.eval([each.outputs for each in copies])
    continued = case.sequence(runner, images, copies)
    return _read(runner, images, continued, [len(case.token_ids)])


_FROM_COPY = "from a copy of the state behind the first image"
_COMPUTATIONS: dict[str, Callable[[Runner, WorkerImages, _ImagePrompt], mx.array]] = {
    "whole": _whole,
    "in chunks": _divided,
    "beside another one": _beside,
    _FROM_COPY: _from_copy,
}
