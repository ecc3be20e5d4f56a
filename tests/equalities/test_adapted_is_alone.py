"""The equalities hold for LoRA adapters: in a batch with other adapters and the model itself, a
sequence generates the same as mlx-lm alone with its adapter.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from holdfast.worker.engine.engine import Engine
from tests.fakes.adapters import adapted_by_mlx_lm, adapted_runner, write_tiny_adapter
from tests.fakes.caching_worker import open_sequences
from tests.fakes.interleaving import Played, assert_as_alone, play, random_sequences
from tests.fakes.tiny_models import VOCAB_SIZE, kept_tiny, make_tiny

TOLERANCE = 2e-3
SLOW = pytest.mark.slow
# the model's name, how its adapters are created, and whether they share forward passes
KINDS = [
    pytest.param("llama", {}, True, id="llama"),
    pytest.param("llama", {"kind": "dora", "keys": ["self_attn.q_proj", "mlp.down_proj"]}, True, id="llama, DoRA"),
    pytest.param("qwen2", {"kind": "dora"}, True, id="qwen2, DoRA with biases", marks=SLOW),
    pytest.param("stablelm", {"keys": ["self_attn.v_proj", "lm_head"]}, False, id="stablelm, output head"),
    pytest.param("gemma3_text", {"keys": ["self_attn.o_proj", "model.embed_tokens"]}, False, id="gemma3, embedding", marks=SLOW),
    pytest.param("qwen3_moe", {}, False, id="qwen3_moe"),
    pytest.param("qwen3_next", {"keys": ["self_attn.q_proj", "linear_attn.out_proj"]}, True, id="qwen3_next", marks=SLOW),
    pytest.param("mamba2", {}, True, id="mamba2"),
    pytest.param("deepseek_v2", {"keys": ["self_attn.kv_b_proj", "self_attn.o_proj"]}, True, id="deepseek_v2", marks=SLOW),
    pytest.param("gpt_oss", {"keys": ["self_attn.q_proj"]}, True, id="gpt_oss", marks=SLOW),
    pytest.param("llama4", {"keys": ["self_attn.q_proj"]}, True, id="llama4, solo", marks=SLOW),
]  # fmt: skip


@pytest.mark.parametrize(("name", "how", "mixes"), KINDS)
def test_concurrent_adapters_draw_the_same_as_mlx_lm(
    name: str, how: dict[str, Any], mixes: bool, tmp_path: Path
) -> None:
    folders = {
        adapter: write_tiny_adapter(tmp_path / adapter, name, seed=seed, **how)
        for seed, adapter in enumerate(("sql", "tone"))
    }
    runner = adapted_runner(name, folders)
    assert runner.mixes_adapters == mixes, runner.reason
    rng = random.Random(f"{name} {how}")
    engine = Engine(runner, vocab_size=VOCAB_SIZE)
    sequences = random_sequences(rng, vocab_size=VOCAB_SIZE, count=9, longest_prompt=30)
    for index, each in enumerate(sequences):
        each.constraints = {"adapter": ("", *folders)[index % 3]}
    play(engine, sequences, rng, depth=1)
    assert open_sequences(engine) == 0
    references = {"": kept_tiny(name)} | {
        adapter: adapted_by_mlx_lm(make_tiny(name), folder) for adapter, folder in folders.items()
    }
    for each in sequences:
        assert_as_alone(references[adapter_of(each)], each, tolerance=TOLERANCE)
    assert_adapters_matter(references, sequences)


def adapter_of(each: Played) -> str:
    return str(each.constraints["adapter"])


def assert_adapters_matter(references: dict[str, Any], sequences: list[Played]) -> None:
    """The adapters change the logits by far more than the tolerance: otherwise this test could not
    fail.
    """
    prompt = mx.array([sequences[0].prompt])
    logits = [model(prompt)[0, -1] for model in references.values()]
    for one in range(len(logits)):
        for other in range(one):
            assert float(mx.abs(logits[one] - logits[other]).max()) > 50 * TOLERANCE
