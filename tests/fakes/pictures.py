"""Image files made for tests: the same arguments give the same bytes."""

from __future__ import annotations

import io
import random
from typing import Literal

from PIL import Image, ImageDraw


def image_file(
    width: int,
    height: int,
    *,
    seed: int = 0,
    form: Literal["PNG", "JPEG", "WEBP"] = "PNG",
    shapes: int = 4,
) -> bytes:
    """An image with `shapes` ellipses and rectangles of random colours and positions."""
    rng = random.Random(seed)
    image = Image.new("RGB", (width, height), _colour(rng))
    pen = ImageDraw.Draw(image)
    for _ in range(shapes):
        left, top = rng.randrange(width), rng.randrange(height)
        corners = (left, top, rng.randint(left, width), rng.randint(top, height))
        draw = rng.choice([pen.ellipse, pen.rectangle])
        draw(corners, fill=_colour(rng))
    return _written(image, form)


def _colour(rng: random.Random) -> tuple[int, int, int]:
    return rng.randrange(256), rng.randrange(256), rng.randrange(256)


def _written(image: Image.Image, form: str) -> bytes:
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()
