"""Types of fields that requests of several dialects have, with their ranges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from holdfast.front.server.body import TAG_MARK
from holdfast.front.server.problem import RequestRefused
from holdfast.wire.requests import SAMPLING_RANGES

INT64_MAX = 2**63 - 1
INT32_MAX = 2**31 - 1
STRICT = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
ONE, MANY = TAG_MARK + "one", TAG_MARK + "many"
# 0: the prompt is read and cached, and nothing generated
MaxTokens = Annotated[int, Field(ge=0, le=INT32_MAX)]
Model = Annotated[str, Field(min_length=1)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=4096)]


def within(name: str, *, le: float | None = None) -> Any:
    """The range of a sampling parameter, which a protocol may end earlier."""
    lowest, highest = SAMPLING_RANGES[name]
    return Field(ge=lowest, le=highest if le is None else le)


def one_or_many(value: Any) -> str:
    """Tag of a field that takes one thing or a list of them."""
    return MANY if isinstance(value, list) else ONE


def refuse_above(value: int | None, limit: int, *, field: str) -> None:
    """Raise RequestRefused when a number is larger than a configured limit."""
    if value is not None and value > limit:
        raise RequestRefused(
            f"`{field}`: input should be less than or equal to {limit}, got {value}", field=field
        )


def refuse_too_many(given: Sequence[object], most: int, *, field: str) -> None:
    """Raise RequestRefused for more of them than this server takes."""
    if len(given) > most:
        raise RequestRefused(
            f"`{field}`: this server takes at most {most}, got {len(given)}", field=field
        )
