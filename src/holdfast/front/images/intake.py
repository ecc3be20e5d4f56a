"""Stores the images of a request in the folder from which workers read them.

Here, an image is opaque bytes: a worker's image process decodes it and reports whether it can be
used. An image that was sent before is recognized by its text or URL, so that a later turn neither
decodes its base64 nor fetches it again.

An image that is unusable or one too many is an error only if it is new: in the user's latest
message, with no answer after it. Anywhere else, a note takes its place in the prompt, because
otherwise every later turn of the conversation would fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from holdfast.config import DEFAULT_IMAGES, ImagesSettings
from holdfast.errors import ImagesRefused, ImageTooLarge, InvalidRequest, WorkerUnavailable
from holdfast.front.images.fetch import AddressTest, DaemonThreads, fetch_image, is_public
from holdfast.front.images.folder import ImageFolder
from holdfast.front.images.sources import (
    IMAGE,
    TOO_MANY_NOTE,
    UNREADABLE_NOTE,
    ImageSource,
    SourceKey,
    image_part,
    images_in,
    is_image,
    left_out_note,
    newest_user,
    note_part,
)
from holdfast.front.request import ChatPrompt
from holdfast.lru_cache import LruCache
from holdfast.machine.clocks import awake_timeout
from holdfast.wire.images import VisionInfo

_FETCHED_AT_ONCE: Final = 4
_READ_AT_ONCE: Final = 2  # each holds the bytes of one image
_MOST_REMEMBERED: Final = 20_000  # sources
_EARLIER_SHARE: Final = 0.3  # of the remaining time, for fetching an image of an earlier turn
_LEFT_OUT_BATCHES: Final = 4  # images are left out in batches of this fraction of the limit
_TEXT_ONLY: Final = "this model reads text only"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptWithImages:
    """A prompt with the names of its images in place of their sources.

    fields: for each image, the request field that contains it, for error messages. new: the images
    in the user's latest message, which must not be left out.
    """

    prompt: ChatPrompt
    fields: Mapping[str, str]
    new: frozenset[str] = frozenset()

    def without(self, unusable: Mapping[str, str]) -> ChatPrompt:
        """The prompt with notes in place of images that the model cannot use.

        Raises InvalidRequest if one of them is new.

        unusable: the reason for each.
        """
        for name, reason in unusable.items():
            if name in self.new:
                is_too_large = reason.startswith(ImageTooLarge.BEGINNING)
                error_type = ImageTooLarge if is_too_large else InvalidRequest
                raise error_type(reason, field=self.fields[name])

        def part_of_image(name: Any) -> dict[str, str]:
            return note_part(UNREADABLE_NOTE) if name in unusable else {"type": IMAGE, IMAGE: name}

        return _with_parts(self.prompt, part_of_image) if unusable else self.prompt


class ImageIntake:
    """Stores the images of requests. Thread-safe; `stored` needs an event loop."""

    def __init__(
        self,
        folder: Path,
        settings: ImagesSettings = DEFAULT_IMAGES,
        *,
        is_allowed: AddressTest = is_public,
    ) -> None:
        """folder: of the files that workers read; created when the first image is written.
        is_allowed: whether images may be fetched from an address.
        """
        self.folder = ImageFolder(folder, max_bytes=settings.disk_bytes)
        self.max_pixels = settings.max_pixels
        self._settings = settings
        self._is_allowed = is_allowed
        # names of images by tenant and source; empty: the image could not be fetched
        self._names: LruCache[tuple[str, SourceKey], str] = LruCache(_MOST_REMEMBERED)
        self._readers = ThreadPoolExecutor(_READ_AT_ONCE, thread_name_prefix="read images")
        self._fetchers = DaemonThreads(_FETCHED_AT_ONCE, name="fetch images")

    def close(self) -> None:
        """Accept no more images. Does not wait for images that are being stored."""
        for threads in (self._readers, self._fetchers):
            threads.shutdown(wait=False, cancel_futures=True)

    @contextlib.asynccontextmanager
    async def stored(
        self, prompt: ChatPrompt, *, tenant: str = ""
    ) -> AsyncIterator[PromptWithImages]:
        """Store the images of a prompt, and hold their files until the context ends.

        Raises InvalidRequest, which names the field; WorkerUnavailable if fetching takes too long or
        the images cannot be written.
        """
        prompt, sources = self._within_limit(prompt)
        with _HeldImages(self.folder, tenant, seconds=self._settings.check_seconds) as held_images:
            try:
                async with awake_timeout(self._settings.check_seconds):
                    names_or_errors = await asyncio.gather(
                        *(
                            self._store(source, held_images, is_new)
                            for source, is_new in sources.items()
                        ),
                        return_exceptions=True,
                    )
            except TimeoutError:
                raise self._timeout_error() from None
            yield _with_names(
                prompt, dict(zip(sources, names_or_errors, strict=True)), new=_new(sources)
            )

    @contextlib.contextmanager
    def stored_here(self, prompt: ChatPrompt, *, tenant: str = "") -> Iterator[PromptWithImages]:
        """Like `stored`, but on the current thread, without an event loop."""
        prompt, sources = self._within_limit(prompt)
        with _HeldImages(self.folder, tenant, seconds=self._settings.check_seconds) as held_images:
            names_or_errors: dict[ImageSource, str | BaseException] = {}
            for source, is_new in sources.items():
                try:
                    names_or_errors[source] = self._store_here(source, held_images, is_new)
                except InvalidRequest as refusal:
                    names_or_errors[source] = refusal
            yield _with_names(prompt, names_or_errors, new=_new(sources))

    async def _store(self, source: ImageSource, held_images: _HeldImages, is_new: bool) -> str:
        """Store an image on other threads, and hold its file. Returns its name."""
        run_on = asyncio.get_running_loop().run_in_executor
        threads = self._fetchers if source.url and is_new else self._readers
        name = await run_on(threads, self._hold_known_image, source, held_images, is_new)
        if name:
            return name
        threads = self._fetchers if source.url else self._readers
        return await run_on(threads, self._store_new_image, source, held_images, is_new)

    def _store_here(self, source: ImageSource, held_images: _HeldImages, is_new: bool) -> str:
        """Store an image on this thread, and hold its file. Returns its name."""
        known_name = self._hold_known_image(source, held_images, is_new)
        return known_name or self._store_new_image(source, held_images, is_new)

    def _hold_known_image(self, source: ImageSource, held_images: _HeldImages, is_new: bool) -> str:
        """Hold an image that the same tenant has sent before. Returns its name; empty if it is
        unknown, or if it must be fetched because its URL is in a new message.

        Raises InvalidRequest if an earlier fetch of the image failed.
        """
        if source.problem or (source.url and is_new):
            return ""
        name = self._names.get((held_images.tenant, source.key()))
        if name == "":
            raise source.refused("the image could not be fetched before")
        return name if name and held_images.add_again(name) else ""

    def _store_new_image(self, source: ImageSource, held_images: _HeldImages, is_new: bool) -> str:
        """Decode or fetch an image, store and hold its file, and remember its name."""
        name = held_images.add(self._bytes_of(source, held_images, is_new))
        self._names.put((held_images.tenant, source.key()), name)
        return name

    def _bytes_of(self, source: ImageSource, held_images: _HeldImages, is_new: bool) -> bytes:
        """The bytes of an image, decoded or fetched. Raises InvalidRequest."""
        if not source.url:
            return source.decoded(max_bytes=self._settings.max_bytes)
        if not self._settings.urls:
            raise source.refused(
                "this server does not fetch images; send the image as a data URL, or set "
                "images.urls = true on the server"
            )
        remaining_seconds = held_images.deadline - time.monotonic()
        try:
            return fetch_image(
                source.url,
                field=source.field,
                max_bytes=self._settings.max_bytes,
                # leaves time to continue without this image of an earlier turn
                seconds=remaining_seconds if is_new else remaining_seconds * _EARLIER_SHARE,
                is_allowed=self._is_allowed,
            )
        except InvalidRequest:
            self._names.put((held_images.tenant, source.key()), "")
            raise

    def _within_limit(self, prompt: ChatPrompt) -> tuple[ChatPrompt, dict[ImageSource, bool]]:
        """The prompt with notes in place of its oldest images if it has too many; and the images to
        store, and whether each is new. Raises InvalidRequest if there are too many new ones.

        The oldest images are left out in batches, so that the next turns leave out the same ones
        and their prompts stay cached.
        """
        sources = _sources(prompt.messages)
        max_images = self._settings.max_count
        new_sources = [source for source, is_new in sources.items() if is_new]
        if len(new_sources) > max_images:
            raise InvalidRequest(
                f"a message may have at most {max_images:,} images, got {len(new_sources):,}",
                field=new_sources[max_images].field,
            )
        excess_images = len(sources) - max_images
        if excess_images <= 0:
            return prompt, sources
        batch_images = max(1, max_images // _LEFT_OUT_BATCHES)
        old_sources = [source for source, is_new in sources.items() if not is_new]
        left_out = {*old_sources[: -(-excess_images // batch_images) * batch_images]}

        def part_of_image(source: ImageSource) -> dict[str, Any]:
            return note_part(TOO_MANY_NOTE) if source in left_out else image_part(source)

        remaining = {source: is_new for source, is_new in sources.items() if source not in left_out}
        return _with_parts(prompt, part_of_image), remaining

    def _timeout_error(self) -> WorkerUnavailable:
        """The error when the images were not stored in time."""
        return WorkerUnavailable(
            "the images of the request could not be fetched and kept within "
            f"{self._settings.check_seconds:g} s; please try again"
        )


def _sources(messages: Sequence[Mapping[str, Any]]) -> dict[ImageSource, bool]:
    """The images of a conversation in order, and whether each is new."""
    sources: dict[ImageSource, bool] = {}
    newest_user_index = newest_user(messages)
    for index, message in enumerate(messages):
        if not isinstance(message.get("content"), str):
            sources |= dict.fromkeys(images_in([message]), index == newest_user_index)
    assert all(isinstance(source, ImageSource) for source in sources), "not from a protocol"
    return sources


def _new(sources: Mapping[ImageSource, bool]) -> frozenset[ImageSource]:
    """The images in the user's latest message."""
    return frozenset(source for source, is_new in sources.items() if is_new)


