"""A test of `bench restore` with a real server and a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast_bench.report import markdown
from holdfast_bench.restore import restore_results
from tests.fakes.tiny_models import TINY, write_tiny


@pytest.mark.slow
async def test_restoring_is_compared_with_its_minimum(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "model", "llama")
    config = TINY["llama"]
    said: list[str] = []
    results = await restore_results(
        str(model),
        contexts=(300,),
        rounds=2,
        threads=1,
        request_seconds=240,
        command="test",
        say=said.append,
    )
    (case,) = results.cases
    server, least = case.contenders
    assert [len(each.pooled("first_token_seconds")) for each in (server, least)] == [2, 2]
    assert min(server.pooled("first_token_seconds") + least.pooled("first_token_seconds")) > 0
    assert len(server.pooled("first_token_seconds @ cold")) == 1
    heads = config["num_key_value_heads"] * (config["hidden_size"] // config["num_attention_heads"])
    assert least.pooled("kv_bytes") == [299 * 2 * 4 * config["num_hidden_layers"] * heads] * 2
    assert "holdfast / least" in markdown(results)
    assert len(said) == 1
