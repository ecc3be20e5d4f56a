from __future__ import annotations

from typing import Any

import pytest

from holdfast.errors import ModelLoadError
from holdfast.models.model_folder import UNKNOWN_CONTEXT_TOKENS, context_tokens


def scaled(window: int, kind: str, factor: float, original: int | None = None) -> dict[str, Any]:
    scaling = {"type": kind, "factor": factor, "original_max_position_embeddings": original}
    return {"max_position_embeddings": window, "rope_scaling": scaling}


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 8192}, 8192),
        ({"text_config": {"max_position_embeddings": 4096}}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"model_max_length": 1048576}, 1048576),
        # Qwen2.5: the window before stretching is named; Llama 3.1 and DeepSeek: the one after it.
        (scaled(32768, "yarn", 4.0, 32768), 131072),
        (scaled(131072, "llama3", 8.0, 8192), 131072),
        (scaled(163840, "yarn", 40, 4096), 163840),
        (scaled(131072, "linear", 8.0), 131072),
        ({"max_position_embeddings": 2048, "rope_scaling": None}, 2048),
        ({}, UNKNOWN_CONTEXT_TOKENS),
        ({"max_position_embeddings": None, "n_ctx": True}, UNKNOWN_CONTEXT_TOKENS),
    ],
)
def test_the_context_window_is_read_from_the_configuration(
    config: dict[str, Any], tokens: int
) -> None:
    assert context_tokens(config) == tokens


def test_the_tokenizers_limit_is_only_a_fallback() -> None:
    assert context_tokens({"max_position_embeddings": 8192}, tokenizer_limit=2048) == 8192
    assert context_tokens({}, tokenizer_limit=2048) == 2048
    for absurd in (1e30, -1, 0, None, "long", True, float("nan"), float("inf")):
        assert context_tokens({}, tokenizer_limit=absurd) == UNKNOWN_CONTEXT_TOKENS


def test_a_smaller_window_can_be_requested_but_not_a_larger() -> None:
    assert context_tokens({"max_position_embeddings": 8192}, requested=1000) == 1000
    with pytest.raises(ModelLoadError, match="more than the model's own 8,192"):
        context_tokens({"max_position_embeddings": 8192}, requested=9000)
    assert context_tokens({}, requested=1 << 20) == 1 << 20