def text_only(prompt: ChatPrompt, vision: VisionInfo | None = None) -> ChatPrompt:
    """The prompt for a model that takes no images, with notes in place of images that are not new.

    Raises ImagesRefused for a new image.
    """
    sources = _sources(prompt.messages)
    for source, is_new in sources.items():
        if is_new:
            if source.problem:
                raise source.refused(source.problem)
            reason = _TEXT_ONLY
            if vision is not None:
                reason = f"this model cannot be given images: {vision.refused}"
            raise ImagesRefused(reason, field=source.field)
    if sources:
        prompt = _with_parts(
            prompt, lambda source: note_part(left_out_note(source.media_type or IMAGE))
        )
    return prompt


class _HeldImages:
    """The images that one request holds in the folder. Thread-safe.

    The request may end before a thread has checked its last image.
    """

    def __init__(self, folder: ImageFolder, tenant: str, *, seconds: float) -> None:
        """seconds: for how long the images may be fetched."""
        self.deadline = time.monotonic() + seconds
        self.tenant = tenant
        self._folder = folder
        self._names: list[str] = []
        self._is_over = False
        self._lock = threading.Lock()

    def __enter__(self) -> _HeldImages:
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._is_over = True
            names, self._names = self._names, []
        self._folder.release_images(names)

    def add(self, data: bytes) -> str:
        """Hold the image with these bytes, and store it if it is new. Returns its name."""
        name = self._folder.hold_image(data, tenant=self.tenant)
        self._record_hold(name)
        return name

    def add_again(self, name: str) -> bool:
        """Hold an image that is already stored. Returns False if it is no longer available."""
        is_stored = self._folder.hold_existing(name)
        if is_stored:
            self._record_hold(name)
        return is_stored

    def _record_hold(self, name: str) -> None:
        """Record a hold, to be released at the end of the request; at once if the request has
        ended.
        """
        with self._lock:
            if not self._is_over:
                self._names.append(name)
                return
        self._folder.release_images([name])


