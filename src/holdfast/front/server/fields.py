"""Request fields that several protocols share: their types and ranges, and how they ask for thinking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from holdfast.front.server.body import TAG_MARK
from holdfast.front.server.problem import RequestRefused
from holdfast.wire.requests import SAMPLING_RANGES, Thinking, ThinkingEffort

INT64_MAX = 2**63 - 1
INT32_MAX = 2**31 - 1
STRICT = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
ONE, MANY = TAG_MARK + "one", TAG_MARK + "many"
# 0: the prompt is read and cached, and nothing generated
MaxTokens = Annotated[int, Field(ge=0, le=INT32_MAX)]
Model = Annotated[str, Field(min_length=1)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=4096)]

_SWITCH, _WORD, _OBJECT = (TAG_MARK + name for name in ("switch", "word", "object"))
EffortWord = Literal["none", "off", "minimal", "low", "medium", "high", "xhigh", "max", "on"]
Budget = Annotated[int, Field(ge=-1, le=INT32_MAX)]
_EFFORTS: Mapping[str, ThinkingEffort] = {
    "none": "off",
    "disabled": "off",
    "enabled": "on",
    "adaptive": "on",
    "auto": "on",
    "xhigh": "max",
    **{effort: effort for effort in get_args(ThinkingEffort)},
}
_LEVELS = frozenset(get_args(ThinkingEffort)) - {"off", "on"}
_SWITCHES = ("reasoning_effort", "enable_thinking", "thinking", "think")
_BUDGETS = ("thinking_budget", "thinking_token_budget", "thinking_budget_tokens")
SPOKEN = (*_SWITCHES, *_BUDGETS)
"""Fields that chat templates know by the same names."""


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
    """Raise RequestRefused when a list has more items than this server takes."""
    if len(given) > most:
        raise RequestRefused(
            f"`{field}`: this server takes at most {most}, got {len(given)}", field=field
        )


class ThinkingOptions(BaseModel):
    """The form of Anthropic, DeepSeek and GLM."""

    model_config = STRICT

    type: Literal["enabled", "disabled", "adaptive", "auto"] | None = Field(
        None, description="Whether to think."
    )
    budget_tokens: Budget | None = Field(None, description="Most tokens of thought.")


class ReasoningOptions(BaseModel):
    """The form of OpenRouter, and of OpenAI's newer API."""

    model_config = STRICT

    effort: EffortWord | None = Field(None, description="How much to think.")
    max_tokens: Budget | None = Field(None, description="Most tokens of thought.")
    enabled: bool | None = Field(None, description="Whether to think.")


def _kind(value: Any) -> str:
    return (
        _OBJECT
        if isinstance(value, dict | BaseModel)
        else _WORD
        if isinstance(value, str)
        else _SWITCH
    )


Switch = Annotated[
    Annotated[bool, Tag(_SWITCH)]
    | Annotated[EffortWord, Tag(_WORD)]
    | Annotated[ThinkingOptions, Tag(_OBJECT)],
    Discriminator(_kind),
]


def thinking_of(*, said: Mapping[str, Any]) -> Thinking:
    """What the fields, by name, ask for together; None means that a field is absent.

    "Off" overrides everything, and a level overrides a plain "on". Of two levels, the first wins.
    """
    reasoning, switch = said.get("reasoning"), said.get("thinking")
    words = [said.get(name) for name in _SWITCHES]
    words += [getattr(reasoning, name, None) for name in ("effort", "enabled")]
    efforts = [effort for word in words if (effort := _effort(word)) is not None]
    budgets = [said.get(name) for name in _BUDGETS]
    budgets += [getattr(switch, "budget_tokens", None), getattr(reasoning, "max_tokens", None)]
    budget = next((value for value in budgets if type(value) is int), -1)
    if budget == 0:
        efforts.append("off")
    asked = min(efforts, key=_rank, default=None)
    return Thinking(effort=asked, budget_tokens=budget if budget > 0 and asked != "off" else None)


def _effort(value: Any) -> ThinkingEffort | None:
    if isinstance(value, ThinkingOptions):
        value = (
            value.type if value.type is not None else None if value.budget_tokens is None else True
        )
    if isinstance(value, bool):
        return "on" if value else "off"
    return _EFFORTS.get(value) if isinstance(value, str) else None


def _rank(effort: ThinkingEffort) -> int:
    return 0 if effort == "off" else 1 if effort in _LEVELS else 2
