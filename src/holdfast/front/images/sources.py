"""Images as clients send them, within the request or by a URL, and notes in place of parts that no
model here reads.

The protocols put an `ImageSource` where a message has an image: as the part
`{"type": "image", "image": source}`. When the model is known, `ImageIntake` checks the image and
puts its hash in the place of the source.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import xxhash

from holdfast.errors import ImageTooLarge, InvalidRequest

IMAGE: Final = "image"  # type of a message part with an image, and the key of the image in it
_DATA_URL: Final = re.compile(r"data:(?P<type>[^,;]{0,127})(?:;[^,;]{0,127})*?;base64,", re.I)
_MEDIA_TYPE: Final = re.compile(r"[a-z]{1,20}/[a-zA-Z0-9.+-]{1,60}")
_SPACE: Final = re.compile(r"\s+")
_WEB: Final = ("http://", "https://")
_DIGEST_DIGITS: Final = 12
_PART_TYPES: Final = frozenset({IMAGE, "image_url", "input_image"})  # types of parts
_SYSTEM: Final = frozenset({"system", "developer"})
_REFUSAL_KEY: Final = "why it is refused"  # key of an error in an unreadable part
_IMAGE_KEYS: Final = ("image_url", "source", "image", "data", "url")  # of the image, within a part


SourceKey: TypeAlias = tuple[int, int, int]
"""Identifies the bytes of an image: their number, Python's hash, and XXH3. Nobody can construct two
images with the same key, because Python's hash is seeded with a per-process secret.
"""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ImageSource:
    """An image as a client sent it. At most one of `text`, `url` and `data` is set.

    field: the request field with the image, for error messages. media_type: as the client says;
    empty if it does not, or if what it says is not a media type. text: base64, from index
    `begins_at` on. problem: why this is not an image; empty if it is one. This is not an error yet,
    because the source may belong to an earlier turn.
    """

    field: str
    media_type: str = ""
    text: str = ""
    begins_at: int = 0
    url: str = ""
    data: bytes = b""
    problem: str = ""
    shown: str = ""  # what the client sent instead of an image; never logged

    def decoded(self, *, max_bytes: int) -> bytes:
        """The bytes of an image that is within the request. Raises InvalidRequest."""
        if self.problem:
            raise self.refused(self.problem)
        size = len(self.data) or (len(self.text) - self.begins_at) * 3 // 4
        if size > max_bytes + 2:  # base64's padding counts as up to 2 bytes
            raise ImageTooLarge(
                f"it has about {size:,} bytes, but at most {max_bytes:,} are allowed",
                field=self.field,
            )
        if not self.text:
            return self.data
        text = self.text[self.begins_at :]
        try:
            return base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            pass
        try:  # some encoders break the lines
            return base64.b64decode(_SPACE.sub("", text), validate=True)
        except (binascii.Error, ValueError) as error:
            raise self.refused("the image is not valid base64") from error

    def key(self) -> SourceKey:
        """Equal for equal images that were sent in the same way. Takes 0.5 ns per byte; decoding
        base64 takes 6 ns, and SHA-256 of the result 1 ns.
        """
        sent = self.data or (self.text or self.url).encode("utf-8", "surrogatepass")
        return len(sent), hash(sent), xxhash.xxh3_128_intdigest(sent)

    def digest(self) -> str:
        """A short digest of the data that the client sent: equal images, sent in the same way,
        have the same digest.
        """
        return f"{self.key()[2]:032x}"[:_DIGEST_DIGITS]

    def refused(self, reason: str) -> InvalidRequest:
        """The error for an image that cannot be used."""
        return InvalidRequest(reason, field=self.field, shown=self.shown)

    def __repr__(self) -> str:
        return f"<{self.media_type or 'image'}>"


def image_source(part: Mapping[str, Any], field: str) -> ImageSource:
    """The image of a message part, in the form of any protocol: `image_url` (a URL, or an object
    with one), `source` (Anthropic), `image`, or `data` (base64).

    field: the request field that contains the part.
    """
    for name in _IMAGE_KEYS:
        if (image := part.get(name)) is not None:
            image_field = f"{field}.{name}"
            if isinstance(image, bytes):  # only from the library
                return ImageSource(field=image_field, data=image)
            if isinstance(image, ImageSource):  # only from the library
                return image
            media_type = part.get("media_type") or part.get("mimeType")
            if isinstance(image, Mapping):
                media_type = image.get("media_type") or media_type
                image = image.get("url") or image.get("data")
            return text_source(image, image_field, media_type=media_type)
    if part.get("file_id") is not None:
        return ImageSource(
            field=f"{field}.file_id",
            problem="files cannot be uploaded to this server; send the image as a data URL",
        )
    return ImageSource(field=field, problem="the part has no image")


def text_source(text: Any, field: str, *, media_type: Any = None) -> ImageSource:
    """The image that a text contains or refers to: a data URL, an http(s) URL, or base64."""
    stated_type = media_type if isinstance(media_type, str) else ""
    if not isinstance(text, str) or not text:
        return ImageSource(field=field, problem="an image must be a URL or base64 text")
    if text[:8].lower().startswith(_WEB):
        return ImageSource(field=field, url=text)
    begins_at = 0
    if text[:5].lower() == "data:":
        data_url = _DATA_URL.match(text)
        if data_url is None:
            return ImageSource(
                field=field, problem="a data URL must have the form data:image/png;base64,…"
            )
        stated_type = data_url["type"] or stated_type
        begins_at = data_url.end()
    elif ":" in text[:40]:
        return ImageSource(
            field=field, problem="an image must be a data URL, an http or https URL, or base64 text"
        )
    valid_type = stated_type if _MEDIA_TYPE.fullmatch(stated_type) else ""
    if stated_type and "/" in stated_type and not stated_type.lower().startswith("image/"):
        return ImageSource(
            field=field,
            media_type=valid_type,
            problem="the media type must be an image type",
            shown=f", not {stated_type[:40]!r}",
        )
    if begins_at == len(text):
        return ImageSource(field=field, media_type=valid_type, problem="the image is empty")
    return ImageSource(field=field, media_type=valid_type, text=text, begins_at=begins_at)


def image_part(source: ImageSource) -> dict[str, Any]:
    """The part of a message that contains an image."""
    return {"type": IMAGE, IMAGE: source}


def is_image_kind(kind: str) -> bool:
    """Whether clients send images in parts of this type."""
    return kind in _PART_TYPES


def with_image(part: Mapping[str, Any], field: str) -> dict[str, Any]:
    """The prompt's part for a message part as a client sent it; unchanged if it is not an image."""
    return image_part(image_source(part, field)) if is_image_kind(part["type"]) else dict(part)


