"""Image files: naming and decoding.

The front writes the files that clients send. Only a worker's image process
(`worker/vision/image_worker.py`) decodes them, with Pillow, which is part of the extra `vision`.
Pillow reports broken files by many kinds of exceptions; `_BROKEN` lists them.
"""

from __future__ import annotations

import hashlib
import io
import re
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

from holdfast.errors import ImageTooLarge, InvalidRequest
from holdfast.files import read_regular

if TYPE_CHECKING:
    from PIL import Image

HOW_TO_INSTALL: Final = "in the clone: pip install -c constraints.txt '.[vision]'"
MAX_ASPECT_RATIO: Final = 200  # image processors refuse more
_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
FORMATS_SHOWN: Final = "PNG, JPEG, WebP, GIF or BMP"
# Each scan of a progressive JPEG passes over the whole image. Encoders write about 10 scans; a
# small file can have thousands, which would take minutes.
_MOST_SCANS: Final = 50
_SCAN: Final = b"\xff\xda"  # the marker at which a scan starts
# an image's file name: digits that identify the tenant, and the SHA-256 of the image
_NAME: Final = re.compile(r"([0-9a-f]{16})?([0-9a-f]{64})")
_TENANT_DIGITS: Final = 16
_LONGEST_REASON: Final = 100
_BROKEN: Final = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    EOFError,
    RuntimeError,
    Warning,
    struct.error,
    zlib.error,
)


class ImageUnusable(InvalidRequest):
    """An image whose contents cannot be used, by any model or by this one. The message says why."""


def image_name(data: bytes, *, tenant: str) -> str:
    """The file name of an image: the SHA-256 of its bytes in hexadecimal.

    A tenant's images have a 16-digit prefix derived from the tenant. So tenants share no cached
    data about images, and response times do not reveal what other tenants have sent.
    """
    digest = hashlib.sha256(data).hexdigest()
    prefix = hashlib.sha256(tenant.encode()).hexdigest()[:_TENANT_DIGITS] if tenant else ""
    return prefix + digest


def is_image_name(name: str) -> bool:
    """Whether this is the name of an image."""
    return _NAME.fullmatch(name) is not None


def _size_problem(image: Image.Image, *, max_pixels: int | None) -> str:
    """Why the size of an image is not acceptable; empty if it is."""
    width, height = image.size
    size = f"{width:,} × {height:,} pixels"
    if max_pixels is not None and width * height > max_pixels:
        return f"{ImageTooLarge.BEGINNING} it has {size}, but at most {max_pixels:,} are allowed"
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        limit = f"one side must be at most {MAX_ASPECT_RATIO} times as long as the other"
        return f"the image has {size}: {limit}"
    return ""


def open_image(path: Path, *, max_pixels: int | None = None) -> Image.Image:
    """Decode an image as RGB: upright, with transparency on white.

    Returns the first frame of an animation. Takes 10 to 40 ns and up to 12 bytes per pixel. Raises
    ImageUnusable if the contents are at fault; OSError if the file cannot be read or does not match
    the SHA-256 in its name.

    max_pixels: None: only Pillow's own limit applies.
    """
    data = read_regular(path)
    name = _NAME.fullmatch(path.name)
    if name is not None and hashlib.sha256(data).hexdigest() != name[2]:
        raise OSError(f"the image {path} is damaged: its contents do not have this hash")
    if not data:
        raise ImageUnusable("the image is empty")
    image = _decoded(data, max_pixels=max_pixels)
    if isinstance(image, str):
        raise ImageUnusable(image)
    return image


def _decoded(data: bytes, *, max_pixels: int | None) -> Image.Image | str:
    """The image, or why it cannot be used. Errors are not raised, because their tracebacks would
    keep the decoded image alive.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as file:
            problem = _size_problem(file, max_pixels=max_pixels)
            if problem:
                return problem
            if file.format in ("JPEG", "MPO") and data.count(_SCAN) > _MOST_SCANS:
                return f"the image must have at most {_MOST_SCANS} progressive scans"
            return _as_rgb(file)
    except UnidentifiedImageError:
        return f"the data is not a {FORMATS_SHOWN} image"
    except Image.DecompressionBombError:
        return f"{ImageTooLarge.BEGINNING} it has too many pixels"
    except MemoryError:
        return "the image takes too much memory to be decoded"
    except _BROKEN as error:
        reason = " ".join(str(error).split())[:_LONGEST_REASON]
        return f"the image is damaged and cannot be decoded: {reason}"


def _as_rgb(file: Image.Image) -> Image.Image:
    """Decode an image: upright, with white where it is transparent. Raises what Pillow raises."""
    from PIL import Image

    file.load()
    image = _upright(file)
    if image.mode in ("I", "I;16", "I;16B", "I;16L"):  # Pillow would cut off values above 255
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
        image.info.pop("transparency", None)
    if image.has_transparency_data:
        transparent = image.convert("RGBA")
        image = Image.new("RGBA", transparent.size, "white")
        image.alpha_composite(transparent)
    return image.convert("RGB")


def _upright(image: Image.Image) -> Image.Image:
    """The image, rotated according to its EXIF data; damaged EXIF data are ignored."""
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image)
    except _BROKEN:
        return image.copy()
