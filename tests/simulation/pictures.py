"""The tiny images that agents send, and what the toy model sees in them.

In an agent's messages and in the texts that prompts are compared by, a mark takes the place of an
image. What the model sees of a token of an image is a number, computed from all pixels, that takes
the place of the token.
"""

from __future__ import annotations

import base64
import hashlib
import io
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from PIL import Image

PLACEHOLDER = "<|endoftext|>"  # of an image in a prompt
MARK = re.compile("⟪([^⟫]*)⟫")
_FIRST_NUMBER = 1 << 64  # above all tokens and image keys
_PARTS = 4  # of a number
_PART_BITS = 16


@dataclass(frozen=True)
class Picture:
    """A file that agents send as an image. pixels: with the size; empty if no image can be read from
    the file. tokens: in a prompt.
    """

    data: bytes
    pixels: bytes = b""
    tokens: int = 0

    @property
    def is_damaged(self) -> bool:
        return not self.pixels


def pixels_of(image: Image.Image) -> bytes:
    """The pixels of an image, and its size."""
    return b"%d %d " % image.size + image.tobytes()


def numbers_of(pixels: bytes, tokens: int, weights: str) -> list[int]:
    """What a model with these weights sees of each token of an image."""
    parts = parts_of(pixels, tokens, weights)
    return [number_of(each) for each in parts]


@lru_cache(maxsize=1 << 10)
def parts_of(pixels: bytes, tokens: int, weights: str) -> list[list[int]]:
    """The numbers in parts that are exact as float32: the features of the image."""
    size = _PARTS * _PART_BITS // 8
    digest = hashlib.shake_256(pixels + weights.encode()).digest(size * tokens)
    digits = [int.from_bytes(digest[at : at + 2], "little") for at in range(0, len(digest), 2)]
    return [digits[at : at + _PARTS] for at in range(0, len(digits), _PARTS)]


def number_of(parts: list[int]) -> int:
    """A number from its parts."""
    return _FIRST_NUMBER + sum(part << _PART_BITS * place for place, part in enumerate(parts))


def _drawn(width: int, height: int, seed: int, form: str = "BMP") -> Picture:
    image = Image.frombytes(
        "RGB", (width, height), random.Random(seed).randbytes(width * height * 3)
    )
    file = io.BytesIO()
    image.save(file, form)
    return Picture(file.getvalue(), pixels_of(image), width * height)


PICTURES: Mapping[str, Picture] = {
    "red": _drawn(4, 3, seed=1),
    "blue": _drawn(4, 3, seed=2),
    "tall": _drawn(3, 4, seed=1),
    "large": _drawn(10, 9, seed=3),  # more tokens than some steps have
    "dot": _drawn(1, 2, seed=4),  # too few tokens to be found in the cache
    "red again": _drawn(4, 3, seed=1, form="PNG"),
    "cut off": Picture(_drawn(4, 3, seed=5).data[:70]),
    "no image": Picture(b"This is no image."),
}
_BY_HASH = {hashlib.sha256(each.data).hexdigest(): name for name, each in PICTURES.items()}


def mark(name: str) -> str:
    """The mark of a picture."""
    return f"⟪{name}⟫"


def name_of_file(image: str) -> str:
    """The name of a picture, by the name under which the server keeps it."""
    return _BY_HASH[image[-64:]]


def mark_of_url(url: str) -> str:
    """The mark of a picture in a data URL."""
    data = base64.b64decode(url.partition(",")[2])
    return mark(_BY_HASH[hashlib.sha256(data).hexdigest()])


def as_tokens(text: str) -> str:
    """A text with as many placeholders as each image has tokens."""
    return MARK.sub(lambda found: PLACEHOLDER * PICTURES[found[1]].tokens, text)
