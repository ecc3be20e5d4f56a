"""Tiny random models with vision of real mlx-vlm families, written as folders that mlx-vlm loads:
weights, configuration, processor, tokenizer and the chat template of the family.
"""

from __future__ import annotations

import copy
import json
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_vlm import utils

from tests.fakes import vision_templates as templates
from tests.fakes.tiny_configs import CONTEXT_TOKENS, WINDOW
from tests.fakes.tiny_models import well_scaled, write_tokenizer

VOCAB_SIZE = 288  # all bytes, and 32 special and merged tokens
# Newlines next to an image merge with those of the text, as in the real tokenizers.
_MERGES = [("Ċ", "Ċ"), ("ĊĊ", "Ċ"), ("e", "r"), ("t", "h"), ("Ġ", "th")]
_MODULES = ["text", "vision", "perceiver", "projector", "audio"]

# Random values would be too small compared to image features, and attend to everything equally.
_LARGER = {"q_proj": 2.0, "k_proj": 2.0, "q_norm": 3.0}

_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": CONTEXT_TOKENS,
    "rope_theta": 10000.0,
    "num_hidden_layers": 3,
    "tie_word_embeddings": False,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "patch_size": 4,
    "image_size": 32,
}
_QWEN_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "in_chans": 3,
}
_QWEN_IMAGES: dict[str, Any] = {
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": 8 * 8,
    "max_pixels": 64 * 64,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_QWEN: dict[str, Any] = {
    "special_tokens": "<|im_end|> <|im_start|> <|endoftext|> "
    "<|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>",
    "token_ids": {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
        "vision_token_id": "<|vision_pad|>",
    },
    "images": _QWEN_IMAGES,
    "tokenizer": {"pad_token": "<|endoftext|>"},
}
_CLIP_IMAGES: dict[str, Any] = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 32},
    "crop_size": {"height": 32, "width": 32},
}


@dataclass(frozen=True, kw_only=True)
class VisionFamily:
    """The properties of a family of vision models.

    config: config.json without token ids.
    special_tokens: separated by spaces; the first one ends answers.
    token_ids: fields of config.json and the special tokens whose ids they contain.
    images: preprocessor_config.json.
    processor: processor_config.json.
    tokenizer: further settings of tokenizer_config.json.
    words: how much larger word embeddings are than usual random values.
    """

    config: dict[str, Any]
    special_tokens: str
    token_ids: dict[str, str]
    template: str
    images: dict[str, Any]
    processor: dict[str, Any] = field(default_factory=dict)
    tokenizer: dict[str, Any] = field(default_factory=dict)
    words: float = 3.0

    def token_id(self, token: str) -> int:
        """The id of a special token."""
        return 256 + len(_MERGES) + self.special_tokens.split().index(token)


def _gemma4(**text: Any) -> VisionFamily:
    """With inputs per layer, shared keys and windows; `text`: further settings of its text_config."""
    return VisionFamily(
        config={
            "model_type": "gemma4",
            "hidden_size": 64,
            "vocab_size": VOCAB_SIZE,
            "text_config": {
                **_TEXT,
                "model_type": "gemma4_text",
                "num_hidden_layers": 6,
                "num_key_value_heads": 1,
                "global_head_dim": 32,
                "num_kv_shared_layers": 2,
                "hidden_size_per_layer_input": 16,
                "vocab_size_per_layer_input": VOCAB_SIZE,
                "sliding_window": WINDOW,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
                "tie_word_embeddings": True,
                **text,
            },
            "vision_config": {
                **_VISION,
                "model_type": "gemma4_vision",
                "num_key_value_heads": 2,
                "head_dim": 16,
                "global_head_dim": 16,
                "default_output_length": 16,
                "position_embedding_size": 64,
                "pooling_kernel_size": 2,
            },
            "vision_soft_tokens_per_image": 16,
            "audio_config": None,
        },
        special_tokens="<turn|> <|turn> <bos> <eos> <pad> <|image> <image|> <|image|> "
        "<|audio> <audio|> <|audio|> <|video|>",
        token_ids={
            "image_token_id": "<|image|>",
            "boi_token_id": "<|image>",
            "eoi_token_id": "<image|>",
            "audio_token_id": "<|audio|>",
            "boa_token_id": "<|audio>",
            "eoa_token_id": "<audio|>",
            "video_token_id": "<|video|>",
            "pad_token_id": "<pad>",
        },
        template=templates.GEMMA4,
        images={},
        processor={
            "processor_class": "Gemma4Processor",
            "image_processor": {
                "image_processor_type": "Gemma4ImageProcessor",
                "patch_size": 4,
                "max_soft_tokens": 16,
                "pooling_kernel_size": 2,
            },
        },
        tokenizer={
            "bos_token": "<bos>",
            "pad_token": "<pad>",
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
            "video_token": "<|video|>",
        },
        words=0.5,
    )


