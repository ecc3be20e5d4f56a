"""Workers that die at random instants, by all kinds of signals: each answer equals that of an
undisturbed run.
"""

from __future__ import annotations

import os

import pytest

from tools.chaos import KINDS, run_chaos

KILLS = int(os.environ.get("KILLS", "12"))


@pytest.mark.slow
@pytest.mark.timeout(180 + KILLS * 40)
@pytest.mark.parametrize(
    ("model", "streams"),
    [
        ("bundled", "plain"),
        ("bundled", "kinds"),
        ("qwen3_next", "plain"),
        ("lfm2", "plain"),
        ("gemma3_text", "plain"),
    ],
    ids=["full attention", "of every kind", "linear attention", "convolutions", "windows"],
)
def test_deaths_at_random_instants_change_no_answer(model: str, streams: str) -> None:
    kinds = [KINDS[index % len(KINDS)] for index in range(KILLS)]
    assert run_chaos(model=model, streams=streams, kinds=kinds, seed=KILLS)
