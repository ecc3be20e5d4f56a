"""The tiny models with their probed layout, once per test session, and their groups."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest

from holdfast.worker.engine.layouts import Runner
from holdfast.worker.engine.probe import choose_layout
from tests.fakes.tiny_models import TINY, VOCAB_SIZE, kept_tiny

# its cache objects have a custom class without a snapshot form
KEEPABLE = sorted(set(TINY) - {"deepseek_v41"})
# Each kind of layer state, alone and mixed: full attention, latent attention, sliding windows with
# and without sinks, chunked attention, recurrent states of every family, and both in one layer.
FAST = {
    "llama", "qwen3_moe", "deepseek_v3", "gemma3_text", "gpt_oss", "llama4",
    "qwen3_next", "lfm2", "mamba", "mamba2", "rwkv7", "falcon_h1",
}  # fmt: skip
RESUMES_ANYWHERE = ["llama", "qwen3_moe", "deepseek_v3", "gemma2"]


def each_of(names: Iterable[str]) -> list[Any]:
    """Parameters of a test: `make test` runs those of FAST, `make slow` the others."""
    return [
        pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in sorted(names)
    ]


@cache
def probed(name: str) -> Runner:
    """The tiny model `name` in its layout. For tests that only read the model."""
    return choose_layout(kept_tiny(name), vocab_size=VOCAB_SIZE)