FAMILIES: dict[str, VisionFamily] = {
    "qwen2_5_vl": VisionFamily(
        config={
            **_TEXT,
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
            "vision_config": {
                **_QWEN_VISION,
                "model_type": "qwen2_5_vl",
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
        },
        template=templates.QWEN2_VL,
        **_QWEN,
    ),
    "qwen3_vl": VisionFamily(
        config={
            "text_config": {
                **_TEXT,
                "model_type": "qwen3_vl_text",
                "num_hidden_layers": 4,
                "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2]},
            },
            "vision_config": {
                **_QWEN_VISION,
                "model_type": "qwen3_vl",
                "depth": 3,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0, 1],
            },
        },
        template=templates.QWEN3_VL,
        **{**_QWEN, "images": {**_QWEN_IMAGES, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}},
    ),
    "gemma3": VisionFamily(
        config={
            "hidden_size": 64,
            "vocab_size": VOCAB_SIZE,
            "text_config": {
                **_TEXT,
                "model_type": "gemma3_text",
                "num_key_value_heads": 1,
                "query_pre_attn_scalar": 16,
                "sliding_window": WINDOW,
                "sliding_window_pattern": 2,
                "num_hidden_layers": 2,
                "mm_tokens_per_image": 16,
            },
            "vision_config": {**_VISION, "model_type": "siglip_vision_model"},
        },
        special_tokens="<end_of_turn> <start_of_turn> <bos> <eos> <pad> "
        "<start_of_image> <end_of_image> <image_soft_token>",
        token_ids={
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
            "pad_token_id": "<pad>",
        },
        template=templates.GEMMA3,
        images={
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 32, "width": 32},
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "do_pan_and_scan": None,
        },
        processor={"image_seq_length": 16, "processor_class": "Gemma3Processor"},
        tokenizer={
            "bos_token": "<bos>",
            "pad_token": "<pad>",
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
        words=1.0,  # tied to the head, and multiplied by 8
    ),
    "pixtral": VisionFamily(
        config={
            "text_config": {**_TEXT, "model_type": "mistral"},
            "vision_config": {**_VISION, "model_type": "pixtral", "head_dim": 16},
        },
        special_tokens="</s> <s> <pad> [INST] [/INST] [IMG] [IMG_BREAK] [IMG_END]",
        token_ids={"image_token_index": "[IMG]"},
        template=templates.PIXTRAL,
        images={
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 32},
            "patch_size": {"height": 4, "width": 4},
        },
        processor={"patch_size": 4, "processor_class": "PixtralProcessor"},
        tokenizer={"bos_token": "<s>", "pad_token": "<pad>"},
    ),
    "llava": VisionFamily(
        config={
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
            "text_config": {**_TEXT, "model_type": "llama"},
            "vision_config": {**_VISION, "model_type": "clip_vision_model"},
        },
        special_tokens="</s> <s> <pad> <image>",
        token_ids={"image_token_index": "<image>"},
        template=templates.LLAVA,
        images=_CLIP_IMAGES,
        processor={
            "patch_size": 4,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
            "processor_class": "LlavaProcessor",
        },
        tokenizer={"bos_token": "<s>", "pad_token": "<pad>"},
    ),
    "qwen2_vl": VisionFamily(
        config={
            **_TEXT,
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
            "vision_config": {
                **_QWEN_VISION,
                "model_type": "qwen2_vl",
                "embed_dim": 32,
                "hidden_size": 64,
                "mlp_ratio": 2,
            },
        },
        template=templates.QWEN2_VL,
        **_QWEN,
    ),
    "qwen3_vl_moe": VisionFamily(
        config={
            "text_config": {
                **_TEXT,
                "model_type": "qwen3_vl_moe_text",
                "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2]},
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
                "moe_intermediate_size": 64,
            },
            "vision_config": {
                **_QWEN_VISION,
                "model_type": "qwen3_vl_moe",
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
        },
        template=templates.QWEN3_VL,
        **_QWEN,
    ),
    "qwen3_5": VisionFamily(
        config={
            "text_config": {
                **_TEXT,
                "model_type": "qwen3_5_text",
                "num_hidden_layers": 2,
                "linear_num_value_heads": 4,
                "linear_num_key_heads": 2,
                "linear_key_head_dim": 16,
                "linear_value_head_dim": 16,
                "linear_conv_kernel_dim": 4,
                "full_attention_interval": 2,
                "rope_parameters": {
                    "type": "default",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 0.5,
                    "mrope_section": [2, 1, 1],
                },
            },
            "vision_config": {
                **_QWEN_VISION,
                "model_type": "qwen3_5",
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [],
            },
        },
        template=templates.QWEN3_VL,
        **_QWEN,
    ),
    "mistral3": VisionFamily(
        config={
            "spatial_merge_size": 2,
            "text_config": {**_TEXT, "model_type": "mistral"},
            "vision_config": {**_VISION, "model_type": "pixtral", "head_dim": 16},
        },
        special_tokens="</s> <s> <pad> [INST] [/INST] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] "
        "[IMG] [IMG_BREAK] [IMG_END]",
        token_ids={"image_token_index": "[IMG]"},
        template=templates.MISTRAL3,
        images={
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 32},
            "patch_size": {"height": 4, "width": 4},
        },
        processor={"patch_size": 4, "spatial_merge_size": 2, "processor_class": "PixtralProcessor"},
        tokenizer={"bos_token": "<s>", "pad_token": "<pad>"},
    ),
    "smolvlm": VisionFamily(
        config={
            "scale_factor": 2,
            "text_config": {**_TEXT, "model_type": "llama"},
            "vision_config": {**_VISION, "model_type": "smolvlm_vision"},
        },
        special_tokens="<end_of_utterance> <|im_start|> <|im_end|> <image> <global-img> "
        "<fake_token_around_image> <row_1_col_1> <row_1_col_2> <row_2_col_1> <row_2_col_2>",
        token_ids={"image_token_id": "<image>"},
        template=templates.SMOLVLM,
        images={
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 64},
            "max_image_size": {"longest_edge": 32},
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "do_image_splitting": True,
        },
        processor={"image_seq_len": 16, "processor_class": "SmolVLMProcessor"},
        tokenizer={"pad_token": "<|im_end|>"},
    ),
    "internvl_chat": VisionFamily(
        config={
            "downsample_ratio": 0.5,
            "force_image_size": 16,
            "max_dynamic_patch": 4,
            "use_thumbnail": True,
            "llm_config": {**_TEXT, "model_type": "qwen2"},
            "vision_config": {**_VISION, "model_type": "intern_vit_6b", "image_size": 16},
        },
        special_tokens="<|im_end|> <|im_start|> <|endoftext|> <img> </img> <IMG_CONTEXT>",
        token_ids={"image_token_index": "<IMG_CONTEXT>"},
        template=templates.INTERNVL_CHAT,
        images={"image_processor_type": "CLIPFeatureExtractor", "size": 16},
        tokenizer={"pad_token": "<|endoftext|>"},
    ),
    "glm4v": VisionFamily(
        config={
            "text_config": {
                **_TEXT,
                "model_type": "glm4v_text",
                "partial_rotary_factor": 0.5,
                "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]},
            },
            "vision_config": {
                **_QWEN_VISION,
                "model_type": "glm4v",
                "image_size": 32,
                "rms_norm_eps": 1e-5,
            },
        },
        special_tokens="<|user|> <|endoftext|> <|assistant|> <|system|> [gMASK] <sop> "
        "<|begin_of_image|> <|end_of_image|> <|image|> <|begin_of_video|> <|end_of_video|> "
        "<|video|> <|begin_of_box|> <|end_of_box|>",
        token_ids={
            "image_token_id": "<|image|>",
            "video_token_id": "<|video|>",
            "image_start_token_id": "<|begin_of_image|>",
            "image_end_token_id": "<|end_of_image|>",
            "vision_start_token_id": "<|begin_of_image|>",
            "vision_end_token_id": "<|end_of_image|>",
        },
        template=templates.GLM4V,
        images={
            "image_processor_type": "Glm4vImageProcessor",
            "patch_size": 4,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "size": {"shortest_edge": 128, "longest_edge": 8192},
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
        },
        tokenizer={"pad_token": "<|endoftext|>"},
    ),
    "gemma4": _gemma4(),
    "gemma4 with bidirectional images": _gemma4(use_bidirectional_attention="vision"),
    "llava_next": VisionFamily(
        config={
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
            "text_config": {**_TEXT, "model_type": "mistral"},
            "vision_config": {**_VISION, "model_type": "clip_vision_model"},
        },
        special_tokens="</s> <s> <pad> <image>",
        token_ids={"image_token_index": "<image>"},
        template=templates.LLAVA_NEXT,
        images={
            **_CLIP_IMAGES,
            "image_processor_type": "LlavaNextImageProcessor",
            "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]],
        },
        processor={
            "patch_size": 4,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
            "processor_class": "LlavaNextProcessor",
        },
        tokenizer={"bos_token": "<s>", "pad_token": "<pad>"},
    ),
}


