"""What mlx-vlm itself answers about images: its processor, its embeddings and its language model,
for one conversation alone, all of it in one pass for each token, without a cache from before.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_vlm
import numpy as np
from mlx_vlm.models.cache import make_prompt_cache
from PIL import Image

Message = dict[str, Any]
_MODULE_STATE = ("_rope_deltas", "_position_ids")
_NAMED = ("input_ids", "pixel_values", "attention_mask")


def user(*parts: str | bytes) -> Message:
    """A user's message of texts and image files, in their order."""
    return {"role": "user", "content": [*map(_content, parts)]}


def assistant(text: str) -> Message:
    """An answer in an earlier turn."""
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


def _content(part: str | bytes) -> dict[str, Any]:
    if isinstance(part, bytes):
        return {"type": "image", "file": part}
    return {"type": "text", "text": part}


@dataclass(frozen=True)
class OracleAnswer:
    """prompt_token_ids: with the tokens of the images.
    token_ids: drawn greedily.
    logits: [drawn tokens, vocabulary], float32.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logits: np.ndarray


class VisionOracle:
    """mlx-vlm with the model of one folder.

    Its processors are given nothing but text and images: those of llava and llava_next pass what
    else they are given to the image processor, which refuses it, so that mlx-vlm's own generate
    fails with llava.
    """

    def __init__(self, folder: Path) -> None:
        self.model, self.processor = mlx_vlm.load(str(folder))

    @property
    def tokenizer(self) -> Any:
        """Of the processor."""
        return getattr(self.processor, "tokenizer", self.processor)

    def rendered(self, messages: Sequence[Message], *, asks: bool = True) -> str:
        """The conversation as the model's chat template writes it, with its placeholders."""
        written = [*messages]
        if type(self.processor).__name__ == "InternVLChatProcessor":
            written = [{**message, "content": _flat(message)} for message in messages]
        text: str = self.tokenizer.apply_chat_template(
            written,
            chat_template=self.tokenizer.chat_template,
            tokenize=False,
            add_generation_prompt=asks,
        )
        return text

    def inputs(self, messages: Sequence[Message], *, asks: bool = True) -> dict[str, Any]:
        """What the processor makes of a conversation: `input_ids`, `pixel_values`, …"""
        return self.processed(self.rendered(messages, asks=asks), _images(messages))

    def processed(self, text: str, images: list[Image.Image]) -> dict[str, Any]:
        """What the processor makes of a rendered conversation and its images."""
        if not images:
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            return {"input_ids": mx.array([ids])}
        found = dict(self.processor(text=[text], images=images))
        return {key: _as_mlx(value) for key, value in found.items() if value is not None}

    def answer(self, messages: Sequence[Message], *, tokens: int = 1) -> OracleAnswer:
        """The greedy answer to a conversation, whatever ends answers."""
        inputs = self.inputs(messages)
        prompt = tuple(inputs["input_ids"][0].tolist())
        cache = make_prompt_cache(self.model.language_model)
        logits = [self.logits(inputs, cache)]
        drawn = [int(logits[0].argmax())]
        while len(drawn) < tokens:
            last = mx.array([drawn[-1:]])
            logits.append(_last(self.model.language_model(last, cache=cache)))
            drawn.append(int(logits[-1].argmax()))
        return OracleAnswer(prompt, tuple(drawn), np.stack(logits))

    def generated(self, messages: Sequence[Message], *, tokens: int) -> tuple[int, ...]:
        """The greedy answer of mlx-vlm's generate, whatever ends answers."""
        criteria = self.tokenizer.stopping_criteria
        self.tokenizer.stopping_criteria = lambda _: False
        try:
            results = mlx_vlm.stream_generate(
                self.model,
                self.processor,
                self.rendered(messages),
                image=_images(messages),
                max_tokens=tokens,
                temperature=0.0,
            )
            drawn = [int(result.token) for result in results]  # the last result repeats its token
            return tuple(drawn[:tokens])
        finally:
            self.tokenizer.stopping_criteria = criteria

    def logits(self, inputs: dict[str, Any], cache: list[Any] | None = None) -> np.ndarray:
        """The logits of the token behind a prompt: [vocabulary], float32."""
        model = self.model
        for name in _MODULE_STATE:
            if hasattr(model.language_model, name):
                setattr(model.language_model, name, None)
        ids = inputs["input_ids"]
        more = {key: value for key, value in inputs.items() if key not in _NAMED}
        features = model.get_input_embeddings(
            ids, inputs.get("pixel_values"), mask=mx.ones_like(ids), **more
        )
        found = {
            key: value
            for key, value in features.to_dict().items()
            if value is not None and key != "attention_mask_4d"  # which its generate ignores too
        }
        if "mm_token_type_ids" in inputs:
            found["mm_token_type_ids"] = inputs["mm_token_type_ids"]
        cache = cache or make_prompt_cache(model.language_model)
        return _last(model.language_model(ids, cache=cache, **found))


def _images(messages: Sequence[Message]) -> list[Image.Image]:
    return [
        Image.open(io.BytesIO(part["file"])).convert("RGB")
        for message in messages
        for part in message["content"]
        if part["type"] == "image"
    ]


def _flat(message: Message) -> str:
    """A message as text, for templates that know nothing of images."""
    parts = [part.get("text", "<image>\n") for part in message["content"]]
    return "".join(parts)


def _last(output: Any) -> np.ndarray:
    return np.array(output.logits[0, -1].astype(mx.float32))


def _as_mlx(value: Any) -> Any:
    if isinstance(value, mx.array):
        return value
    try:
        return mx.array(np.array(value))
    except (TypeError, ValueError):
        return value  # of images that differ in size
