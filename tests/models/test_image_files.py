"""Opening image files."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from PIL import Image

from holdfast.errors import ImageTooLarge
from holdfast.models.image_files import ImageUnusable, open_image
from tests.fakes.images import broken_images, odd_images, picture, png, rotated, saved

ODD = odd_images()
BROKEN = broken_images()


def picture_of(color: tuple[int, int, int]) -> bytes:
    """The pixels of a picture of the usual size in one color."""
    return bytes(color) * (48 * 32)


@pytest.mark.parametrize("kind", ODD)
def test_an_unusual_image_is_opened_as_rgb(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "image"
    path.write_bytes(ODD[kind])
    with open_image(path, max_pixels=1_000_000) as image:
        assert image.mode == "RGB"
        assert min(image.size) >= 1


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_image_is_refused_with_a_reason(kind: str, tmp_path: Path) -> None:
    data, reason = BROKEN[kind]
    path = tmp_path / "image"
    path.write_bytes(data)
    with pytest.raises(ImageUnusable, match=reason):
        open_image(path, max_pixels=1_000_000)


def test_an_image_fixable_by_shrinking_is_refused_as_too_large(tmp_path: Path) -> None:
    too_large = {"wide bomb", "PNG bomb", "slightly too large", "BMP that claims to be huge"}
    too_large |= {"negative size"}  # read as a huge positive one
    for kind, (data, _) in BROKEN.items():
        path = tmp_path / "image"
        path.write_bytes(data)
        with pytest.raises(ImageUnusable) as refused:
            open_image(path, max_pixels=1_000_000)
        is_too_large = str(refused.value).startswith(ImageTooLarge.BEGINNING)
        assert is_too_large == (kind in too_large), f"{kind}: {refused.value}"


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_rotated_as_its_file_says(orientation: int, tmp_path: Path) -> None:
    path = tmp_path / "image"
    path.write_bytes(rotated(orientation))
    turned = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }[orientation]
    expected = picture() if turned is None else picture().transpose(turned)
    image = open_image(path)
    assert image.size == expected.size
    corners = [(3, 3), (image.width - 4, 3), (3, image.height - 4)]
    for corner in corners:
        ours, theirs = image.getpixel(corner), expected.getpixel(corner)
        assert isinstance(ours, tuple)
        assert isinstance(theirs, tuple)
        assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 40


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("alpha", picture_of((255, 255, 255))),
        ("WebP with alpha", picture_of((255, 255, 255))),
        ("16 bits", picture_of((128, 128, 128))),
        ("animated PNG", picture(seed=0).tobytes()),
    ],
)
def test_transparency_depth_and_frames_become_one_rgb_image(
    kind: str, expected: bytes, tmp_path: Path
) -> None:
    """Transparent parts are white, 16 bits keep their brightness, and the first frame is used."""
    path = tmp_path / "image"
    path.write_bytes(ODD[kind])
    assert open_image(path).tobytes() == expected


def test_a_file_that_does_not_match_its_hash_is_not_used(tmp_path: Path) -> None:
    data = png()
    path = tmp_path / hashlib.sha256(data).hexdigest()
    path.write_bytes(data)
    assert open_image(path).size == (48, 32)
    path.write_bytes(png(seed=1))
    with pytest.raises(OSError, match="is damaged"):
        open_image(path)


def test_an_image_at_the_limit_of_pixels_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "image"
    path.write_bytes(saved(picture((1000, 1000))))
    assert open_image(path, max_pixels=1_000_000).size == (1000, 1000)
