"""In each family, the next turn of an agent begins with all prefilled and generated tokens."""

from __future__ import annotations

import pytest

from tests.fakes.agent_turns import turns
from tests.fakes.family_bundles import OF_EACH_HABIT, bundle
from tests.fakes.family_templates import FAMILY_TEMPLATES
from tests.fakes.slow import slow


@pytest.mark.parametrize("keeps_thoughts", [True, False])
@pytest.mark.parametrize(
    "name",
    [name if name in OF_EACH_HABIT else slow(name)[0] for name in sorted(FAMILY_TEMPLATES)],
)
def test_each_familys_next_turn_begins_with_everything_before(
    name: str, keeps_thoughts: bool
) -> None:
    for before, after in turns(bundle(name), keeps_thoughts=keeps_thoughts):
        assert after[: len(before)] == before
