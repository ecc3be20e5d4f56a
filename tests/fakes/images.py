"""Images made for tests: normal, unusual, and broken ones."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from functools import cache
from typing import Any

from PIL import Image, ImageDraw


def picture(size: tuple[int, int] = (48, 32), mode: str = "RGB", *, seed: int = 0) -> Image.Image:
    """Coloured shapes that look different for each seed."""
    image = Image.new("RGB", size, (seed * 37 % 256, 80, 160))
    draw = ImageDraw.Draw(image)
    width, height = size
    draw.ellipse((width // 8, height // 8, width // 2, height // 2), fill=(255, seed % 256, 0))
    draw.rectangle((width // 2, height // 2, width - 1, height - 1), fill=(0, 200, 40))
    return image.convert(mode)


def saved(image: Image.Image, file_format: str = "PNG", **options: Any) -> bytes:
    """The bytes of an image file."""
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def png(seed: int = 0, size: tuple[int, int] = (48, 32)) -> bytes:
    """A small PNG file; each seed gives different bytes."""
    return saved(picture(size, seed=seed))


def data_url(data: bytes, media_type: str = "image/png") -> str:
    """The image as a data URL, as most clients send it."""
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def chunk(kind: bytes, data: bytes) -> bytes:
    """One chunk of a PNG file."""
    checksum = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)


def bomb(width: int, height: int) -> bytes:
    """A PNG file of a few kilobytes with many black pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    packed = zlib.compressobj(9)
    row = b"\0" * (width + 1)
    body = b"".join(packed.compress(row) for _ in range(height)) + packed.flush()
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
    )


def claimed(width: int, height: int) -> bytes:
    """A PNG file that claims this size without having pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def scans(count: int) -> bytes:
    """A progressive JPEG file whose last scan is repeated."""
    data = saved(picture(), "JPEG", progressive=True)
    start = data.rindex(b"\xff\xda")
    return data[:start] + data[start:-2] * count + b"\xff\xd9"


def rotated(orientation: int) -> bytes:
    """A JPEG file with an orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(picture(), "JPEG", exif=exif, quality=95)


def animated(file_format: str) -> bytes:
    """An image with three frames."""
    frames = [picture(seed=seed) for seed in range(3)]
    return saved(frames[0], file_format, save_all=True, append_images=frames[1:], duration=50)


@cache
def odd_images() -> dict[str, bytes]:
    """Files that are unusual, but can be read."""
    grey_16 = Image.new("I;16", (48, 32), 0x8080)
    palette = picture(mode="P")
    clear = picture(mode="RGBA")
    clear.putalpha(Image.new("L", clear.size, 0))
    text = saved(picture(), "PNG")
    return {
        "PNG": png(),
        "JPEG": saved(picture(), "JPEG"),
        "progressive JPEG": saved(picture(), "JPEG", progressive=True),
        "WebP": saved(picture(), "WEBP"),
        "lossless WebP": saved(picture(), "WEBP", lossless=True),
        "GIF": saved(picture(), "GIF"),
        "BMP": saved(picture(), "BMP"),
        "grey": saved(picture(mode="L")),
        "black and white": saved(picture(mode="1")),
        "palette": saved(palette),
        "palette with transparency": saved(palette, transparency=0),
        "CMYK": saved(picture(mode="CMYK"), "JPEG"),
        "grey JPEG": saved(picture(mode="L"), "JPEG"),
        "alpha": saved(clear),
        "grey with alpha": saved(picture(mode="LA")),
        "WebP with alpha": saved(clear, "WEBP"),
        "16 bits": saved(grey_16),
        "16 bits with transparency": saved(grey_16, transparency=0x8080),
        "animated GIF": animated("GIF"),
        "animated PNG": animated("PNG"),
        "animated WebP": animated("WEBP"),
        "one pixel": png(size=(1, 1)),
        "a line": png(size=(200, 1)),
        **{f"turned {orientation}": rotated(orientation) for orientation in range(2, 9)},
        "damaged EXIF": saved(picture(), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff"),
        "bytes after the end": text + b"more" * 100,
    }


@cache
def broken_images() -> dict[str, tuple[bytes, str]]:
    """Files that are refused, with a part of the reason."""
    jpeg = saved(picture((200, 200)), "JPEG")
    usual = png(size=(200, 200))
    gif = saved(picture((200, 200)), "GIF")
    webp = saved(picture((200, 200)), "WEBP")
    bmp = saved(picture((200, 200)), "BMP")
    wrong_sum = bytearray(usual)
    wrong_sum[usual.index(b"IDAT") + 8] ^= 0xFF
    palette = saved(picture(mode="P"))
    idat = palette[palette.index(b"IDAT") - 4 : palette.index(b"IDAT") + 4]
    formats = "not a PNG, JPEG, WebP, GIF or BMP image"
    return {
        "empty": (b"", "is empty"),
        "text": (b"this is a text, and no image", formats),
        "zeros": (b"\0" * 1000, formats),
        "PDF": (b"%PDF-1.7\n" + b"x" * 1000, formats),
        "SVG": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', formats),
        "HTML": (b"<!doctype html><title>Not found</title>", formats),
        "TIFF": (saved(picture(), "TIFF"), formats),
        "ICO": (saved(picture(), "ICO"), formats),
        "PPM": (saved(picture(), "PPM"), formats),
        "EPS": (saved(picture(), "EPS"), formats),
        "PNG signature": (usual[:8], "image"),
        "PNG header": (usual[:33], formats),
        "truncated PNG": (usual[: len(usual) // 2], "damaged"),
        "PNG with a wrong checksum": (bytes(wrong_sum), "damaged"),
        "PNG without pixels": (claimed(32, 32), "damaged"),
        "truncated JPEG": (jpeg[: len(jpeg) // 2], "damaged"),
        "JPEG header": (jpeg[:20], "image"),
        "truncated GIF": (gif[: len(gif) // 2], "damaged"),
        "truncated WebP": (webp[: len(webp) // 2], "image"),
        "truncated BMP": (bmp[: len(bmp) // 2], "damaged"),
        "wide bomb": (claimed(100_000, 100_000), "pixels"),
        "PNG bomb": (bomb(4000, 4000), "at most 1,000,000 are allowed"),
        "slightly too large": (png(size=(1001, 1000)), "1,001 × 1,000 pixels"),
        "thin": (png(size=(401, 2)), "one side must be at most"),
        "tall": (png(size=(1, 300)), "one side must be at most"),
        "no width": (claimed(0, 10), "image"),
        "endless scans": (scans(200), "progressive scans"),
        "negative size": (
            bmp[:18] + struct.pack("<ii", -200, 200) + bmp[26:],
            "image",
        ),
        "BMP that claims to be huge": (
            bmp[:18] + struct.pack("<ii", 2**30, 2**30) + bmp[26:],
            "pixels",
        ),
        "half of a header": (usual[:20], "image"),
        # Pillow decodes it, but cannot convert it
        "more transparent colors than there are": (
            palette.replace(idat, chunk(b"tRNS", bytes(300)) + idat, 1),
            "damaged",
        ),
    }
