from __future__ import annotations

import pytest

from holdfast.errors import HoldfastError
from holdfast.machine.child_process import answer_of

_KILLED = "import os; os.kill(os.getpid(), 9)"
_EXITED = "import os; os._exit(3)"
_WARNED = "import sys; print('a warning', file=sys.stderr)"


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (f"{_WARNED}; {_KILLED}", "counting ended with code -9: a warning"),
        (_KILLED, "counting ended with code -9: no message"),
        (f"{_WARNED}; {_EXITED}", "counting ended with code 3: a warning"),
        ("1 / 0", "counting ended with code 1: ZeroDivisionError: division by zero"),
    ],
)
def test_a_child_that_fails_is_reported_with_its_code_and_last_line(
    program: str, message: str
) -> None:
    once = ("-n1", "-r1")
    with pytest.raises(HoldfastError) as failed:
        answer_of("timeit", *once, program, answer_type=int, doing="counting", limit_seconds=60)
    assert str(failed.value) == message
