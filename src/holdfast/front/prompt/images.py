"""Replaces the images of a conversation by tokens in the prompt.

In messages that are being prepared, an image is a *mark* within the text, so that everything that
handles texts handles images as well. The chat template gets a content part in place of each mark,
and writes the model's placeholder for it. Where the template does not write parts, the placeholder
itself takes the place of the mark. In the prompt's tokens, image keys (`wire/images.py`) replace
each placeholder.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from holdfast.errors import ImageUnresolved, WorkerUnavailable
from holdfast.front.images.folder import ImageFolder
from holdfast.front.images.intake import PromptWithImages
from holdfast.front.images.sources import IMAGE, is_image
from holdfast.front.request import ChatPrompt, PlacedImage
from holdfast.lru_cache import LruCache
from holdfast.wire.events import Answer
from holdfast.wire.images import ImageAnswer, ImageCommand, ImageLayout, ImageSpan
from holdfast.wire.requests import TokenIds

_OPENING: Final = f"\ufdd6{secrets.token_hex(8)}"  # random, so that no client can write a mark
_CLOSING: Final = "\ufdd7"
_MARK: Final = re.compile(f"{_OPENING}([0-9a-f]+){_CLOSING}")
_ENTRY_BYTES: Final = 500
_MAX_BYTES: Final = 16_000_000
_TEXT_KINDS: Final = frozenset({"text", "input_text", "output_text"})


def with_marks(message: Any) -> Any:
    """The message with its content as one text, if it consists of images and texts.

    Other messages are returned unchanged.
    """
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list | tuple) or not any(map(is_image, content)):
        return message
    texts = content_texts(content)
    return message if texts is None else {**message, "content": joined(texts)}


def content_texts(content: Any) -> list[str] | None:
    """The texts of a message's content, and the marks of its images; None if a part is neither."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list | tuple):
        return None
    texts: list[str] = []
    for part in content:
        if is_image(part):
            texts.append(image_mark(part[IMAGE]))
            continue
        is_text_part = isinstance(part, dict) and part.get("type", "text") in _TEXT_KINDS
        text = part.get("text") if is_text_part else part
        if not isinstance(text, str):
            return None
        texts.append(text)
    return texts


def image_mark(image: str) -> str:
    """The mark of an image. Only this function and `_MARK` know the form of marks."""
    mark = f"{_OPENING}{image}{_CLOSING}"
    assert _MARK.fullmatch(mark), "an image has a name that marks cannot contain"
    return mark


def has_images(text: str) -> bool:
    """Whether a text contains marks of images."""
    return _OPENING in text


def require_no_images(text: str) -> None:
    """Check that no mark is left in a text for a model or a client.

    Raises ImageUnresolved, which does not quote the mark: its opening is a secret.
    """
    if _OPENING in text:
        raise ImageUnresolved


def images_of(text: str) -> list[str]:
    """The images of a text with marks, in order."""
    return _MARK.findall(text) if _OPENING in text else []


def without_images(text: str) -> str:
    """The text without marks."""
    return _MARK.sub("", text) if _OPENING in text else text


def joined(texts: Sequence[str]) -> str:
    """The parts of a content as one text: line breaks separate texts, but not texts and images."""
    joined_text = ""
    is_after_text = False
    for text in texts:
        is_text = not _MARK.fullmatch(text)
        joined_text += f"\n{text}" if is_after_text and is_text else text
        is_after_text = is_text
    return joined_text


def content_parts(text: str) -> list[dict[str, Any]]:
    """A text with marks as the content parts that a chat template expects."""
    parts: list[dict[str, Any]] = []
    for index, piece in enumerate(_MARK.split(text)):
        if index % 2:
            parts.append({"type": IMAGE})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts


def with_placeholders(text: str, placeholder: str) -> str:
    """The text with a placeholder in place of each mark."""
    return _MARK.sub(lambda _: placeholder, text) if _OPENING in text else text


def pieces(text: str) -> Iterator[str]:
    """The pieces of a text with marks: each mark, and each text between them."""
    for index, piece in enumerate(_MARK.split(text)):
        if index % 2:
            yield image_mark(piece)
        elif piece:
            yield piece


def image_spans(
    images: Iterable[PlacedImage], layouts: Mapping[str, ImageLayout]
) -> tuple[ImageSpan, ...]:
    """The images of a prompt as the worker gets them."""
    return tuple(ImageSpan(start=each.start, layout=layouts[each.image]) for each in images)


def visible_tokens(
    token_ids: TokenIds, images: Iterable[PlacedImage], layouts: Mapping[str, ImageLayout]
) -> TokenIds:
    """The tokens of a prompt with the model's own tokens in place of image keys."""
    parts: list[TokenIds] = []
    end_of_image = 0
    for image in images:
        layout = layouts[image.image]
        parts += (token_ids[end_of_image : image.start], layout.token_ids)
        end_of_image = image.start + len(layout.token_ids)
    return TokenIds.joined((*parts, token_ids[end_of_image:])) if parts else token_ids


class ImageLayouts:
    """Remembers how models see images: their *layouts*, with the tokens of each image. Forgets the
    least recently used. Thread-safe.

    To get the layouts of a prompt's images: send the `question` to the worker if there is one,
    `learn` its answer, then call `prompt_and_layouts`.
    """

    def __init__(self, folder: ImageFolder | None = None) -> None:
        """folder: of the images; None: there are no images."""
        self._folder = folder
        # a string is the reason why a model cannot use an image
        self._layout_or_reason: LruCache[tuple[str, str], ImageLayout | str] = LruCache(_MAX_BYTES)

    def question(
        self, prompt: PromptWithImages, *, model: str, max_pixels: int | None
    ) -> ImageCommand | None:
        """The command that asks for missing layouts; None if none are missing.

        model: the fingerprint of the model.
        """
        missing = [
            image for image in prompt.fields if self._layout_or_reason.get((model, image)) is None
        ]
        return ImageCommand(images=tuple(missing), max_pixels=max_pixels) if missing else None

    def learn(self, answer: Answer, *, model: str) -> None:
        """Remember a worker's answer.

        Raises WorkerUnavailable if an image could not be processed at the moment. The file of an
        image without a layout is checked against its hash before its next use.
        """
        assert isinstance(answer, ImageAnswer)
        for layout in answer.layouts:
            size = len(layout.token_ids.packed) + _ENTRY_BYTES
            self._layout_or_reason.put((model, layout.image), layout, size=size)
        for image, reason in answer.failures.items():
            self._layout_or_reason.put((model, image), reason, size=_ENTRY_BYTES)
        if self._folder is not None:
            self._folder.forget((*answer.failures, *answer.lost))
        for reason in answer.lost.values():
            raise WorkerUnavailable(reason)

    def prompt_and_layouts(
        self, prompt: PromptWithImages, *, model: str
    ) -> tuple[ChatPrompt, dict[str, ImageLayout]]:
        """The prompt, with notes in place of images that the model cannot use, and the layouts of
        its images.

        Raises InvalidRequest if the model cannot use a new image; WorkerUnavailable if layouts were
        evicted in the meantime.
        """
        known_layouts = {
            image: self._layout_or_reason.get((model, image)) for image in prompt.fields
        }
        if None in known_layouts.values():
            raise WorkerUnavailable(
                "the images of the request are no longer cached; please try again"
            )
        unusable = {image: each for image, each in known_layouts.items() if isinstance(each, str)}
        layouts = {
            image: each for image, each in known_layouts.items() if isinstance(each, ImageLayout)
        }
        return prompt.without(unusable), layouts
