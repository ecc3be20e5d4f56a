"""Request fields that several protocols share: types and ranges, thinking, tools, and unsupported
fields and media.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from holdfast.config import LimitsSettings
from holdfast.front.images.sources import (
    is_image_kind,
    left_out_note,
    note_part,
    unreadable_part,
    with_image,
)
from holdfast.front.prompt.limits import nesting_of
from holdfast.front.request import Thinking, ThinkingEffort, ToolChoice
from holdfast.front.server.context import RequestContext
from holdfast.front.server.problem import RequestRefused, invalid_field
from holdfast.wire.requests import SAMPLING_RANGES

TAG_MARK = "|"  # first character of union tags, so that error locations can omit them
INT64_MAX = 2**63 - 1
INT32_MAX = 2**31 - 1
# deferred until the first request with a model: building all of them is a sixth of what importing the
# front costs, and most servers see one protocol
STRICT = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, defer_build=True)
ONE, MANY = TAG_MARK + "one", TAG_MARK + "many"  # tags of unions: one value, or a list
# 0: the prompt is only prefilled and cached
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
# request fields that switch thinking on or off, and those that limit its tokens
_SWITCHES = ("reasoning_effort", "enable_thinking", "thinking", "think")
_BUDGETS = ("thinking_budget", "thinking_token_budget", "thinking_budget_tokens")
THINKING_FIELDS = (*_SWITCHES, *_BUDGETS)
"""Request fields that chat templates know under the same names."""
_SHORTENING = ("middle", "auto")  # OpenAI's Responses API has only `auto`
_LONGEST_NAME = 256
_DEEPEST_SCHEMA = 64
FunctionName = Annotated[
    str, Field(min_length=1, max_length=_LONGEST_NAME, pattern=r"^[^\s\x00-\x1f\"<>{}]+$")
]
FunctionParameters = Annotated[
    dict[str, Any] | None, Field(description="JSON schema of the arguments.")
]
StrictArguments = Annotated[
    bool | None, Field(description="Force the arguments to match the schema.")
]
ToolMode: TypeAlias = Literal["auto", "none", "required"]
_log = logging.getLogger(__name__)
_NOT_YET = "this version does not support it yet"
_MOST_LOGGED_NAMES = 1000  # clients choose the names
_already_logged: set[str] = set()
_MEDIA_WORDS = ("image", "audio", "video", "file", "document", "container_upload", "search_result")
_MEDIA_TYPE = re.compile(r"^(?:data:)?([a-z]{1,20}/[a-zA-Z0-9.+-]{1,60})(?:[;,]|\Z)")
WITH_IMAGES = frozenset({"user", "tool", "function"})  # roles of messages that may have images
# roles of messages whose unreadable parts are refused in a new message, because the user can still
# change it; in older messages, and in those of other roles, a note replaces the part
_REFUSED_IF_NEW = frozenset({"user", "system", "developer"})
_LONGEST_SHOWN = 40  # characters of a part's type that a message quotes
_LONGEST_MEDIA_TYPE = 100  # characters at the beginning of a value that are searched for it


def optional(description: str) -> Any:
    """Declare a request field that may be left out."""
    return Field(None, description=description)


def sampled(name: str, **bounds: float) -> Any:
    """Declare the request field of the sampling parameter `name`.

    bounds: the protocol's `ge`, `gt` and `le`, where they differ from Holdfast's.
    """
    parameter = SAMPLING_RANGES[name]
    constraints: dict[str, Any] = {"le": parameter.highest, **bounds}
    if "gt" not in constraints:
        constraints.setdefault("ge", parameter.lowest)
    return Field(None, description=parameter.meaning, **constraints)


def one_or_many(value: Any) -> str:
    """The discriminator of a pydantic union: tells whether a field got one value or a list."""
    return MANY if isinstance(value, list) else ONE


ListItem = TypeVar("ListItem")
TextOrMany = Annotated[
    Annotated[str, Tag(ONE)] | Annotated[list[ListItem], Field(fail_fast=True), Tag(MANY)],
    Discriminator(one_or_many),
]
"""A text, or a list of items of one type."""


def refuse_above(value: int | None, limit: int, *, field: str) -> None:
    """Raise RequestRefused if a number exceeds a configured limit."""
    if value is not None and value > limit:
        raise invalid_field(field, f"must be at most {limit}, got {value}")


def refuse_too_many(items: Sequence[object], most_items: int, *, field: str) -> None:
    """Raise RequestRefused if a list has too many items. field: the request field of the list."""
    if len(items) > most_items:
        raise invalid_field(field, f"must have at most {most_items} items, got {len(items)}")


class ThinkingOptions(BaseModel):
    """The `thinking` object as Anthropic, DeepSeek and GLM define it."""

    model_config = STRICT

    type: Literal["enabled", "disabled", "adaptive", "auto"] | None = optional("Whether to think.")
    budget_tokens: Budget | None = optional("Maximum number of reasoning tokens.")


class ReasoningOptions(BaseModel):
    """The `reasoning` object as OpenRouter and OpenAI's Responses API define it."""

    model_config = STRICT

    effort: EffortWord | None = optional("How much to think.")
    max_tokens: Budget | None = optional("Maximum number of reasoning tokens.")
    enabled: bool | None = optional("Whether to think.")


