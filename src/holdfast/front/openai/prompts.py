"""One text or several, as they are or as token ids: what completions continue and embeddings stand
for.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from holdfast.front.server.body import TAG_MARK
from holdfast.front.server.fields import INT32_MAX

_TEXT, _TEXTS, _TOKENS, _TOKEN_LISTS = (
    TAG_MARK + name for name in ("text", "texts", "tokens", "token_lists")
)


def _kind_of_prompt(value: Any) -> str:
    if not isinstance(value, list):
        return _TEXT
    if value and isinstance(value[0], list):
        return _TOKEN_LISTS
    return _TOKENS if value and isinstance(value[0], int | float) else _TEXTS


TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
PromptField = Annotated[
    Annotated[str, Tag(_TEXT)]
    | Annotated[list[str], Field(min_length=1, fail_fast=True), Tag(_TEXTS)]
    | Annotated[TokenIds, Tag(_TOKENS)]
    | Annotated[list[TokenIds], Field(fail_fast=True), Tag(_TOKEN_LISTS)],
    Discriminator(_kind_of_prompt),
]


def prompts_of(given: Any) -> tuple[str | tuple[int, ...], ...]:
    """The prompts in a field of that type."""
    if isinstance(given, str):
        return (given,)
    if isinstance(given[0], int):
        return (tuple(given),)
    return tuple(one if isinstance(one, str) else tuple(one) for one in given)
