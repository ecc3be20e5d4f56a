"""Loads a model with vision through mlx-vlm (the extra `vision`), without its vision if that is not
installed. Imports mlx-vlm only for such models: it takes a second and 200 MB.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx

from holdfast.errors import ModelLoadError
from holdfast.wire.images import VisionInfo
from holdfast.worker.vision.model import VisionModel
from holdfast.worker.vision.processor import Processor

_PACKAGE = "mlx_vlm"
# the packages whose code decides what a model sees of an image
_PACKAGES = ("mlx-vlm", "transformers", "pillow")


def is_installed() -> bool:
    """Whether mlx-vlm is installed."""
    return importlib.util.find_spec(_PACKAGE) is not None


def versions() -> tuple[str, ...]:
    """The versions of the packages that compute features, for the fingerprint of a model."""
    return tuple(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)


def build(folder: Path) -> VisionModel:
    """Build a model with vision; its weights are mapped into memory, but not read yet.

    Requires `mlx_lm_hooks.prepare_vision`. Raises what mlx-vlm raises if it cannot.
    """
    utils = _utils()
    full_model = utils.load_model(folder, lazy=True, strict=True)
    if not hasattr(full_model, "language_model") or not hasattr(full_model, "get_input_embeddings"):
        raise ValueError("mlx-vlm's class for this model has no separate language model")
    model = VisionModel(full_model)
    if model.attends_both_ways:
        _let_chunks_attend_both_ways(full_model.language_model.model)
    return model


def load_processor(folder: Path, model: VisionModel) -> Processor:
    """Load the processor of a model's images, and find out how its prompts are written.

    Raises ModelLoadError with a reason if the model cannot be given images.
    """
    try:
        processor = own_processor(folder)
        return Processor(processor, _vision_info(processor, model))
    except ModelLoadError:
        raise
    except Exception as error:  # foreign code; the model still reads text
        reason = " ".join(str(error).split())[:200]
        raise ModelLoadError(f"its image processor cannot be loaded: {reason}") from error


def own_processor(folder: Path) -> Any:
    """mlx-vlm's processor of a model's prompts with images. Raises what mlx-vlm raises."""
    utils = _utils()
    with _offline():
        # importing the model's code registers its processor with transformers
        utils.get_model_and_args(utils.load_config(folder))
        processor = utils.load_processor(folder, add_detokenizer=False, trust_remote_code=False)
        image_processor = utils.load_image_processor(folder)
    if image_processor is not None:
        processor.image_processor = image_processor
    return processor


def _vision_info(processor: Any, model: VisionModel) -> VisionInfo:
    """How prompts with images are written for this model and processor."""
    tokenizer = processor.tokenizer
    text_message, image_message = _rendered_messages(processor)
    candidates = [
        getattr(processor, "boi_token", None),
        getattr(processor, "image_token", None),
        *(_token_of(tokenizer, each) for each in sorted(model.image_token_ids)),
        "<image>",
    ]
    # the template's placeholder is the candidate that a message has once more with an image
    names = [name for name in candidates if isinstance(name, str) and name]
    placeholders = [
        name for name in names if image_message.count(name) == text_message.count(name) + 1
    ]
    if not placeholders:
        raise ModelLoadError("its chat template has no image placeholder")
    template_placeholder = placeholders[0]
    single_tokens = [name for name in (template_placeholder, *names) if _is_token(tokenizer, name)]
    if not single_tokens:
        raise ModelLoadError("its tokenizer has no token for an image")
    text_before, text_after = _text_around(processor)
    return VisionInfo(
        template_placeholder=template_placeholder,
        written=f"{text_before}{single_tokens[0]}{text_after}",
        placeholder=single_tokens[0],
    )


def _token_of(tokenizer: Any, token_id: int) -> str | None:
    """The text of a token; None if the tokenizer does not have it."""
    name = tokenizer.convert_ids_to_tokens(token_id)
    return name if isinstance(name, str) else None


def _is_token(tokenizer: Any, name: str) -> bool:
    """Whether a text is one added token of the tokenizer, as the placeholder of an image must be."""
    ids = tokenizer.encode(name, add_special_tokens=False)
    return len(ids) == 1 and ids[0] in tokenizer.added_tokens_decoder


def _text_around(processor: Any) -> tuple[str, str]:
    """The text that the processor writes before and after the tokens of an image (gemma3)."""
    sequence = getattr(processor, "full_image_sequence", None)
    if not isinstance(sequence, str):
        return "", ""
    stripped = sequence.strip()
    start = sequence.index(stripped)
    return sequence[:start], sequence[start + len(stripped) :]


def _rendered_messages(processor: Any) -> tuple[str, str]:
    """A message as the chat template writes it, without an image and with one."""
    tokenizer = processor.tokenizer
    template = getattr(processor, "chat_template", None)
    template_argument = {} if template is None else {"chat_template": template}
    text = {"type": "text", "text": "hello"}
    text_message, image_message = (
        tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, **template_argument
        )
        for content in ([text], [{"type": "image"}, text])
    )
    return text_message, image_message


def _let_chunks_attend_both_ways(language_model: Any) -> None:
    """Make gemma4's mask right for images behind a prefix: mlx-vlm 0.7.10 applies it only to whole
    prompts, and otherwise leaves the mask causal.
    """

    def with_image_blocks(mask: mx.array, types: mx.array) -> mx.array:
        """Let the tokens of an image see each other. types: of the new tokens, text or image."""
        blocks = language_model._block_sequence_ids_for_mask(types)
        query_blocks, key_blocks = blocks[:, :, None], blocks[:, None]
        is_same_image = (query_blocks != -1) & (query_blocks == key_blocks)
        earlier_tokens = mask.shape[-1] - types.shape[1]
        return mask | mx.pad(is_same_image, [(0, 0), (0, 0), (earlier_tokens, 0)])[:, None]

    language_model._apply_blockwise_bidirectional_overlay = with_image_blocks


def _utils() -> Any:
    """`mlx_vlm.utils`, which must not change the user's files."""
    utils: Any = importlib.import_module(f"{_PACKAGE}.utils")
    # It rewrites headers of weight files if a number format is unknown to mlx.
    utils._load_safetensors = mx.load
    return utils


@contextmanager
def _offline() -> Iterator[None]:
    """Keep transformers from asking the Hub about local folders within the block."""
    original_setting = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        yield
    finally:
        if original_setting is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = original_setting