def _switch_tag(value: Any) -> str:
    """The discriminator of `Switch`."""
    if isinstance(value, dict | BaseModel):
        return _OBJECT
    return _WORD if isinstance(value, str) else _SWITCH


Switch = Annotated[
    Annotated[bool, Tag(_SWITCH)]
    | Annotated[EffortWord, Tag(_WORD)]
    | Annotated[ThinkingOptions, Tag(_OBJECT)],
    Discriminator(_switch_tag),
]
"""A field that switches thinking on or off: a boolean, a word, or an object with details."""


def thinking_of(*, values: Mapping[str, Any]) -> Thinking:
    """Combine all fields of a request about thinking.

    "Off" overrides everything, and a level overrides a plain "on". Of two levels, the first wins.

    values: the value of each field by name; None if the field is absent.
    """
    reasoning, thinking = values.get("reasoning"), values.get("thinking")
    switches = [values.get(name) for name in _SWITCHES]
    switches += [getattr(reasoning, name, None) for name in ("effort", "enabled")]
    efforts = [level for value in switches if (level := _effort(value)) is not None]
    budgets = [values.get(name) for name in _BUDGETS]
    budgets += [getattr(thinking, "budget_tokens", None), getattr(reasoning, "max_tokens", None)]
    budget = next((value for value in budgets if type(value) is int), None)
    if budget == 0:
        efforts.append("off")
    effort = min(efforts, key=_precedence, default=None)
    has_budget = budget is not None and budget > 0 and effort != "off"
    return Thinking(effort=effort, budget_tokens=budget if has_budget else None)


def _effort(value: Any) -> ThinkingEffort | None:
    """The effort that the value of one field asks for; None if it asks for none."""
    if isinstance(value, ThinkingOptions):
        value = value.type or (None if value.budget_tokens is None else True)
    if isinstance(value, bool):
        return "on" if value else "off"
    return _EFFORTS.get(value) if isinstance(value, str) else None


def _precedence(effort: ThinkingEffort) -> int:
    """Sort key: off first, then levels, then a plain on."""
    if effort == "off":
        return 0
    return 2 if effort == "on" else 1


class HoldfastOptions(BaseModel):
    """Options that only Holdfast has."""

    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)

    explain: bool | None = optional(
        "Report in the answer how much of the prompt was cached, and why not more."
    )


class CacheSaltField(BaseModel):
    """The field `cache_salt`, in every request whose prompt is looked up in the prefix cache."""

    model_config = STRICT

    cache_salt: CacheSalt | None = optional(
        "Only requests with the same salt share cached prefixes."
    )


class LogprobFields(BaseModel):
    """The fields `logprobs` and `top_logprobs` of OpenAI's chat and of Ollama."""

    logprobs: bool | None = optional("Return the log-probability of each token of the answer.")
    top_logprobs: Annotated[int, Field(ge=0)] | None = optional(
        "Number of most likely tokens to list at each position."
    )

    def logprob_options(self, limits: LimitsSettings) -> dict[str, Any]:
        """Return fields of a GenerationRequest. Raises RequestRefused."""
        refuse_above(self.top_logprobs, limits.max_top_logprobs, field="top_logprobs")
        if self.top_logprobs and not self.logprobs:
            raise RequestRefused(
                "`top_logprobs` is allowed only with `logprobs`", field="top_logprobs"
            )
        return {"want_logprobs": bool(self.logprobs), "top_logprobs": self.top_logprobs or 0}


