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
            token_ids += (*images.text_tokens(text), *images.marker_tokens)
            spans.append(ImageSpan(start=len(token_ids), layout=layout))
            token_ids += layout.token_ids
        return _ImagePrompt(
            token_ids=(*token_ids, *images.text_tokens(_TEXTS[-1])), spans=tuple(spans)
        )

    def sequence(
        self, runner: Runner, images: WorkerImages, snapshots: Sequence[Snapshot] = ()
    ) -> EngineSequence:
        """A sequence as for a request, in whose prompt image keys replace the tokens of images.

        snapshots: the cached prefix that it starts from.
        """
        token_ids_with_keys = list(self.token_ids)
        for span in self.spans:
            token_ids_with_keys[span.start : span.end] = image_keys(span.layout)
        request = SequenceRequest(
            request_id="images",
            prompt_token_ids=TokenIds.of(token_ids_with_keys),
            images=self.spans,
            max_tokens=1,
            sampling=SamplingParams(temperature=0.0, seed=0),
        )
        live = LiveState(runner.fresh_layers())
        sequence = EngineSequence.begin(request, live=live, vocab_size=1)
        sequence.start_from(None, snapshots)
        sequence.images = images.open(request)
        sequence.live.reserve(len(token_ids_with_keys))
        return sequence


def probe_images(runner: Runner, images: WorkerImages) -> VisionInfo:
    """Compare prompts with images to mlx-vlm's results. Device thread only.

    Returns how prompts with images are written, and why images (`refused`) or only cached states of
    such prompts (`reuse_refused`) are refused, if results are wrong.
    """
    if any(leaf.is_foreign for layer in runner.fresh_layers() for leaf in layer.leaves()):
        return msgspec.structs.replace(images.info, refused="it runs in the layout solo")
    computation = "whole"
    try:
        pictures = [_picture(size) for size in _SIZES]
        layouts = [images.add_picture(picture) for picture in pictures]
        case = _ImagePrompt.of(images, layouts)
        expected = images.reference(pictures, case.token_ids)
        # the logits for other pictures, whose difference is the scale of errors
        changed = images.reference([*map(_inverted, pictures)], case.token_ids)
        for computation, compute in _COMPUTATIONS.items():
            if not is_close(compute(runner, images, case), expected, changed=changed):
                return _with_refusal(
                    images.info, computation, "the results differ from those of mlx-vlm"
                )
    except (*LAYOUT_ERRORS, InvalidRequest) as error:
        return _with_refusal(images.info, computation, f"{type(error).__name__}: {error}")
    return images.info


def _with_refusal(info: VisionInfo, name: str, reason: str) -> VisionInfo:
    """Refuse all images; or, if only the computation from a copy failed, only to cache them.

    name: of the computation that failed.
    """
    message = " ".join(f"a test prompt with images, computed {name}, failed: {reason}".split())
    field = "reuse_refused" if name == _FROM_COPY else "refused"
    return msgspec.structs.replace(info, **{field: message[:_LONGEST_REASON]})


def _picture(size: tuple[int, int]) -> Image.Image:
    """Noise, the same each time. size: width and height."""
    from PIL import Image

    width, height = size
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def _inverted(picture: Image.Image) -> Image.Image:
    """A different picture of the same size, so that the layout of its tokens is the same."""
    from PIL import ImageOps

    return ImageOps.invert(picture)


def _prefill(
    runner: Runner, images: WorkerImages, sequence: EngineSequence, ends: Sequence[int]
) -> mx.array:
    """Prefill a sequence in chunks with these ends. Returns the logits after the last token."""
    logits = None
    for end in ends:
        start = sequence.live.tokens
        assert sequence.images is not None
        images.provide(sequence.images, start=start, tokens=end - start)
        logits = _run_step(runner, [(sequence, end - start)])
    assert logits is not None
    return logits[-1]


def _run_step(runner: Runner, chunks: Sequence[tuple[EngineSequence, int]]) -> mx.array | None:
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


# Ways to compute a prompt with images. Each returns the logits after its last token, [vocabulary].


def _compute_whole(runner: Runner, images: WorkerImages, case: _ImagePrompt) -> mx.array:
    """The whole prompt is one chunk."""
    return _prefill(runner, images, case.sequence(runner, images), [len(case.token_ids)])


def _compute_in_chunks(runner: Runner, images: WorkerImages, case: _ImagePrompt) -> mx.array:
    """Chunks end within each image, or after it if the image must not be divided."""
    ends = [
        span.end if images.attends_both_ways else (span.start + span.end) // 2
        for span in case.spans
    ]
    return _prefill(runner, images, case.sequence(runner, images), [*ends, len(case.token_ids)])


def _compute_beside_another(runner: Runner, images: WorkerImages, case: _ImagePrompt) -> mx.array:
    """The last token is in a step with that of another sequence, whose positions differ."""
    sequence = case.sequence(runner, images)
    other_prompt = _ImagePrompt.of(images, [case.spans[1].layout])
    other_sequence = other_prompt.sequence(runner, images)
    _prefill(runner, images, other_sequence, [len(other_prompt.token_ids) - 1])
    _prefill(runner, images, sequence, [len(case.token_ids) - 1])
    logits = _run_step(runner, [(other_sequence, 1), (sequence, 1)])
    assert logits is not None
    return logits[-1]


def _compute_from_copy(runner: Runner, images: WorkerImages, case: _ImagePrompt) -> mx.array:
    """The state after the first image is copied and restored, as by the prefix cache."""
    copied_sequence = case.sequence(runner, images)
    _prefill(runner, images, copied_sequence, [case.spans[0].end])
    copies = copy_everything(copied_sequence)
    mx.eval([each.outputs for each in copies])
    continued = case.sequence(runner, images, copies)
    return _prefill(runner, images, continued, [len(case.token_ids)])


_FROM_COPY = "from a copy of the state behind the first image"
_COMPUTATIONS: dict[str, Callable[[Runner, WorkerImages, _ImagePrompt], mx.array]] = {
    "whole": _compute_whole,
    "in chunks": _compute_in_chunks,
    "beside another one": _compute_beside_another,
    _FROM_COPY: _compute_from_copy,
}