def _with_names(
    prompt: ChatPrompt,
    names_or_errors: Mapping[ImageSource, str | BaseException],
    *,
    new: Container[ImageSource],
) -> PromptWithImages:
    """The prompt with the names of its images, and notes in place of images without a name.

    Raises the exception that there is instead of a name, except an InvalidRequest for an image that
    is not new.
    """
    names: dict[ImageSource, str] = {}
    for source, name in names_or_errors.items():
        if isinstance(name, str):
            names[source] = name
        elif source in new or not isinstance(name, InvalidRequest):
            raise name

    def part_of_image(source: ImageSource) -> dict[str, Any]:
        name = names.get(source)
        return note_part(UNREADABLE_NOTE) if name is None else {"type": IMAGE, IMAGE: name}

    return PromptWithImages(
        prompt=_with_parts(prompt, part_of_image) if names_or_errors else prompt,
        fields={name: source.field for source, name in names.items()},
        new=frozenset(name for source, name in names.items() if source in new),
    )


def _with_parts(prompt: ChatPrompt, part_of: Callable[[Any], dict[str, Any]]) -> ChatPrompt:
    """The prompt with each image replaced by the result of `part_of`."""
    messages = tuple(
        {
            **message,
            "content": [
                part_of(part[IMAGE]) if is_image(part) else part for part in message["content"]
            ],
        }
        if any(True for _ in images_in([message]))
        else message
        for message in prompt.messages
    )
    return msgspec.structs.replace(prompt, messages=messages)
