"""The reference pages of docs/ match the server."""

from __future__ import annotations

import re
from pathlib import Path

from holdfast.front.application import DIALECTS
from holdfast.front.openai.endpoints import ChatCompletionRequest, CompletionRequest
from holdfast.front.server.dialect import DialectTable
from holdfast.front.server.openapi import description
from holdfast.front.telemetry.metrics import Metrics

REFERENCE = Path(__file__).parents[3] / "docs" / "reference"
FIELDS = (REFERENCE / "openai.md").read_text(encoding="utf-8")
METRICS = (REFERENCE / "metrics.md").read_text(encoding="utf-8")
PAGES_OF_PATHS = ("reference/http-api.md", "reference/ollama.md", "guides/operating.md")
PATHS = "".join((REFERENCE.parent / page).read_text(encoding="utf-8") for page in PAGES_OF_PATHS)


def test_every_served_field_is_documented() -> None:
    fields = set(ChatCompletionRequest.model_fields) | set(CompletionRequest.model_fields)
    assert [field for field in sorted(fields) if f"`{field}`" not in FIELDS] == []


def test_every_metric_is_documented() -> None:
    families = [family.name for family in Metrics().registry.collect()]
    prefixes = re.compile(r"holdfast_(worker_|prefix_cache_|memory_|constrained_)?")
    names = [prefixes.sub("", name, count=1) for name in families if name.startswith("holdfast_")]
    assert [name for name in names if f"`{name}`" not in METRICS] == []


def test_every_path_is_documented() -> None:
    paths = description(DialectTable(DIALECTS), version="1")["paths"]
    assert [path for path in paths if re.sub(r"{\w+}", "{id}", path) not in PATHS] == []
