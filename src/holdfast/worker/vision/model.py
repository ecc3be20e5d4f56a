"""A model with vision, run by mlx-vlm's code: its language model, and the features of images.

mlx-vlm's language models take embeddings instead of token ids where a prompt has images, and some
take positions of three dimensions (M-RoPE). Both are computed here for each forward pass. mlx-vlm
would keep positions in attributes of the model, where sequences of one batch overwrite each other's
(Blaizzy/mlx-vlm#1415); with explicit positions, it does not look at these attributes.

The features of an image do not depend on the rest of the prompt; only its positions do. So features
are computed once per image and reused in every prompt that contains it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from numpy.typing import NDArray

from holdfast.wire.images import ImageLayout, ImageSpan

Positions = NDArray[np.int32]
"""Positions of tokens: int32 [3, tokens], for time, height and width."""

_TOKEN_ARGUMENTS = ("per_layer_inputs",)  # further features of each token, [1, tokens, …]
_UNSUPPORTED = ("cross_attention_states", "decoder_inputs_embeds", "pos_hw")


class UnsupportedVision(Exception):
    """mlx-vlm's code for this model works in a way that Holdfast does not support."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFeatures:
    """What the language model gets in place of the tokens of one image.

    by_token: embeddings and further features, [tokens, …], by the name of the argument.
    is_visual: which of the tokens show the image; the others are markers. bool [tokens].
    deepstack: the values added to the hidden states of the visual tokens after the first layers,
        [layers, visual tokens, hidden]; None: nothing.
    """

    by_token: Mapping[str, mx.array]
    is_visual: NDArray[np.bool_]
    deepstack: mx.array | None = None

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays().values())

    def arrays(self) -> dict[str, mx.array]:
        """All arrays by name; `of_arrays` is the inverse."""
        arrays_by_name = {f"by_token.{name}": array for name, array in self.by_token.items()}
        arrays_by_name["is_visual"] = mx.array(self.is_visual)
        if self.deepstack is not None:
            arrays_by_name["deepstack"] = self.deepstack
        return arrays_by_name

    @staticmethod
    def of_arrays(arrays: Mapping[str, mx.array]) -> ImageFeatures:
        """Features from the arrays that `arrays` returned. Raises KeyError if one is missing."""
        prefix = "by_token."
        return ImageFeatures(
            by_token={
                name.removeprefix(prefix): array
                for name, array in arrays.items()
                if name.startswith(prefix)
            },
            is_visual=np.array(arrays["is_visual"]),
            deepstack=arrays.get("deepstack"),
        )


@dataclass(slots=True, kw_only=True)
class SequenceImages:
    """The images of one sequence, as long as the engine has the sequence.

    positions: of the prompt's tokens, for models that take positions. next_position: of the first
    generated token. features: of the images that are about to be prefilled, by their index in
    `spans`. attend_both_ways: whether the tokens of an image attend to each other in both directions.
    """

    spans: Sequence[ImageSpan]
    attend_both_ways: bool
    positions: Positions
    next_position: int
    features: dict[int, ImageFeatures] = field(default_factory=dict)

    def positions_of(self, start: int, tokens: int) -> Positions:
        """The positions of the tokens of a span. Generated tokens have consecutive positions."""
        prompt_tokens = self.positions.shape[1]
        prompt_positions = self.positions[:, start : start + tokens]
        first_generated = max(start, prompt_tokens)
        generated_positions = (
            np.arange(first_generated - prompt_tokens, start + tokens - prompt_tokens)
            + self.next_position
        )
        return np.concatenate(
            [prompt_positions, np.tile(generated_positions, (3, 1))], axis=1
        ).astype(np.int32)

    def overlapping(self, start: int, tokens: int) -> list[tuple[int, ImageSpan]]:
        """The images that have tokens in a span, each with its index."""
        end = start + tokens
        return [
            (index, image)
            for index, image in enumerate(self.spans)
            if image.start < end and image.end > start
        ]

    def lacks(self, start: int, tokens: int) -> bool:
        """Whether any image in a span has no features here."""
        return any(index not in self.features for index, _ in self.overlapping(start, tokens))

    def forget_before(self, position: int) -> None:
        """Drop the features of images that end before a position, because they are prefilled."""
        for index, image in enumerate(self.spans):
            if image.end <= position:
                self.features.pop(index, None)


