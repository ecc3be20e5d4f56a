"""The ways in which clients say whether and how much a model is to think, and what they come to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, Discriminator, Field, Tag

from holdfast.front.server.body import TAG_MARK
from holdfast.front.server.fields import INT32_MAX, STRICT
from holdfast.wire.requests import Thinking, ThinkingEffort

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
    """What all fields together ask for, by name; those that are None say nothing.

    Off goes before on, and a level before a mere on. Of two levels, the first counts.
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


_SWITCHES = ("reasoning_effort", "enable_thinking", "thinking", "think")
_BUDGETS = ("thinking_budget", "thinking_token_budget", "thinking_budget_tokens")
SPOKEN = (*_SWITCHES, *_BUDGETS)
"""Names under which chat templates, too, know these things."""


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
