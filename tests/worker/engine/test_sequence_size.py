"""The costs computed from config.json alone equal those that the engine measures."""

from __future__ import annotations

import pytest

from holdfast.errors import ModelLoadError
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.sequence_size import sequence_size_of
from tests.fakes.architectures import probed
from tests.fakes.tiny_configs import TINY, VOCAB_SIZE


@pytest.mark.parametrize("name", ["qwen3_moe", "gemma3_text", "qwen3_next"])
def test_bytes_equal_those_the_engine_measures(name: str) -> None:
    told = sequence_size_of(TINY[name])
    measured = Engine(probed(name), vocab_size=VOCAB_SIZE).measure_costs()
    assert (told.bytes_per_token, told.is_on_cpu) == (measured.bytes_per_token, True)
    assert told.fixed_bytes == measured.fixed_bytes


def test_an_unknown_model_is_reported() -> None:
    with pytest.raises(
        ModelLoadError, match=r"takes ended with code 1: ValueError: Model type kelp not supported"
    ):
        sequence_size_of({"model_type": "kelp"})