class VisionModel(Module):
    """Makes a model of mlx-vlm callable like a model of mlx-lm. Device thread only."""

    def __init__(self, full_model: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.full_model = full_model
        self._arguments: dict[str, Any] = {}

    def __call__(self, ids: mx.array, cache: Any = None) -> mx.array:
        """Logits. ids: int32 [rows, tokens]."""
        arguments = self._arguments
        if self.takes_positions and "position_ids" not in arguments:
            arguments = {**arguments, "position_ids": _default_positions(ids, cache)}
        logits: mx.array = self.full_model.language_model(ids, cache=cache, **arguments).logits
        return logits

    @property
    def layers(self) -> Any:
        return self.full_model.language_model.layers

    @property
    def args(self) -> Any:
        return getattr(self.full_model.config, "text_config", self.full_model.config)

    @property
    def takes_positions(self) -> bool:
        """Whether the language model takes positions of three dimensions."""
        return hasattr(self.full_model.language_model, "get_rope_index")

    @property
    def attends_both_ways(self) -> bool:
        """Whether the tokens of an image attend to each other in both directions (gemma4). Then an
        image must be prefilled in one piece.
        """
        return getattr(self.args, "use_bidirectional_attention", None) == "vision"

    @property
    def image_token_ids(self) -> frozenset[int]:
        """The tokens in place of which the language model gets features of an image."""
        names = ("image_token_id", "image_token_index")
        token_ids = (getattr(self.full_model.config, name, None) for name in names)
        return frozenset(token_id for token_id in token_ids if isinstance(token_id, int))

    def make_cache(self) -> list[Any]:
        """New caches for one sequence, as mlx-lm's `make_prompt_cache` expects this method."""
        from mlx_vlm.models.cache import make_prompt_cache

        return list(make_prompt_cache(self.full_model.language_model))

    @contextmanager
    def with_arguments(self, arguments: Mapping[str, Any]) -> Iterator[None]:
        """Pass these arguments to the language model within the block."""
        self._arguments = dict(arguments)
        try:
            yield
        finally:
            self._arguments = {}

    @property
    def marker(self) -> tuple[int, ...]:
        """The token that tells mlx-vlm that an image follows, if positions depend on it."""
        token_id = getattr(self.full_model.config, "vision_start_token_id", None)
        return (token_id,) if self.takes_positions and isinstance(token_id, int) else ()

    def reference(self, token_ids: Sequence[int], inputs: Mapping[str, Any]) -> mx.array:
        """The logits after a prompt with images, [vocabulary], as mlx-vlm's `generate_step` computes
        them. The engine's results are compared with these (`image_probe.py`).

        inputs: what the processor returned for all images together.
        """
        language_model = self.full_model.language_model
        # left over from the prompt before
        for name in ("_rope_deltas", "_position_ids"):
            if hasattr(language_model, name):
                setattr(language_model, name, None)
        ids = mx.array([list(token_ids)])
        embeddings = self.full_model.get_input_embeddings(
            ids, mask=mx.ones_like(ids), **inputs
        ).to_dict()
        arguments = {
            name: value
            for name, value in embeddings.items()
            if value is not None and name not in ("attention_mask_4d", "rope_deltas")
        }
        if self.attends_both_ways:
            is_image_token = np.isin(np.array(token_ids), list(self.image_token_ids))
            arguments["mm_token_type_ids"] = mx.array(is_image_token.astype(np.int32))[None]
        logits: mx.array = language_model(ids, cache=self.make_cache(), **arguments).logits
        return logits[0, -1]

    def relative_positions(self, layout: ImageLayout) -> Positions:
        """The positions of an image's tokens, counted from the image's first token."""
        ids = mx.array([[*self.marker, *layout.token_ids]])
        grid = mx.array([layout.grid])
        positions, _ = self.full_model.language_model.get_rope_index(ids, image_grid_thw=grid)
        skipped = len(self.marker)  # each marker takes one position
        return np.array(positions)[:, 0, skipped:].astype(np.int32) - skipped

    def sequence_images(self, spans: Sequence[ImageSpan], *, prompt_tokens: int) -> SequenceImages:
        """Lay out the images of a prompt and compute the positions of its tokens. Computes no features."""
        position_pieces: list[Positions] = []
        done_tokens = 0  # how many of the prompt's tokens have positions
        position = 0  # of the next token
        for span in spans if self.takes_positions else ():
            position_pieces.append(text_positions(position, span.start - done_tokens))
            position += span.start - done_tokens
            position_pieces.append(self.relative_positions(span.layout) + position)
            position = int(position_pieces[-1].max()) + 1
            done_tokens = span.end
        position_pieces.append(text_positions(position, prompt_tokens - done_tokens))
        return SequenceImages(
            spans=spans,
            attend_both_ways=self.attends_both_ways,
            positions=np.concatenate(position_pieces, axis=1),
            next_position=position + prompt_tokens - done_tokens,
        )

    def features(self, layout: ImageLayout, inputs: Mapping[str, Any]) -> ImageFeatures:
        """Compute the features of an image. Waits for the device.

        inputs: what the model's processor returned for the image, without the token ids.
        Raises UnsupportedVision if mlx-vlm's code returns something that is not supported.
        """
        ids = mx.array([list(layout.token_ids)])
        embeddings = self.full_model.get_input_embeddings(
            ids, mask=mx.ones_like(ids), **inputs
        ).to_dict()
        unsupported = [name for name in _UNSUPPORTED if embeddings.get(name) is not None]
        if unsupported:
            raise UnsupportedVision(f"its language model takes {unsupported[0]}")
        by_token = {"inputs_embeds": embeddings["inputs_embeds"][0]}
        by_token |= {
            name: embeddings[name][0]
            for name in _TOKEN_ARGUMENTS
            if embeddings.get(name) is not None
        }
        deepstack = embeddings.get("deepstack_visual_embeds")
        is_visual = np.isin(layout.token_ids.view, list(self.image_token_ids))
        features = ImageFeatures(
            by_token={name: mx.contiguous(array) for name, array in by_token.items()},
            is_visual=is_visual,
            deepstack=None if deepstack is None else mx.stack(list(deepstack)),
        )
        mx.eval(list(features.arrays().values()))
        return features

    def arguments(
        self, ids: mx.array, images: SequenceImages, *, start: int, tokens: int
    ) -> dict[str, Any]:
        """The arguments for a forward pass over a span that contains tokens of images. Lazy.

        ids: int32 [1, tokens], with the model's own tokens.
        """
        text_embeddings = self.full_model.get_input_embeddings(ids).to_dict()
        names = [
            "inputs_embeds",
            *(name for name in _TOKEN_ARGUMENTS if text_embeddings.get(name) is not None),
        ]
        pieces: dict[str, list[mx.array]] = {name: [] for name in names}
        is_visual = np.zeros(tokens, bool)
        deepstack: list[mx.array] = []
        done_tokens = start  # the position up to which `pieces` are complete
        for index, image in images.overlapping(start, tokens):
            features = images.features[index]
            image_start = max(image.start, start)
            image_end = min(image.end, start + tokens)
            rows = slice(image_start - image.start, image_end - image.start)
            for name in names:
                pieces[name].append(
                    text_embeddings[name][:, done_tokens - start : image_start - start]
                )
                pieces[name].append(features.by_token[name][None, rows])
            is_visual[image_start - start : image_end - start] = features.is_visual[rows]
            if features.deepstack is not None:
                earlier_visual_tokens = int(features.is_visual[: rows.start].sum())
                visual_tokens = int(features.is_visual[rows].sum())
                deepstack.append(
                    features.deepstack[
                        :, earlier_visual_tokens : earlier_visual_tokens + visual_tokens
                    ]
                )
            done_tokens = image_end
        arguments: dict[str, Any] = {}
        for name in names:
            pieces[name].append(text_embeddings[name][:, done_tokens - start :])
            arguments[name] = mx.concatenate(pieces[name], axis=1)
        if deepstack and is_visual.any():
            arguments["visual_pos_masks"] = mx.array(is_visual)[None]
            arguments["deepstack_visual_embeds"] = list(mx.concatenate(deepstack, axis=1))
        if self.attends_both_ways:
            arguments["mm_token_type_ids"] = mx.array(is_visual.astype(np.int32))[None]
        return arguments


def text_positions(first_position: int, tokens: int) -> Positions:
    """The positions of consecutive tokens of text: the same in all three dimensions."""
    return np.tile(np.arange(first_position, first_position + tokens, dtype=np.int32), (3, 1))


def _default_positions(ids: mx.array, cache: Any) -> mx.array:
    """Positions that count the tokens of each row: int32 [3, rows, tokens]."""
    offsets = [each.offset for each in cache or () if hasattr(each, "offset")]
    offset = mx.array(offsets[0] if offsets else 0).reshape(-1, 1)
    positions = offset + mx.arange(ids.shape[1])[None]
    return mx.broadcast_to(positions[None], (3, ids.shape[0], ids.shape[1]))
