"""The check of a machine that a user sends to the developers."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.cli.doctor import save_machine_check
from holdfast.errors import HoldfastError


@pytest.mark.slow
def test_everything_that_is_measured_is_printed_and_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = save_machine_check(tmp_path, arguments=["--quick"])
    rows = [line for line in file.read_text().splitlines()[4:] if line]
    assert len(rows) >= 25
    assert all(line.startswith("| ") and line.count(" | ") == 1 for line in rows)
    assert len(capsys.readouterr().out.splitlines()) == len(rows)


def test_a_failed_check_says_where_its_findings_are(tmp_path: Path) -> None:
    with pytest.raises(
        HoldfastError, match=f"ended with code 2; its findings so far are in {tmp_path}"
    ):
        save_machine_check(tmp_path, arguments=["--no-such-option"])