def write_vision_model(
    folder: Path, name: str, *, seed: int = 0, dtype: mx.Dtype = mx.float32
) -> Path:
    """Write a random model of the family `name` (a key of FAMILIES), and return the folder.

    The same name and seed give the same weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in _files_of_model(name, seed, dtype).items():
        (folder / file).write_bytes(content)
    return folder


@cache
def _files_of_model(name: str, seed: int, dtype: mx.Dtype) -> dict[str, bytes]:
    family = FAMILIES[name]
    ids = {key: family.token_id(token) for key, token in family.token_ids.items()}
    special_tokens = family.special_tokens.split()
    unused = VOCAB_SIZE - 256 - len(_MERGES) - len(special_tokens)
    special_tokens += [f"<unused{number}>" for number in range(unused)]
    eos = family.token_id(special_tokens[0])
    config = {"model_type": name, **family.config, **ids, "eos_token_id": eos}
    model = _random_model(config, seed, family.words)
    model.set_dtype(dtype)
    parameters = dict(tree_flatten(model.parameters()))
    # mlx-vlm ties a gemma3's head to its embeddings, ignoring the file
    if name == "gemma3":
        del parameters["language_model.lm_head.weight"]
    with tempfile.TemporaryDirectory() as written:
        folder = Path(written)
        mx.save_safetensors(
            str(folder / "model.safetensors"), parameters, metadata={"format": "mlx"}
        )
        write_tokenizer(
            folder, special_tokens, merges=_MERGES, template=family.template, **family.tokenizer
        )
        for file, content in (
            ("config.json", config),
            ("preprocessor_config.json", family.images),
            ("processor_config.json", family.processor),
        ):
            if content:
                (folder / file).write_text(json.dumps(content, indent=2))
        return {file.name: file.read_bytes() for file in folder.iterdir()}


def _random_model(config: dict[str, Any], seed: int, words: float) -> nn.Module:
    """As in `mlx_vlm.utils.load_model`, with random weights."""
    config = copy.deepcopy(config)  # some families change it
    config.setdefault("text_config", config.pop("llm_config", {}))
    package, _ = utils.get_model_and_args(config)
    arguments = package.ModelConfig.from_dict(config)
    arguments = utils.update_module_configs(arguments, package, config, _MODULES)
    mx.random.seed(seed)
    model: nn.Module = package.Model(arguments)
    random_values = [
        (path, _scaled(path, value, words)) for path, value in tree_flatten(model.parameters())
    ]
    model.update(tree_unflatten(random_values))
    mx.eval(model.parameters())
    return model


def _scaled(path: str, parameter: mx.array, words: float) -> mx.array:
    """Random values with which the images and the last words of a prompt both affect the logits:
    selective attention, and words as large as image features.
    """
    values = well_scaled(path, parameter)
    if not path.startswith("language_model."):
        return values
    part = path.split(".")[-2]
    return values * (words if part == "embed_tokens" else _LARGER.get(part, 1.0))
