"""docs/reference/http-api.md agrees with what is served."""

from __future__ import annotations

import re
from pathlib import Path

from holdfast.http.application import DIALECTS
from holdfast.http.openai.chat import ChatCompletionRequest
from holdfast.http.openai.completions import CompletionRequest
from holdfast.http.server.dialect import DialectTable
from holdfast.http.server.openapi import description
from holdfast.telemetry.metrics import Metrics

TEXT = (Path(__file__).parents[3] / "docs" / "reference" / "http-api.md").read_text(encoding="utf-8")
SAID_OTHERWISE = {"model", "messages", "prompt", "best_of", "suffix", "add_special_tokens", "stream_options"}


def test_every_served_field_is_documented() -> None:
    fields = (set(ChatCompletionRequest.model_fields) | set(CompletionRequest.model_fields)) - SAID_OTHERWISE
    assert [field for field in sorted(fields) if f"`{field}`" not in TEXT] == []


def test_every_metric_is_documented() -> None:
    families = [family.name for family in Metrics().registry.collect()]
    prefixes = re.compile(r"holdfast_(worker_|prefix_cache_|memory_|constrained_)?")
    names = [prefixes.sub("", name, count=1) for name in families if name.startswith("holdfast_")]
    assert [name for name in names if f"`{name}`" not in TEXT] == []


def test_every_path_is_documented() -> None:
    paths = description(DialectTable(DIALECTS), version="1")["paths"]
    assert [path for path in paths if re.sub(r"{\w+}", "{id}", path) not in TEXT] == []