class SharedFields(CacheSaltField):
    """Fields of all requests that generate: cache, session, truncation, Holdfast's own options.

    session_headers: headers in which clients of the protocol name the session.
    """

    session_headers: ClassVar[tuple[str, ...]] = ()
    session_id: str | None = optional(
        "The session of the request, which is opened if it does not exist."
    )
    prompt_cache_key: str | None = optional(
        "The session to use if neither X-Session-ID nor session_id names one."
    )
    kv_bits: Literal["auto", "native", "8", "8/4", "4", 8, 4] | None = optional(
        "Bits of keys and values: `native` (not quantized), 8, `8/4` (8-bit keys, 4-bit values), "
        "4 (with 5-bit keys), or `auto`: native, but 8 when memory runs short. Default: the "
        "setting `model.kv_bits`."
    )
    truncation: Literal["auto", "disabled", "middle"] | None = optional(
        "What to do with a prompt that does not fit the context. disabled (the default): refuse "
        "it. middle, auto: leave out its middle."
    )
    holdfast: HoldfastOptions | None = optional("Options that only Holdfast has.")

    @property
    def is_batch(self) -> bool:
        """Whether the body asks for batch priority."""
        return False

    @property
    def shortens_prompt(self) -> bool:
        """Whether to leave out the middle of a prompt that does not fit the context."""
        return self.truncation in _SHORTENING

    @property
    def streams(self) -> bool:
        """Whether the answer is streamed."""
        return False

    def request_options(self, context: RequestContext) -> dict[str, Any]:
        """The arguments of GenerationRequest that these fields and the headers determine.

        Raises RequestRefused for an invalid session or priority.
        """
        # texts that identify the session if nothing else names it
        keys = (self.prompt_cache_key, *map(context.headers.get, self.session_headers))
        key = next(filter(None, keys), "")
        return {
            "tenant": context.tenant,
            "session_id": context.session_id(named=self.session_id, key=key),
            "service": context.service(is_batch=self.is_batch),
            "streams": self.streams,
            "explains": context.wants_explanation or bool(self.holdfast and self.holdfast.explain),
            **self.body_options(),
        }

    def body_options(self) -> dict[str, Any]:
        """The arguments of GenerationRequest that the fields alone determine."""
        return {
            "kv_bits": str(self.kv_bits or ""),
            "truncation": "middle" if self.shortens_prompt else "disabled",
        }


def checked_tool_choice(
    mode: ToolMode,
    names: Sequence[str],
    *,
    tools: Sequence[Mapping[str, Any]],
    parallel: bool,
    field: str,
) -> ToolChoice:
    """Create the tool choice from the `tool_choice` field of a request.

    Raises RequestRefused if no tool has one of the names, or if a call is required but there are
    no tools.

    names: the tools that may be called; if empty, all.
    tools: all tools of the request, in OpenAI's format.
    parallel: whether one answer may contain several calls.
    field: the field that an error names.
    """
    tool_names = {tool["function"]["name"] for tool in tools}
    if mode == "required" and not (tool_names or names):
        raise invalid_field(field, "requires a tool call, but the request has no tools")
    for name in names:
        if name not in tool_names:
            raise invalid_field(field, "no tool has this name", shown=f": {name[:100]!r}")
    return ToolChoice(mode=mode, names=tuple(dict.fromkeys(names)), parallel=parallel)


