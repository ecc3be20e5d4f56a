"""Checks the images of a request, and puts them into the folder from which workers read them.

Only a few images are decoded at a time, and until then each exists only as the text or URL that the
client sent, so that many large images at once take no more memory than the requests themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from holdfast.config import DEFAULT_IMAGES, ImagesSettings
from holdfast.errors import ImagesRefused, InvalidRequest, WorkerUnavailable
from holdfast.front.images.fetch import AddressTest, DaemonThreads, fetch_image, is_public
from holdfast.front.images.folder import ImageFolder
from holdfast.front.images.sources import (
    IMAGE,
    ImageSource,
    images_in,
    is_image,
    left_out_note,
)
from holdfast.machine.clocks import awake_timeout
from holdfast.models.images import check_image
from holdfast.wire.images import VisionInfo
from holdfast.wire.requests import ChatPrompt

_CHECKED_AT_ONCE: Final = 2  # see `check_image` for the memory
_FETCHED_AT_ONCE: Final = 4
_READ_AT_ONCE: Final = 4
_TEXT_ONLY: Final = "this model reads text only"
_RESULT: Final = "tool"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedPrompt:
    """A prompt with the hashes of its images in place of their sources.

    fields: for each image, the request field that contains it, for error messages.
    """

    prompt: ChatPrompt
    fields: Mapping[str, str]


class ImageIntake:
    """Checks images and keeps them. Any thread may call any method, `entered` on an event loop."""

    def __init__(
        self,
        folder: Path,
        settings: ImagesSettings = DEFAULT_IMAGES,
        *,
        is_allowed: AddressTest = is_public,
    ) -> None:
        """folder: see `ImageFolder`. is_allowed: whether images may be fetched from an address."""
        self.folder = ImageFolder(folder, max_bytes=settings.disk_bytes)
        self._settings = settings
        self._is_allowed = is_allowed
        self._slots = threading.BoundedSemaphore(_CHECKED_AT_ONCE)
        self._readers = ThreadPoolExecutor(_READ_AT_ONCE, thread_name_prefix="read images")
        self._checkers = ThreadPoolExecutor(_CHECKED_AT_ONCE, thread_name_prefix="check images")
        self._fetchers = DaemonThreads(_FETCHED_AT_ONCE, name="fetch images")

    def close(self) -> None:
        """Check and fetch no further images. Does not wait for those that have begun."""
        for threads in (self._readers, self._checkers, self._fetchers):
            threads.shutdown(wait=False, cancel_futures=True)

    @contextlib.asynccontextmanager
    async def entered(
        self, prompt: ChatPrompt, vision: VisionInfo | None, *, tenant: str = ""
    ) -> AsyncIterator[CheckedPrompt]:
        """Check the images of a prompt, and hold their files until the context ends.

        If the model reads text only, images in tool results become notes.

        Raises InvalidRequest, which names the field; ImagesRefused if the model takes no images or
        Pillow is missing; WorkerUnavailable if that takes too long or the images cannot be written.
        """
        if vision is None or vision.refused:
            yield text_only(prompt, vision)
            return
        sources = self._accepted(prompt)
        with _Hold(self.folder, tenant, seconds=self._settings.check_seconds) as hold:
            try:
                async with awake_timeout(self._settings.check_seconds):
                    names = await asyncio.gather(
                        *(self._taken(source, hold) for source in sources), return_exceptions=True
                    )
            except TimeoutError:
                raise self._too_slow() from None
            for name in names:
                if isinstance(name, BaseException):
                    raise name
            yield _with_images(prompt, dict(zip(sources, map(str, names), strict=True)))

    @contextlib.contextmanager
    def entered_here(
        self, prompt: ChatPrompt, vision: VisionInfo | None, *, tenant: str = ""
    ) -> Iterator[CheckedPrompt]:
        """Like `entered`, but on the current thread, without an event loop."""
        if vision is None or vision.refused:
            yield text_only(prompt, vision)
            return
        sources = self._accepted(prompt)
        with _Hold(self.folder, tenant, seconds=self._settings.check_seconds) as hold:
            names = {
                source: self._take_fetched(source, hold)
                if source.url
                else self._take_known(source, hold) or self._take_new(source, hold)
                for source in sources
            }
            yield _with_images(prompt, names)

    async def _taken(self, source: ImageSource, hold: _Hold) -> str:
        run = asyncio.get_running_loop().run_in_executor
        if source.url:
            return await run(self._fetchers, self._take_fetched, source, hold)
        known = await run(self._readers, self._take_known, source, hold)
        return known or await run(self._checkers, self._take_new, source, hold)

    def _take_known(self, source: ImageSource, hold: _Hold) -> str:
        """Hold an image that was checked before. Returns its name; empty if it was not."""
        return hold.add(self._decoded(source), is_checked=False)

    def _take_new(self, source: ImageSource, hold: _Hold) -> str:
        return self._checked(self._decoded(source), hold, field=source.field)

    def _take_fetched(self, source: ImageSource, hold: _Hold) -> str:
        data = fetch_image(
            source.url,
            field=source.field,
            max_bytes=self._settings.max_bytes,
            seconds=hold.deadline - time.monotonic(),
            is_allowed=self._is_allowed,
        )
        known = hold.add(data, is_checked=False)
        return known or self._checked(data, hold, field=source.field)

    def _decoded(self, source: ImageSource) -> bytes:
        return source.decoded(max_bytes=self._settings.max_bytes)

    def _checked(self, data: bytes, hold: _Hold, *, field: str) -> str:
        with self._slots:
            check_image(data, max_pixels=self._settings.max_pixels, field=field)
        return hold.add(data, is_checked=True)

    def _accepted(self, prompt: ChatPrompt) -> list[ImageSource]:
        """The images to check. Raises InvalidRequest if the request may not have them."""
        sources = list(images_in(prompt.messages))
        assert all(isinstance(source, ImageSource) for source in sources), "not from a protocol"
        if len(sources) > (most := self._settings.max_count):
            raise InvalidRequest(
                f"a request may have at most {most:,} images, got {len(sources):,}",
                field=sources[most].field,
            )
        for source in sources:
            if source.url and not self._settings.urls:
                raise source.refused(
                    "this server does not fetch images; send the image as a data URL, or set "
                    "images.urls = true on the server"
                )
        return sources

    def _too_slow(self) -> WorkerUnavailable:
        return WorkerUnavailable(
            "the images of the request could not be fetched and checked within "
            f"{self._settings.check_seconds:g} s; please try again"
        )


def text_only(prompt: ChatPrompt, vision: VisionInfo | None = None) -> CheckedPrompt:
    """The prompt for a model that takes no images: those in tool results become notes.

    Raises ImagesRefused for other images.
    """
    for message in prompt.messages:
        for source in images_in([message]):
            if message["role"] != _RESULT:
                reason = _TEXT_ONLY
                if vision is not None:
                    reason = f"this model cannot be given images: {vision.refused}"
                raise ImagesRefused(reason, field=source.field)
    return _with_images(prompt, {})


class _Hold:
    """The images that one request holds in the folder. Thread-safe.

    The request may end before a thread has checked its last image.
    """

    def __init__(self, folder: ImageFolder, tenant: str, *, seconds: float) -> None:
        """seconds: for how long the images may be fetched."""
        self.deadline = time.monotonic() + seconds
        self._folder = folder
        self._tenant = tenant
        self._names: list[str] = []
        self._is_over = False
        self._lock = threading.Lock()

    def __enter__(self) -> _Hold:
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._is_over = True
            names, self._names = self._names, []
        self._folder.release(names)

    def add(self, data: bytes, *, is_checked: bool) -> str:
        """See `ImageFolder.hold`."""
        name = self._folder.hold(data, is_checked=is_checked, tenant=self._tenant)
        with self._lock:
            if not self._is_over and name:
                self._names.append(name)
                return name
        if name:
            self._folder.release([name])
        return name


def _with_images(prompt: ChatPrompt, names: Mapping[ImageSource, str]) -> CheckedPrompt:
    """The prompt with the names of images, and with notes in place of those that have none."""
    if next(images_in(prompt.messages), None) is None:
        return CheckedPrompt(prompt=prompt, fields={})

    def named(part: Any) -> Any:
        if not is_image(part):
            return part
        source = part[IMAGE]
        if source in names:
            return {"type": IMAGE, IMAGE: names[source]}
        return {"type": "text", "text": left_out_note(source.media_type or IMAGE)}

    messages = tuple(
        {**message, "content": [named(part) for part in message["content"]]}
        if any(True for _ in images_in([message]))
        else message
        for message in prompt.messages
    )
    return CheckedPrompt(
        prompt=msgspec.structs.replace(prompt, messages=messages),
        fields={name: source.field for source, name in names.items()},
    )