def is_image(part: Any) -> bool:
    """Whether a part of a message is an image, checked or not."""
    return (
        isinstance(part, Mapping)
        and part.get("type") == IMAGE
        and isinstance(part.get(IMAGE), str | ImageSource)
    )


def images_in(messages: Sequence[Any]) -> Iterator[Any]:
    """The images of a conversation in order: hashes, or sources if they were not checked yet."""
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list | tuple):
            for part in content:
                if is_image(part):
                    yield part[IMAGE]


def for_log(messages: Sequence[Any]) -> list[Any]:
    """The messages with short names in place of images that were not checked yet."""
    return [
        {**message, "content": [_for_log(part) for part in message["content"]]}
        if any(True for _ in images_in([message]))
        else message
        for message in messages
    ]


def _for_log(part: Any) -> Any:
    return {**part, IMAGE: repr(part[IMAGE])} if is_image(part) else part


def newest_user(messages: Sequence[Mapping[str, Any]]) -> int | None:
    """The index of the user's latest message; None if an answer follows it."""
    for index in reversed(range(len(messages))):
        if messages[index].get("role") == "user":
            return index
        if messages[index].get("role") == "assistant":
            return None
    return None


def left_out_note(what: str) -> str:
    """What a model reads in place of content that it, or every model here, cannot read."""
    return f"[{what} left out: this model takes text only]"


def note_part(text: str) -> dict[str, Any]:
    """The part of a message that contains a note."""
    return {"type": "text", "text": text}


def unreadable_part(note: str, refusal: InvalidRequest) -> dict[str, Any]:
    """A part that no model here reads, until `with_notes` decides about it."""
    return {**note_part(note), _REFUSAL_KEY: refusal}


def with_notes(messages: Iterable[dict[str, Any]]) -> tuple[tuple[dict[str, Any], ...], bool]:
    """The messages of a prompt, with notes in place of parts that no model here reads; and whether
    they have images.

    Raises the refusal of such a part if it is new: in the user's latest message, or in a system
    message, with no answer after it. Anywhere else it must not be an error, because otherwise every
    later turn of the conversation would fail.
    """
    ready_messages: list[dict[str, Any]] = []
    unreadable_indices: list[int] = []
    has_images = False
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            has_images = has_images or any(map(is_image, content))
            if any(map(_is_unreadable, content)):
                unreadable_indices.append(len(ready_messages))
        ready_messages.append(message)
    for index in unreadable_indices:
        message = ready_messages[index]
        parts = message["content"]
        is_new_system = message.get("role") in _SYSTEM and not any(
            each.get("role") == "assistant" for each in ready_messages[index:]
        )
        if index == newest_user(ready_messages) or is_new_system:
            raise next(part[_REFUSAL_KEY] for part in parts if _is_unreadable(part))
        parts_with_notes = [
            note_part(part["text"]) if _is_unreadable(part) else part for part in parts
        ]
        ready_messages[index] = {**message, "content": parts_with_notes}
    return tuple(ready_messages), has_images


def _is_unreadable(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get(_REFUSAL_KEY), InvalidRequest)


UNREADABLE_NOTE: Final = "[image left out: it cannot be read]"
"""What a model reads in place of an unusable image of an earlier turn. The same for all reasons, so
that the prompts of later turns begin with the prompt of this one.
"""

TOO_MANY_NOTE: Final = "[image left out: the conversation has too many images]"
"""What a model reads in place of the oldest images of a conversation that has too many."""
