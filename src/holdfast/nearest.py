"""Which of several names was probably meant by one that is none of them."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher

_MOST = 3
_LEAST_LIKE = 0.5


def nearest_names(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """Known names that are like a name, the nearest first: in any case of letters, and also by what
    stands behind the last /.
    """
    wanted = name.lower()
    scored = [
        (
            max(_likeness(wanted, other.lower()), _likeness(_last(wanted), _last(other.lower()))),
            other,
        )
        for other in known
    ]
    near = sorted(
        (pair for pair in scored if pair[0] >= _LEAST_LIKE), key=lambda pair: (-pair[0], pair[1])
    )
    return tuple(other for _, other in near[:_MOST])


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _likeness(wanted: str, other: str) -> float:
    """From 0 to 1, and more where one name is a part of the other."""
    is_part = bool(other and wanted) and (other in wanted or wanted in other)
    matcher = SequenceMatcher(a=other, b=wanted)
    if not is_part and matcher.quick_ratio() < _LEAST_LIKE:  # cheap, and never less than the ratio
        return 0.0
    return matcher.ratio() + 0.3 * is_part
