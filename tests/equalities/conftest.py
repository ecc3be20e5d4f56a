"""The equalities hold over both ways to attend: tiny models have so few scores that numpy would never be asked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.engine import host_attention


@pytest.fixture(autouse=True)
def larger_spans_attend_on_the_host() -> Iterator[None]:
    with host_attention.paying_from(600):
        yield
