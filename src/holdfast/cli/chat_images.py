"""Images in `holdfast chat`: paths within a message, and files as parts of a message."""

from __future__ import annotations

import base64
import mimetypes
import re
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from holdfast.errors import HoldfastError
from holdfast.files import read_regular
from holdfast.models.image_files import FORMATS_SHOWN

_SUFFIX = r"\.(?:png|jpe?g|webp|gif|bmp)"
# a path as a person types it, or as a terminal writes it when a file is dragged into its window: in
# quotes, with backslashes before spaces, or as a URL
_PATH = re.compile(
    rf"""'(?P<single>[^'\n]+{_SUFFIX})'|"(?P<double>[^"\n]+{_SUFFIX})"|"""
    rf"""(?<!\S)(?P<plain>(?:[^\s\\'"]|\\.)+{_SUFFIX})(?!\S)""",
    re.IGNORECASE,
)


class ImageUnreadable(HoldfastError):
    """A file to send as an image cannot be read."""


class ImagesTaken(NamedTuple):
    """The text of a message without the paths of images, and these paths."""

    text: str
    images: tuple[Path, ...]


def take_images(text: str) -> ImagesTaken:
    """Take the paths of existing image files out of a message."""
    images: list[Path] = []

    def take_path(match: re.Match[str]) -> str:
        path = typed_path(match[0])
        if path.is_file():
            images.append(path)
            return ""
        return match[0]

    text_without_paths = _PATH.sub(take_path, text)
    return ImagesTaken(text_without_paths.strip() if images else text, tuple(images))


def typed_path(typed: str) -> Path:
    """A path as a person or terminal writes it."""
    text = typed.strip()
    if text[:1] in ("'", '"') and text[-1:] == text[:1]:
        text = text[1:-1]
    elif text.startswith("file://"):
        text = unquote(urlsplit(text).path)
    else:
        text = re.sub(r"\\(.)", r"\1", text)
    return Path(text).expanduser()


def image_part(path: Path) -> dict[str, Any]:
    """An image file as a part of a message. Raises ImageUnreadable."""
    try:
        data = read_regular(path)
    except OSError as error:
        raise ImageUnreadable(f"{path} cannot be read: {error.strerror or error}") from error
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    if not kind.startswith("image/"):
        raise ImageUnreadable(f"{path} is not an image ({FORMATS_SHOWN})")
    text = base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{text}"}}
