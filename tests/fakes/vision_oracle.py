"""mlx-vlm's own answers about images: its processor, embeddings and language model, for one
conversation alone, with one pass for each token and without a cache.
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
    """A user's message of texts and image files, in order."""
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
    """prompt_token_ids: including the images' tokens.
    prompt_logits: after each of these: [prompt tokens, vocabulary], float32.
    token_ids: drawn greedily.
    logits: used for drawing: [sampled tokens, vocabulary], float32.
    """

    prompt_token_ids: tuple[int, ...]
    prompt_logits: np.ndarray
    token_ids: tuple[int, ...]
    logits: np.ndarray


class VisionOracle:
    """mlx-vlm with the model of one folder.

    Faults and oddities of mlx-vlm 0.7.10 that matter here:
    qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe, qwen3_5, glm4v: the module keeps the positions of
        the last prompt; they are reset before each prompt.
    qwen3_vl, qwen3_vl_moe: mlx-vlm's batches lose the layers' features of all rows except the first.
    gemma3: attention within an image is causal, since the mask that allows more is never used; the
        embeddings that the language model is given are scaled in place.
    gemma4 with bidirectional images: attention within an image is causal behind a cached prefix, and
        without `mm_token_type_ids`, which the language model must be given.
    llava, llava_next: the processors pass what else they are given to the image processor, which
        refuses it. So they are given texts and images only; mlx-vlm's generate fails with llava.
    llava_next: 136 tokens of an image become 384 embeddings; all images but the first are ignored.
    internvl_chat: chat templates cannot show images; mlx-vlm writes `<image>` into texts.
    glm4v: from the third image of a prompt on, images attend to each other in the vision tower; with
        more than three images, the result is wrong.
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
        """The processor's output for a conversation: `input_ids`, `pixel_values`, …"""
        return self.processed(self.rendered(messages, asks=asks), _images(messages))

    def processed(self, text: str, images: list[Image.Image]) -> dict[str, Any]:
        """The processor's output for a rendered conversation and its images."""
        if not images:
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            return {"input_ids": mx.array([ids])}
        found = dict(self.processor(text=[text], images=images))
        return {key: _as_mlx(value) for key, value in found.items() if value is not None}

    def answer(
        self, messages: Sequence[Message], *, tokens: int = 1, said: Sequence[int] = ()
    ) -> OracleAnswer:
        """The greedy answer to a conversation, ignoring end tokens. said: its beginning."""
        inputs = self.inputs(messages)
        prompt = tuple(inputs["input_ids"][0].tolist())
        cache = make_prompt_cache(self.model.language_model)
        read = self._read(inputs, cache)
        last = read[-1]
        for token_id in said:
            last = self._step(token_id, cache)
        logits = [last]
        drawn = [int(last.argmax())]
        while len(drawn) < tokens:
            logits.append(self._step(drawn[-1], cache))
            drawn.append(int(logits[-1].argmax()))
        return OracleAnswer(prompt, read, tuple(drawn), np.stack(logits))

    def generated(self, messages: Sequence[Message], *, tokens: int) -> tuple[int, ...]:
        """The greedy answer of mlx-vlm's generate, ignoring end tokens."""
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

    def _read(self, inputs: dict[str, Any], cache: list[Any]) -> np.ndarray:
        """The logits of a whole prompt: [prompt tokens, vocabulary], float32."""
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
            if value is not None and key != "attention_mask_4d"  # ignored by its generate, too
        }
        if "mm_token_type_ids" in inputs:
            found["mm_token_type_ids"] = inputs["mm_token_type_ids"]
        output = model.language_model(ids, cache=cache, **found)
        return np.array(output.logits[0].astype(mx.float32))

    def _step(self, token_id: int, cache: list[Any]) -> np.ndarray:
        output = self.model.language_model(mx.array([[token_id]]), cache=cache)
        return np.array(output.logits[0, -1].astype(mx.float32))


def _images(messages: Sequence[Message]) -> list[Image.Image]:
    return [
        Image.open(io.BytesIO(part["file"])).convert("RGB")
        for message in messages
        for part in message["content"]
        if part["type"] == "image"
    ]


def _flat(message: Message) -> str:
    """A message as text, for templates without images."""
    parts = [part.get("text", "<image>\n") for part in message["content"]]
    return "".join(parts)


def _as_mlx(value: Any) -> Any:
    if isinstance(value, mx.array):
        return value
    try:
        return mx.array(np.array(value))
    except (TypeError, ValueError):
        return value  # of images of different sizes
