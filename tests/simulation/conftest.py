from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simulation.pool import Worlds


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the search first: it takes twenty seconds on any machine."""
    items.sort(key=lambda item: item.path.name != "test_simulation.py")


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with Worlds(1) as found:
        yield found
