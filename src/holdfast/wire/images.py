"""Images in prompts: what the front and a worker tell each other about them.

The front keeps the files that clients send in a folder, under names that consist of the SHA-256 of
their bytes and, for tenants, a prefix (`models.image_files.image_name`). The worker checks the file and
reads it when it needs the pixels.

In a prompt, an image takes the place of several tokens, and the prefix cache must tell images
apart. So the token ids of a prompt (`SequenceRequest.prompt_token_ids`) have *image keys* at these
positions: numbers above all token ids that depend on the image's name and on the position within
the image (`image_keys`). Everything that compares prompts then works as for text: the prefix cache,
the store, sessions, forks. Only the engine replaces the keys by the tokens of the model.
"""

from __future__ import annotations

import hashlib
import secrets
import uuid
from array import array
from typing import Final

import msgspec

from holdfast.wire.requests import TokenIds

FIRST_IMAGE_KEY: Final = 1 << 31
_FEWEST_KEYS = 5  # 155 bits: equal keys mean equal images


class ImageLayout(msgspec.Struct, frozen=True, kw_only=True):
    """How one model sees one image.

    token_ids: the tokens that replace the image's placeholder in the prompt, with their markers.
    grid: time, height and width in patches, for models whose positions depend on it; else empty.
    """

    image: str  # its name: hexadecimal digits
    token_ids: TokenIds
    grid: tuple[int, ...] = ()


class ImageSpan(msgspec.Struct, frozen=True, kw_only=True):
    """An image in a prompt, from the token position `start` on."""

    start: int
    layout: ImageLayout

    @property
    def end(self) -> int:
        """The position of the first token after the image."""
        return self.start + len(self.layout.token_ids)


class VisionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How prompts for a model with vision are written.

    template_placeholder: what the model's chat template writes for an image. Before a prompt is
        tokenized, `written` replaces it, which contains `placeholder` once.
    placeholder: a single token of the tokenizer, as text. In the tokens of the prompt, an image's
        `ImageLayout.token_ids` replace it.
    refused: why the model cannot be given images; empty if it can.
    reuse_refused: why prompts with images are not cached; empty if they are.
    """

    template_placeholder: str
    written: str
    placeholder: str
    refused: str = ""
    reuse_refused: str = ""


class ImageCommand(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask a worker how its model sees images. The worker answers with one `ImageAnswer`.

    max_pixels: larger images are refused.
    """

    images: tuple[str, ...]
    max_pixels: int | None = None
    call_id: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex)


class ImageAnswer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to an `ImageCommand`: for each image a layout, or the reason why it has none.

    failures: for images whose contents cannot be used. lost: for images that could not be processed
    at the moment; asking again may help.
    """

    call_id: str
    layouts: tuple[ImageLayout, ...] = ()
    failures: dict[str, str] = {}
    lost: dict[str, str] = {}


def image_keys(layout: ImageLayout) -> TokenIds:
    """The image keys that replace an image in the token ids of a prompt.

    If the image has so few tokens that their keys could equal those of another image, the keys are
    random: the image is never found in the prefix cache.
    """
    tokens = len(layout.token_ids)
    if tokens < _FEWEST_KEYS:
        digest = secrets.token_bytes(4 * tokens)
    else:
        digest = hashlib.shake_256(bytes.fromhex(layout.image)).digest(4 * tokens)
    return TokenIds.of(FIRST_IMAGE_KEY | number for number in array("I", digest))
