"""The equalities hold over both ways to attend: tiny models have so few scores that numpy would
never be asked.
"""

from __future__ import annotations

import pytest

from holdfast.worker.engine import host_attention


@pytest.fixture(autouse=True)
def larger_spans_attend_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_attention, "SCORES_WORTH_IT", 600)
