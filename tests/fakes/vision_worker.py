"""Vision models in a worker, compared with mlx-vlm with the same files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from holdfast.config import ModelSettings
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.events import TokenLogprob, TokensGenerated
from holdfast.wire.images import ImageCommand, ImageLayout, ImageSpan, image_keys
from holdfast.wire.requests import TokenIds
from holdfast.worker.engine.image_probe import probe_images
from holdfast.worker.engine.layouts import Runner
from holdfast.worker.engine.load import LoadedModel, load_model
from holdfast.worker.engine.probe import choose_layout
from holdfast.worker.vision.feature_cache import FeatureCache
from holdfast.worker.vision.images import WorkerImages
from holdfast.worker.vision.model import VisionModel
from holdfast.worker.vision.processor import Processor
from tests.fakes.caching_worker import CachingWorker, greedy
from tests.fakes.inline_images import InlineImages
from tests.fakes.script_inbox import ScriptInbox
from tests.fakes.vision_models import write_vision_model
from tests.fakes.vision_oracle import Message, OracleAnswer, VisionOracle

# float32 rounds to 1e-5 here, and another image moves log-probabilities by more than 1e-2
TOLERANCE = 5e-4
FEATURES = "features"
_NAMES: dict[mx.Dtype, Literal["float32", "bfloat16"]] = {
    mx.float32: "float32",
    mx.bfloat16: "bfloat16",
}
TOP = 5  # log-probabilities compared for each position


@dataclass(frozen=True)
class VisionBeside:
    """A tiny vision model, loaded as in a worker, and mlx-vlm with the same files.

    images: the folder in which the front keeps the files of images.
    """

    loaded: LoadedModel
    runner: Runner
    oracle: VisionOracle
    images: Path

    @staticmethod
    def load(name: str, folder: Path, *, dtype: mx.Dtype = mx.float32) -> VisionBeside:
        """Write and load a model of the family `name`. dtype: of its weights and computations."""
        files = write_vision_model(folder / "model", name, dtype=dtype)
        settings = ModelSettings(dtype=_NAMES[dtype])
        loaded = load_model(files, settings, progress=lambda *_: None)
        images = folder / "images"
        images.mkdir()
        runner = choose_layout(loaded.model, vocab_size=loaded.vocab_size)
        beside = VisionBeside(loaded, runner, VisionOracle(files), images)
        examined = probe_images(runner, beside.worker_images())
        beside.processor.info = examined
        return beside

    @property
    def processor(self) -> Processor:
        """Of the model's images."""
        assert self.loaded.images is not None, self.loaded.images_refused
        return self.loaded.images

    def worker(self, folder: Path | None = None, **more: Any) -> CachingWorker:
        """One life of a worker; `folder`: of its store and of the features of images."""
        worker = CachingWorker(
            self.runner, vocab_size=self.loaded.vocab_size, folder=folder, **more
        )
        worker.engine.images = self.worker_images(folder)
        return worker

    def worker_images(
        self, folder: Path | None = None, *, ram_bytes: int = 1 << 24
    ) -> WorkerImages:
        """The images of one life of a worker; `folder`: of their features."""
        assert isinstance(self.loaded.model, VisionModel)
        features = FeatureCache(
            None if folder is None else folder / FEATURES,
            fingerprint="a model",
            ram_bytes=ram_bytes,
            disk_bytes=1 << 24,
        )
        reader = InlineImages(self.processor, self.images)
        return WorkerImages(self.loaded.model, self.processor, reader=reader, features=features)

    def request(self, request_id: str, messages: Sequence[Message], **more: Any) -> SequenceRequest:
        """A greedy request for the answer to a conversation, as the front writes it."""
        info = self.processor.info
        tokenizer = self.oracle.tokenizer
        text = self.oracle.rendered(messages).replace(info.template_placeholder, info.written)
        written = tokenizer(text, add_special_tokens=False)["input_ids"]
        placeholder = tokenizer.convert_tokens_to_ids(info.placeholder)
        layouts = iter(self._layouts(messages))
        prompt = TokenIds()
        spans: list[ImageSpan] = []
        for token_id in written:
            if token_id == placeholder:
                span = ImageSpan(start=len(prompt), layout=next(layouts))
                spans.append(span)
                prompt += image_keys(span.layout)
            else:
                prompt += TokenIds.of([token_id])
        assert next(layouts, None) is None, "an image has no place in the prompt"
        return greedy(
            request_id,
            prompt,
            images=tuple(spans),
            branch_points=tuple(span.end for span in spans),
            want_logprobs=True,
            top_logprobs=TOP,
            **more,
        )

    def _layouts(self, messages: Sequence[Message]) -> tuple[ImageLayout, ...]:
        parts = [part for message in messages for part in message["content"]]
        files = [part["file"] for part in parts if part["type"] == "image"]
        hashes = [keep_image(self.images, file) for file in files]
        images, command = self.worker_images(), ImageCommand(images=tuple(hashes))
        images.request_layouts(command)
        while (answer := next(images.answers(), None)) is None:
            pass
        assert not answer.failures
        found = {layout.image: layout for layout in answer.layouts}
        return tuple(found[name] for name in hashes)


def keep_image(folder: Path, data: bytes) -> str:
    """Write an image file as the front keeps it; returns its name."""
    name = hashlib.sha256(data).hexdigest()
    (folder / name).write_bytes(data)
    return name


def prompt_error(inbox: ScriptInbox, request_id: str, expected: OracleAnswer) -> float:
    """The difference between a prompt's log-probabilities and those of mlx-vlm. Its tokens must be
    the same.
    """
    found = inbox.started(request_id).logprobs
    assert tuple(each.token_id for each in found) == expected.prompt_token_ids[1:]
    return max(
        _error(each, logits)
        for each, logits in zip(found, expected.prompt_logits[:-1], strict=True)
    )


def tower_runs(worker: CachingWorker) -> int:
    """The number of times that image features were computed."""
    assert worker.engine.images is not None
    return worker.engine.images.figures.encoded


def differences(inbox: ScriptInbox, request_id: str, expected: OracleAnswer) -> str:
    """The fault of an answer; empty if it equals mlx-vlm's, with its log-probabilities."""
    found = _logprobs(inbox, request_id)
    tokens = tuple(each.token_id for each in found)
    if tokens != expected.token_ids:
        return f"{tokens} instead of {expected.token_ids}"
    errors = [_error(each, logits) for each, logits in zip(found, expected.logits, strict=True)]
    return "" if max(errors) < TOLERANCE else f"log-probabilities differ by up to {max(errors)}"


def _logprobs(inbox: ScriptInbox, request_id: str) -> list[TokenLogprob]:
    return [
        each
        for event in inbox.of(request_id)
        if isinstance(event, TokensGenerated)
        for each in event.logprobs
    ]


def _error(found: TokenLogprob, logits: np.ndarray) -> float:
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact - exact.max()).sum()) + exact.max()
    pairs = [(found.token_id, found.logprob), *found.top]
    return max(abs(logprob - exact[token_id]) for token_id, logprob in pairs)
