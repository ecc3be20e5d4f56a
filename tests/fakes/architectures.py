"""The tiny models with the layout that the probe has chosen for each, once per test session; and
groups of them.
"""

from __future__ import annotations

from functools import cache

from holdfast.worker.engine.layouts import Runner
from holdfast.worker.engine.probe import choose_layout
from tests.fakes.tiny_models import TINY, VOCAB_SIZE, kept_tiny

# the solo layout has mlx-lm's own cache objects, which have no snapshot form
KEEPABLE = sorted(set(TINY) - {"mamba", "llama4"})
RESUMES_ANYWHERE = ["llama", "qwen3_moe", "deepseek_v3", "gemma2"]


@cache
def probed(name: str) -> Runner:
    """The tiny model `name` in its layout. For tests that only read the model."""
    return choose_layout(kept_tiny(name), vocab_size=VOCAB_SIZE)
