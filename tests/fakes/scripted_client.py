"""An WorkerClient that answers from a script, on the loop's thread, one event per iteration of the
loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from holdfast.errors import WorkerUnavailable
from holdfast.front.link.event_stream import EventStream
from holdfast.models.image_files import ImageUnusable, open_image
from holdfast.wire.commands import SequenceControl, SequenceRequest, ThinkingBudget, ThoughtLimit
from holdfast.wire.events import (
    Accepted,
    CacheReport,
    Event,
    Finished,
    FinishReason,
    ModelInfo,
    PrefillFinished,
    Rejected,
    RejectionKind,
    Timings,
    TokenLogprob,
    TokensGenerated,
)
from holdfast.wire.images import ImageAnswer, ImageCommand, ImageLayout
from holdfast.wire.kv import KVHealth
from holdfast.wire.requests import TokenIds

IMAGE_START, IMAGE_TOKEN, IMAGE_END = 901, 902, 903  # different from those of any tokenizer
Script = Callable[[SequenceRequest], Sequence[Event]]


def model_info(*, context_tokens: int = 200, vocab_size: int = 1000) -> ModelInfo:
    return ModelInfo(
        model_type="toy",
        layout="rows",
        layout_reason="",
        parameters=1,
        weight_bytes=1,
        compute_dtype="float32",
        context_tokens=context_tokens,
        vocab_size=vocab_size,
        kv=KVHealth(bits="native", bytes_per_token=1, forms={}, refused={}),
        fixed_bytes_per_sequence=0,
        kv_budget_bytes=1,
        device="cpu",
    )


class ScriptedClient:
    """Sends each request's script; after `Accepted` it waits until `may_go_on` is set.

    Records submitted and cancelled requests.
    """

    def __init__(self, script: Script, *, info: ModelInfo | None = None) -> None:
        self.info = info or model_info()
        self.submitted: list[SequenceRequest] = []
        self.cancelled: list[str] = []
        self.thought_limits: list[tuple[str, ThinkingBudget]] = []
        self.images: Path | None = None  # the folder from which images are read
        self.asked: list[ImageCommand] = []
        self.leases = 0
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.refuses_after: int | None = None  # this many submits succeed, then the worker is gone
        self._script = script
        self._feeders: set[asyncio.Task[None]] = set()

    def submit(self, request: SequenceRequest) -> EventStream:
        if self.refuses_after is not None and len(self.submitted) >= self.refuses_after:
            raise WorkerUnavailable("the worker is gone")
        self.submitted.append(request)
        stream = EventStream(request.request_id, control=self._control)
        feeder = asyncio.create_task(self._feed(stream, self._script(request)))
        self._feeders.add(feeder)
        feeder.add_done_callback(self._feeders.discard)
        return stream

    def _control(self, command: SequenceControl | ThoughtLimit) -> None:
        if isinstance(command, ThoughtLimit):
            self.thought_limits.append((command.request_id, command.budget))
        else:
            assert command.action == "cancel", "these streams are read as they come"
            self.cancelled.append(command.request_id)

    async def call(self, command: Any) -> Any:
        """Answers a question about images: each has one token per 16 × 16 pixels, between two
        markers. Images wider than 640 pixels do not fit the model.
        """
        assert isinstance(command, ImageCommand)
        self.asked.append(command)
        layouts, failures, lost = [], {}, {}
        for name in command.images:
            try:
                width, height = await asyncio.to_thread(self._size, name, command.max_pixels)
            except ImageUnusable as refusal:
                failures[name] = str(refusal)
                continue
            except OSError as error:
                lost[name] = f"damaged: {error}"
                continue
            if width > 640:
                failures[name] = f"the model cannot use this image: {width} pixels"
                continue
            tokens = max(4, (width // 16) * (height // 16))
            ids = (IMAGE_START, *[IMAGE_TOKEN] * tokens, IMAGE_END)
            layouts.append(ImageLayout(image=name, token_ids=TokenIds.of(ids)))
        return ImageAnswer(
            call_id=command.call_id, layouts=tuple(layouts), failures=failures, lost=lost
        )

    def _size(self, name: str, max_pixels: int | None) -> tuple[int, int]:
        assert self.images is not None, "the model reads text only"
        with open_image(self.images / name, max_pixels=max_pixels) as image:
            return image.size

    async def close(self) -> None:
        for feeder in list(self._feeders):
            feeder.cancel()
        await asyncio.gather(*self._feeders, return_exceptions=True)

    async def _feed(self, stream: EventStream, events: Sequence[Event]) -> None:
        for event in events:
            assert isinstance(
                event, Accepted | Rejected | PrefillFinished | TokensGenerated | Finished
            )
            stream.push(event)
            await asyncio.sleep(0)
            if isinstance(event, Accepted):
                await self.may_go_on.wait()


def answers(
    *token_ids: int, reason: FinishReason = FinishReason.STOP, error: str = "", per_event: int = 1
) -> Script:
    """Answer every request with these tokens (scored on request), this many per event."""

    def script(request: SequenceRequest) -> Sequence[Event]:
        request_id = request.request_id
        events: list[Event] = [Accepted(request_id=request_id)]
        if request.want_prompt_logprobs:
            scores = tuple(
                TokenLogprob(token_id, -2.0) for token_id in request.prompt_token_ids[1:]
            )
            events.append(
                PrefillFinished(
                    request_id=request_id,
                    cache_report=CacheReport(),
                    timings=Timings(),
                    logprobs=scores,
                )
            )
        for start in range(0, len(token_ids), per_event):
            part = token_ids[start : start + per_event]
            logprobs = (
                tuple(TokenLogprob(token_id, -1.0) for token_id in part)
                if request.want_logprobs
                else ()
            )
            events.append(TokensGenerated(request_id=request_id, token_ids=part, logprobs=logprobs))
        end = Finished(
            request_id=request_id,
            reason=reason,
            prompt_tokens=len(request.prompt_token_ids),
            completion_tokens=len(token_ids),
            error=error,
        )
        return [*events, end]

    return script


def refuses(kind: RejectionKind, *, message: str = "no", field: str = "") -> Script:
    """Refuse every request."""
    return lambda request: [
        Rejected(
            request_id=request.request_id,
            kind=kind,
            message=message,
            field=field,
            retry_after_seconds=3,
            queued=9,
            queue_limit=9,
            needed_bytes=9,
            budget_bytes=8,
        )
    ]
