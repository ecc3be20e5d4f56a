from __future__ import annotations

import pytest

from holdfast.worker.engine.load import vocabulary_size
from tests.fakes.tiny_models import VOCAB_SIZE, kept_tiny


@pytest.mark.parametrize("name", ["llama", "llama4_text", "mamba", "qwen3_5"])
def test_the_vocabulary_size_is_the_width_of_the_logits(name: str) -> None:
    assert vocabulary_size(kept_tiny(name), {}) == VOCAB_SIZE
    assert vocabulary_size(kept_tiny(name), {"vocab_size": 5}) == VOCAB_SIZE
