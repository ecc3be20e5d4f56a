"""The equalities hold for all implementations of attention: tiny models have so few scores that
numpy and the C kernel would never be used.
"""

from __future__ import annotations

import pytest

from holdfast.worker.cpu import host_attention, host_decoding


@pytest.fixture(autouse=True)
def larger_spans_attend_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_attention, "SCORES_WORTH_IT", 600)
    monkeypatch.setattr(host_decoding, "SCORES_WORTH_IT", 100)
