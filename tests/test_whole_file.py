"""Files that are there whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.whole_file import whole_file


def test_a_file_takes_its_place_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"before")
    with whole_file(target) as file:
        file.write(b"after")
        file.flush()
        assert target.read_bytes() == b"before"
    assert target.read_bytes() == b"after"
    assert target.stat().st_mode & 0o077 == 0
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("failure", [OSError, KeyboardInterrupt])
def test_nothing_stays_of_a_file_that_was_not_finished(tmp_path: Path, failure: type[BaseException]) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"before")
    with pytest.raises(failure):
        _begin_and_fail(target, failure)
    assert target.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [target]


def _begin_and_fail(target: Path, failure: type[BaseException]) -> None:
    with whole_file(target) as file:
        file.write(b"aft")
        raise failure
