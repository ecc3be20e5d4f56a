from __future__ import annotations

import pytest

from holdfast.cli.output import new_table, print_table


def test_in_a_pipe_a_row_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    table = new_table("name", "size", right=("size",))
    table.add_row("o" * 300, "1")
    table.add_row("[b]", "10")
    print_table(table)
    assert capsys.readouterr().out.splitlines() == [
        f"{'name':<300}  size",
        f"{'o' * 300}     1",
        f"{'[b]':<300}    10",
    ]
