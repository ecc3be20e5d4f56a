"""Parameters of a test that only `make slow` runs."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*cases: Any) -> list[Any]:
    """One parameter set for each case: a tuple, or the only value."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]
