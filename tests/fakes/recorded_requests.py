"""Requests for responses as real clients send them; their texts are shortened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RECORDED: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("recorded_responses.json").read_text(encoding="utf-8")
)
CODEX = [each for each in RECORDED if each["client"].startswith("Codex")]
