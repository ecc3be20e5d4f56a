from __future__ import annotations

import pytest

from holdfast.errors import ModelLoadError
from holdfast.models.demo import DEMO_ID, DEMO_IDS, demo_folder, is_demo


def test_bundled_ids_are_known_and_the_empty_one_is_the_first() -> None:
    assert all(is_demo(name) for name in (*DEMO_IDS, ""))
    assert not is_demo("holdfast-demo-other")
    assert DEMO_IDS[0] == DEMO_ID


def test_another_id_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="is not a bundled model"):
        demo_folder("kelp")


@pytest.mark.parametrize("name", DEMO_IDS)
def test_a_bundled_model_is_a_folder_or_its_absence_is_told(name: str) -> None:
    try:
        folder = demo_folder(name)
    except ModelLoadError as error:
        assert name in str(error)
    else:
        assert (folder / "config.json").is_file()