def checked_definitions(
    tools: Sequence[dict[str, Any]],
    *,
    most_parts: int,
    field: str = "",
    fields: Sequence[str] = (),
    schema: str = "parameters",
) -> tuple[dict[str, Any], ...]:
    """Check tool definitions in OpenAI's format, and return them. Raises RequestRefused.

    Errors name the request field that contains the invalid tool: `field`, formatted with the index
    of the tool, or, if `fields` is given, the item of `fields` with that index.

    most_parts: maximum number of keys and values in all definitions together.
    schema: name under which clients send the schema of the arguments.
    """
    names: set[str] = set()
    parts = 0
    for index, tool in enumerate(tools):
        function = tool["function"]
        tool_field = fields[index] if fields else field.format(index)
        if (name := function["name"]) in names:
            raise invalid_field(
                f"{tool_field}.name", "more than one tool has this name", shown=f": {name!r}"
            )
        nesting = nesting_of(function.get("parameters"), max_parts=most_parts)
        if nesting.levels > _DEEPEST_SCHEMA:
            raise invalid_field(
                f"{tool_field}.{schema}", f"must have at most {_DEEPEST_SCHEMA} levels"
            )
        parts += nesting.parts
        if parts > most_parts:
            raise invalid_field(
                tool_field,
                f"the tool definitions together have more than {most_parts:,} keys and values",
            )
        names.add(name)
    return tuple(tools)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsupportedFields:
    """The request fields that a protocol does not support.

    neutral: for each field, the values without effect; null never has one.
    reasons: for a field, why it is unsupported, unless the reason is just "not yet".
    """

    neutral: Mapping[str, tuple[Any, ...]]
    reasons: Mapping[str, str] = field(default_factory=dict)

    def refuse(self, extras: Mapping[str, Any] | None) -> None:
        """Raise RequestRefused for the first unsupported field that would have an effect.

        Fields that are not in `neutral` are ignored; each of their names is logged once.
        """
        for name, value in (extras or {}).items():
            if name not in self.neutral:
                log_once("ignored an unknown request field: %r", name)
            elif value is not None and not any(
                _equal_in_json(value, neutral) for neutral in self.neutral[name]
            ):
                reason = self.reasons.get(name, _NOT_YET)
                raise invalid_field(name, reason, code="unsupported_parameter")


def _equal_in_json(value: Any, neutral: Any) -> bool:
    """Whether both values are the same in JSON."""
    # True == 1 in Python, but not in JSON.
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def log_once(message: str, name: str) -> None:
    """Log a warning once for each name. message: its text, with one %-format for the name."""
    if name not in _already_logged and len(_already_logged) < _MOST_LOGGED_NAMES:
        _already_logged.add(name)
        _log.warning(message, name[:100])


def is_media(kind: str) -> bool:
    """Whether message parts of this type contain media."""
    return any(word in kind for word in _MEDIA_WORDS)


def media_error(kind: str, *, field: str) -> RequestRefused:
    """The error for a media part in a field where only text is allowed."""
    if is_image_kind(kind):
        reason = "images are allowed in user messages and tool results only"
        return RequestRefused(reason, code="unsupported_content", field=field)
    shown = f"; got a part of type {kind[:_LONGEST_SHOWN]!r}"
    reason = "only text and images are supported"
    return RequestRefused(reason, code="unsupported_content", field=field, shown=shown)


def non_text_part(part: Mapping[str, Any], *, role: str, field: str) -> dict[str, Any]:
    """A part that is not text, as a part of a prompt: an image of the user or of a tool's result, or
    else a note that says what was left out.

    If the role is one of `_REFUSED_IF_NEW`, the note carries an error, which `with_notes` raises if
    the message is a new one.

    role: of the message. field: the request field that contains the part.
    """
    kind = part["type"]
    if is_image_kind(kind) and role in WITH_IMAGES:
        return with_image(part, field)
    # the log gets one of a few words, because the client's own text may be secret
    media_word = next((word for word in _MEDIA_WORDS if word in kind), "another")
    log_once("parts are left out of prompts, because no model here reads them: type %r", media_word)
    note = left_out_note(next(_media_types(part), kind[:_LONGEST_SHOWN]))
    if role in _REFUSED_IF_NEW:
        return unreadable_part(note, part_error(kind, field=field))
    return note_part(note)


def part_error(kind: str, *, field: str) -> RequestRefused:
    """The error for a part of a message that no model here reads."""
    if is_media(kind):
        return media_error(kind, field=field)
    shown = f" {kind[:_LONGEST_SHOWN]!r}"
    return invalid_field(f"{field}.type", "unknown part type", shown=shown)


def _media_types(part: Mapping[str, Any]) -> Iterator[str]:
    """The media types that a part names, in a data URL or in a `media_type` field."""
    for name, value in part.items():
        if isinstance(value, dict):
            yield from _media_types(value)
        elif isinstance(value, str) and (name == "media_type" or value.startswith("data:")):
            yield from _MEDIA_TYPE.findall(value[:_LONGEST_MEDIA_TYPE])
