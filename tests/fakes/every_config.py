"""A configuration of a tiny model for every model type of the installed mlx-lm.

A configuration is derived from the fields of the module's `ModelArgs`: each field in SIZES gets a
small value, any other field keeps its default. Model types whose configuration does not follow from
their fields' names have a line in `CHANGES`; those in `tiny_configs.TINY` are written by hand.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import pkgutil
import sys
from types import ModuleType
from typing import Any

from holdfast.worker.engine import mlx_lm_hooks
from tests.fakes.tiny_configs import (
    CONTEXT_TOKENS,
    KIMI_LINEAR_ATTENTION,
    TINY,
    VOCAB_SIZE,
    WINDOW,
)

HIDDEN = 64
HEADS = 4
KV_HEADS = 2
LAYERS = 4
# Which of four layers attend to everything.
WINDOWS_THEN_FULL = ["sliding_attention", "full_attention"] * 2

_SIZES: list[tuple[Any, str]] = [
    # widths
    (HIDDEN, "hidden_size hidden_dim n_embd d_model model_dim"),
    (2 * HIDDEN, "intermediate_size intermediate_size_mlp n_inner ffn_hidden_size"),
    (2 * HIDDEN, "ff_intermediate_size dense_intermediate_size"),
    (HIDDEN, "moe_intermediate_size shared_intermediate_size expert_ffn_hidden_size"),
    (HIDDEN, "shared_expert_intermediate_size moe_shared_expert_intermediate_size"),
    (HIDDEN, "share_expert_dim moe_hidden_size"),
    # heads
    (HEADS, "num_attention_heads n_head n_heads num_heads swa_num_attention_heads"),
    (HEADS, "linear_num_value_heads mamba_num_heads mamba_n_heads"),
    (KV_HEADS, "num_key_value_heads num_kv_heads n_kv_heads num_attention_groups"),
    (KV_HEADS, "swa_num_key_value_heads linear_num_key_heads"),
    (16, "head_dim v_head_dim qk_nope_head_dim global_head_dim swa_head_dim"),
    (16, "swa_v_head_dim hidden_size_per_head linear_key_head_dim index_head_dim"),
    (16, "linear_value_head_dim mamba_d_head mamba_head_dim"),
    (8, "rotary_dim qk_rope_head_dim"),
    # layers and vocabulary
    (LAYERS, "num_hidden_layers num_layers n_layer n_layers num_transformer_layers"),
    (VOCAB_SIZE, "vocab_size num_vocab vocab_size_per_layer_input"),
    (CONTEXT_TOKENS, "max_position_embeddings n_positions n_ctx block_size model_max_length"),
    (WINDOW, "sliding_window sliding_window_size attention_window_size loop_window_size"),
    (2, "sliding_window_pattern"),
    # experts
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k"),
    (1, "n_shared_experts num_shared_experts num_shared_expert n_group"),
    (1, "topk_group first_k_dense_replace decoder_sparse_step moe_layer_freq"),
    (1, "num_dense_layers moe_num_shared_experts num_expert_group"),
    ([], "mlp_only_layers"),
    (1.0, "routed_scaling_factor"),
    # latents, indexes, recurrent layers
    (32, "kv_lora_rank q_lora_rank o_lora_rank"),
    (2, "index_n_heads o_groups hc_mult"),
    (WINDOW, "index_topk"),
    (16, "state_size ssm_state_size mamba_d_state"),
    (4, "conv_kernel mamba_d_conv linear_conv_kernel_dim short_conv_kernel_size"),
    (3, "conv_L_cache"),
    (1, "n_groups mamba_n_groups"),
    # numbers
    (1e-5, "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps post_norm_eps"),
    (1e-5, "layernorm_epsilon"),
    (10000.0, "rope_theta swa_rope_theta rotary_emb_base"),
    (0.5, "partial_rotary_factor rotary_pct"),
    (1.0, "logits_scaling attention_multiplier embedding_multiplier scale_emb"),
    (1.0, "residual_multiplier scale_depth"),
    (HIDDEN, "dim_model_base"),
    (None, "rope_scaling"),
    ("silu", "hidden_act"),
    ("noaux_tc", "topk_method"),
    ("sigmoid", "scoring_func"),
    (True, "norm_topk_prob use_conv_bias use_qk_norm"),
]
SIZES: dict[str, Any] = {name: value for value, names in _SIZES for name in names.split()}

_PER_KIND_ROPE = {
    kind: {"rope_type": "default", "rope_theta": theta}
    for kind, theta in (("full_attention", 10000.0), ("sliding_attention", 1000.0))
}
# Scores are scaled by the position from token 16 on.
_SCALED_BY_POSITION = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "llama_4_scaling_beta": 0.5,
    "original_max_position_embeddings": 16,
}
# Many index heads: a key's score is rarely exactly 0, so that ties do not decide the selection.
_INDEX: dict[str, Any] = {"index_n_heads": 16, "index_topk": WINDOW}

CHANGES: dict[str, dict[str, Any]] = {
    "afm7": {"num_kv_reuse_layers": 2},
    "afmoe": {"layer_types": WINDOWS_THEN_FULL},
    "baichuan_m1": {"sliding_window_layers": [0, 2], "conv_window": 2},
    "bailing_hybrid": {"layer_group_size": 2, "group_norm_size": 1},
    "bailing_moe_linear": {"layer_group_size": 2, "group_norm_size": 1},
    "bailing_moe_v3": {"layer_group_size": 2},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": HIDDEN, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": KV_HEADS, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek_v32": _INDEX,
    "exaone4": {"sliding_window_pattern": "LG"},
    "exaone_moe": {
        "layer_types": WINDOWS_THEN_FULL,
        "is_moe_layer": [False, True, True, True],
    },
    "gear": {"layer_types": ["sliding_attention", "full_attention", "conv_mixer", "conv_mixer"]},
    "gemma3n": {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "rope_local_base_freq": 1000.0,
        "final_logit_softcapping": 30.0,
        "activation_sparsity_pattern": [0.9, 0.9, 0.0, 0.0, 0.0, 0.0],
        "hidden_size_per_layer_input": 16,
        "altup_num_inputs": 3,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 8,
    },
    "gemma4_text": {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 16,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 10000.0,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 1000.0, "rope_type": "default"},
        },
    },
    "glm_moe_dsa": {**_INDEX, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 8},
    "hunyuan": {
        "use_cla": True,
        "cla_share_factor": 2,
        "use_mixed_mlp_moe": True,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 10.0},
    },
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_expand": 2,
    },
    "kimi_k3": {
        "hidden_act": "situ",
        "activation_situ_beta": 1.0,
        "activation_situ_linear_beta": 4.0,
        "attn_res_block_size": 2,
        "routed_expert_hidden_size": 32,
        "linear_attn_config": KIMI_LINEAR_ATTENTION,
    },
    "laguna": {"layer_types": WINDOWS_THEN_FULL},
    "lfm2_moe": {"full_attn_idxs": [1, 3], "conv_bias": False, "use_expert_bias": True},
    "longcat_flash": {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "longcat_flash_ngram": {
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "ngram_vocab_size_ratio": 2,
        "emb_split_num": 2,
    },
    "mellum": {"layer_types": WINDOWS_THEN_FULL, "rope_parameters": _PER_KIND_ROPE},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
    },
    "minimax_m3_vl": {
        "moe_layer_freq": [0, 1, 1, 1],
        "sparse_attention_freq": [0, 1, 1, 1],
        "index_n_heads": KV_HEADS,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "ministral3": {"layer_types": WINDOWS_THEN_FULL, "rope_parameters": _SCALED_BY_POSITION},
    "mistral4": {"rope_parameters": _SCALED_BY_POSITION},
    "muse_glimmer": {"num_hidden_layers": LAYERS},
    "muse_spark": {
        "layer_types": WINDOWS_THEN_FULL,
        "layer_rope_theta": [10000.0, 0.0] * 2,
        "rope_parameters": {"rope_theta": 10000.0},
        "final_logit_softcapping": 20.0,
        "output_multiplier": 1.0,
        "num_shared_experts": 0,
    },
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"n_heads_in_group": 1}, "ffn": {"no_op": True}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 2.0}},
        ],
    },
    "olmo": {"mlp_hidden_size": 4 * HIDDEN, "embedding_size": VOCAB_SIZE},
    "olmo3": {"layer_types": WINDOWS_THEN_FULL},
    "openelm": {
        "ffn_dim_divisor": 32,
        "num_query_heads": [4, 4, 2, 4],
        "num_kv_heads": [2, 2, 1, 2],
        "ffn_multipliers": [1.0, 2.0, 1.0, 2.0],
    },
    "phi3small": {
        "dense_attention_every_n_layers": 2,
        "gegelu_limit": 20.0,
        "vocab_size": 100_352,  # it writes to the logits of tokens up to this one
    },
    "plamo": {"n_shared_head": 2},
    "prism_hadamard_qwen35": {
        "intermediate_size": 512,
        "schema_version": 1,
        "tensor_namespace": "mlx-lm-text",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {
                "path": f"model.layers.{layer}.mlp.down_proj",
                "embedding": False,
                "dtype": "float16",
                "block": block,
            }
            for layer, block in ((0, 512), (1, 0))
        ],
    },
    "qwen": {"kv_channels": HIDDEN // HEADS},
    "qwen3_vl_moe": {"tie_word_embeddings": False},
    "spark2_5": {"rope_parameters": _PER_KIND_ROPE, "hidden_act": "gelu"},
    "step3p5": {"layer_types": WINDOWS_THEN_FULL, "moe_layers_enum": "1,2,3"},
}

# Variants of a model type that determine positions or layers differently: type and changes.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gear, soft caps": ("gear", {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0}),
    "gemma4_text, experts": (
        "gemma4_text",
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2},
    ),
    "internlm3, dynamic NTK": (
        "internlm3",
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 20},
    ),
    "llama, dynamic NTK": (
        "llama",
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 20},
    ),
    "llama, llama3 RoPE": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama, windows": ("llama", {"layer_types": WINDOWS_THEN_FULL, "sliding_window": WINDOW}),
    "llama4, scaled by position": ("llama4", {}),
    "mistral3, llama": ("mistral3", {}),
    "mistral3, mistral4": ("mistral3", {}),
    "nanbeige, two loops": ("nanbeige", {"num_loops": 2}),
    "phi3, longrope": (
        "phi3",
        {
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
            },
            "original_max_position_embeddings": 64,
        },
    ),
}

# Model types that are not run here, and the reason.
NEED_METAL = {
    "bitnet": "its linear layers are a Metal kernel of mlx-lm, so it needs Apple silicon",
    "muse_spark": "its norms and its routing are Metal kernels of mlx-lm, so it needs Apple silicon",
}
# Model types without prefix cache.
_OWN_STATE = (
    "keeps its window, compressed groups of tokens and the open group in a cache class of its own, "
    "and computes one position for all rows"
)
WITHOUT_MEMORY = dict.fromkeys(("deepseek_v41", "deepseek_v41_text"), _OWN_STATE)
# Model types that are computed one sequence at a time.
ONE_AT_A_TIME = {
    **WITHOUT_MEMORY,
    "minimax_m3_vl": (
        "always attends to the block of keys of the query itself, and takes the last block of a "
        "padded batch for it"
    ),
    "phi3small": (
        "its two kinds of attention layers share one mask, but need different numbers of "
        "dimensions for it in a batch"
    ),
}

# Wrappers of a text model: the model type of `text_config`.
TEXT_TYPES = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "kimi_k25": "deepseek_v3",
    "lfm2-vl": "lfm2",
    "mistral3": "ministral3",
    "pixtral": "llama",
    "prism_hadamard_qwen35": "qwen3_5",
    "qwen2_vl": "qwen2",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}
# Sizes of keys and values that can be quantized; those of latents differ, as in real models.
_WIDE = [
    (256, "hidden_size hidden_dim n_embd d_model model_dim block_dim"),
    (64, "head_dim v_head_dim qk_nope_head_dim global_head_dim swa_head_dim"),
    (64, "swa_v_head_dim hidden_size_per_head index_head_dim qk_rope_head_dim kv_channels"),
    (128, "kv_lora_rank"),
]
WIDE: dict[str, int] = {name: size for size, names in _WIDE for name in names.split()}
WIDE_ROPE_FACTORS = 32
_NO_VALUE = {"bool": False, "List": [], "list": [], "dict": {}, "Dict": {}, "Optional": None}


class NotGenerated(Exception):
    """No configuration is known for a model type. The message has the reason."""


def all_model_types() -> list[str]:
    """Every model type of the installed mlx-lm: its model modules, and their other names."""
    mlx_lm_hooks.prepare()
    models = importlib.import_module("mlx_lm.models")
    modules = [each.name for each in pkgutil.iter_modules(models.__path__)]
    remapped = mlx_lm_hooks.mlx_lm_utils().MODEL_REMAPPING
    return sorted({*filter(_has_model, modules), *remapped})


def _module_name(model_type: str) -> str:
    name: str = mlx_lm_hooks.mlx_lm_utils().MODEL_REMAPPING.get(model_type, model_type)
    return name


def tiny_config(model_type: str) -> dict[str, Any]:
    """The configuration of a tiny model of this type, or variant. Raises NotGenerated."""
    if model_type in VARIANTS:
        return _variant(model_type)
    module = _module_name(model_type)
    if module in TINY:
        return {**TINY[module], "model_type": model_type}
    arguments = _module(module).ModelArgs
    config = _from_fields(arguments, module)
    names = {field.name for field in dataclasses.fields(arguments)}
    if "text_config" in names:
        own = {name: value for name, value in CHANGES.get(module, {}).items() if name in names}
        config = {**own, "vocab_size": VOCAB_SIZE, "text_config": _text_config(module)}
    return {**config, "model_type": model_type}


def wide_config(model_type: str) -> dict[str, Any]:
    """As `tiny_config`, but with heads of a size that can be quantized. Raises NotGenerated."""
    wide: dict[str, Any] = _widened(tiny_config(model_type))
    return wide


def _widened(value: Any) -> Any:
    if isinstance(value, list):
        return [_widened(each) for each in value]
    if not isinstance(value, dict):
        return value
    wide = {}
    for name, each in value.items():
        if name in WIDE and isinstance(each, int):
            wide[name] = WIDE[name]
        elif name in ("short_factor", "long_factor"):
            wide[name] = (each * WIDE_ROPE_FACTORS)[:WIDE_ROPE_FACTORS]
        else:
            wide[name] = _widened(each)
    return wide


def _variant(name: str) -> dict[str, Any]:
    model_type, changes = VARIANTS[name]
    config = {**tiny_config(model_type), **changes}
    if name == "llama4, scaled by position":
        config["text_config"] = {**config["text_config"], "floor_scale": WINDOW}
    elif model_type == "mistral3":
        of_text = tiny_config(name.rsplit(" ", 1)[1])
        config["text_config"] = of_text
    return config


def _text_config(module: str) -> dict[str, Any]:
    if module in TEXT_TYPES:
        of_text = tiny_config(TEXT_TYPES[module])
        return {**of_text.get("text_config", of_text), **CHANGES.get(module, {})}
    classes = vars(_module(module))
    nested = next(
        (classes[name] for name in ("TextArgs", "TextConfig", "TextModelArgs") if name in classes),
        None,
    )
    if nested is None:
        raise NotGenerated(f"{module} has a text_config of an unknown kind")
    return {"model_type": module, **_from_fields(nested, module)}


def _from_fields(arguments: Any, module: str) -> dict[str, Any]:
    changes = CHANGES.get(module, {})
    config: dict[str, Any] = {}
    for field in dataclasses.fields(arguments):
        if field.name in changes or field.name == "text_config":
            continue
        if field.name in SIZES:
            config[field.name] = SIZES[field.name]
        elif _is_required(field) and field.name != "model_type":
            config[field.name] = _without_name(field, module)
    return config | dict(changes)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _without_name(field: dataclasses.Field[Any], module: str) -> Any:
    declared = getattr(field.type, "__name__", str(field.type))
    if declared not in _NO_VALUE:
        raise NotGenerated(f"{module} requires {field.name} ({declared})")
    return _NO_VALUE[declared]


def _has_model(module: str) -> bool:
    spec = importlib.util.find_spec(f"mlx_lm.models.{module}")
    assert spec is not None
    assert spec.origin is not None
    with open(spec.origin, encoding="utf-8") as source:
        return "class ModelArgs" in source.read()


def _module(name: str) -> Any:
    if name == "olmo":  # only asks whether the package is installed, which needs PyTorch
        sys.modules.setdefault("hf_olmo", ModuleType("hf_olmo"))
    try:
        return importlib.import_module(f"mlx_lm.models.{name}")
    except (ImportError, SystemExit) as error:
        raise NotGenerated(f"{name} cannot be imported: {error}") from error
