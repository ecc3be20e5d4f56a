"""The grammar of a whole answer: a thought, then text, JSON or calls, as the request wants it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from holdfast.config import LimitsSettings, ToolsSettings
from holdfast.errors import InvalidRequest
from holdfast.front.structured.calls import (
    call_block,
    can_constrain,
    channel_texts,
    only_calls,
    text_or_calls,
    text_without_calls,
    tokens_of_openers,
    unenforced,
)
from holdfast.front.structured.checked import checked_schema, fault_of, fault_of_composed
from holdfast.front.structured.keywords import MOST_REPETITIONS, names_too_small, repetitions
from holdfast.front.structured.lark import (
    GAP,
    Rules,
    grammar_text,
    json_value,
    literal,
    one_of,
    pattern,
)
from holdfast.front.structured.schema import SchemaBounds, SchemaFault
from holdfast.front.structured.tools import callable_tools, is_strict
from holdfast.front.toolcalls.dialect import PLAIN, ModelDialect
from holdfast.wire.requests import ChatPrompt, GenerationRequest, OutputFormat, PromptText

_MOST_CHARACTERS: Final = 20_000  # of a regular expression, a grammar, or all choices together
ThoughtState: TypeAlias = Literal["open", "possible", "none"]
"""At the beginning of an answer: the prompt has opened a thought, the model may open one, there is
none.
"""


def form_of(form: OutputFormat, *, bounds: SchemaBounds) -> tuple[str, dict[str, str]]:
    """The visible answer as an expression, and the grammars that it refers to.

    Raises InvalidRequest naming the field.
    """
    match form.kind:
        case "json_object":
            return json_value({"type": "object"}), {}
        case "json_schema":
            try:
                return json_value(
                    checked_schema(form.schema, bounds=bounds, strict=True).schema
                ), {}
            except SchemaFault as fault:
                raise InvalidRequest(
                    f"`{form.field}`: {fault.reason}", field=form.field, shown=fault.where
                ) from None
        case "choice":
            _check_size(form, sum(map(len, form.choices)))
            expression = one_of(map(literal, form.choices))
            _try(form, f"start: {expression}")
            return expression, {}
        case "regex":
            _check_size(form, len(form.pattern))
            expression = pattern(form.pattern)
            _try(form, f"start: {expression}")
            return expression, {}
        case "lark":
            _check_size(form, len(form.pattern))
            if names_too_small(form.pattern):
                raise InvalidRequest(
                    f"`{form.field}`: a schema holds a number below what 64 bits hold",
                    field=form.field,
                )
            _try(form, form.pattern)
            return "@form", {"form": form.pattern}


def _check_size(form: OutputFormat, characters: int) -> None:
    if characters > _MOST_CHARACTERS:
        reason = f"at most {_MOST_CHARACTERS:,} characters, got {characters:,}"
        raise InvalidRequest(f"`{form.field}`: {reason}", field=form.field)
    if repetitions(form.pattern) > MOST_REPETITIONS:
        raise InvalidRequest(f"`{form.field}`: it repeats too often", field=form.field)


def _try(form: OutputFormat, lark: str) -> None:
    fault = fault_of(grammar_text(lark))
    if fault:
        raise InvalidRequest(
            f"`{form.field}`: this cannot be enforced", field=form.field, shown=f": {fault.strip()}"
        )


def thought_state(prompt: PromptText, dialect: ModelDialect) -> ThoughtState:
    """Where an answer to this prompt begins.

    A model whose prompt has just closed a thought has been told not to think.
    """
    if dialect.reasoning is None:
        return "none"
    if prompt.in_reasoning:
        return "open"
    return "none" if prompt.text.rstrip().endswith(dialect.reasoning.end.strip()) else "possible"


def thought(rules: Rules, dialect: ModelDialect, state: ThoughtState) -> str:
    """What stands in front of the visible answer: a thought with its markers and the white space
    behind it, or nothing.
    """
    if dialect.reasoning is None or state == "none":
        return ""
    inner = f"{rules.text_before(dialect.reasoning.end.strip())} {rules.terminal(GAP)}"
    return (
        inner if state == "open" else f"({rules.literal(dialect.reasoning.start.strip())} {inner})?"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerGrammar:
    """What the worker draws by.

    `unenforced`: places in the tools' schemas of keywords that no grammar enforces.
    """

    text: str = ""  # of llguidance; empty: all is allowed
    banned_token_ids: tuple[int, ...] = ()
    unenforced: tuple[str, ...] = ()


UNCONSTRAINED = AnswerGrammar()
_LONGEST_FAULT = 300  # characters


def is_constrained(request: GenerationRequest, *, tools: ToolsSettings) -> bool:
    """Whether a grammar has to be made for the answer."""
    choice, offered = request.tool_choice, offered_tools(request)
    if request.output_format is not None:
        return True
    asked = choice.mode != "auto" or bool(choice.names or choice.held) or tools.constrain == "auto"
    return bool(offered) and (asked or any(map(is_strict, offered)))


def offered_tools(request: GenerationRequest) -> Sequence[Mapping[str, Any]]:
    """The tools in the request's prompt."""
    return request.prompt.tools if isinstance(request.prompt, ChatPrompt) else ()


def answer_grammar(
    request: GenerationRequest,
    dialect: ModelDialect,
    *,
    prompt: PromptText,
    limits: LimitsSettings,
    tools: ToolsSettings,
) -> AnswerGrammar:
    """The grammar of an answer.

    Raises InvalidRequest for a form that cannot be had. Costs milliseconds: off the event loop.

    prompt: as rendered; its end tells whether the answer begins within a thought.
    """
    if not is_constrained(request, tools=tools):
        return UNCONSTRAINED
    if not isinstance(request.prompt, ChatPrompt):
        dialect = PLAIN  # what completes a text has neither thoughts nor calls in it
    bounds = SchemaBounds(parts=limits.max_schema_parts, depth=limits.max_schema_depth)
    body = _Body(request, dialect, bounds=bounds, constrain_all=tools.constrain == "auto")
    made = body.expression()
    if not made:
        return AnswerGrammar(banned_token_ids=body.banned)
    lead = thought(body.rules, dialect, thought_state(prompt, dialect))
    channels = channel_texts(dialect.calls)
    if channels is not None and not lead:
        lead = channels.lead(body.rules)
    start = f"{lead} {made}"
    text = grammar_text(body.rules.lark(start), **body.grammars)
    fault = fault_of_composed(text)
    if fault:
        raise _refusal(request, fault)
    return AnswerGrammar(text=text, banned_token_ids=body.banned, unenforced=body.unenforced)


def _refusal(request: GenerationRequest, fault: str) -> InvalidRequest:
    """The parts have been checked one by one: what is at fault is how much they come to together."""
    field = request.output_format.field if request.output_format else "tools"
    asked = "this schema cannot be enforced"
    if tools := offered_tools(request):
        asked = f"this schema and those of {len(tools)} tools cannot be enforced together"
    # the lines behind it quote the whole grammar
    said = fault.partition("\n")[0].rpartition("JSON schema: ")[2]
    return InvalidRequest(f"`{field}`: {asked}", field=field, shown=f": {said[:_LONGEST_FAULT]}")


class _Body:
    """What stands behind the thought, as an expression over its rules."""

    def __init__(
        self,
        request: GenerationRequest,
        dialect: ModelDialect,
        *,
        bounds: SchemaBounds,
        constrain_all: bool,
    ) -> None:
        self.rules = Rules(dialect.marker_ids)
        self.grammars: dict[str, str] = {}
        self.banned: tuple[int, ...] = ()
        self.unenforced: tuple[str, ...] = ()
        self._request, self._dialect, self._bounds, self._constrain_all = (
            request,
            dialect,
            bounds,
            constrain_all,
        )

    def expression(self) -> str:
        """Empty: anything may stand there."""
        form = self._request.output_format
        said = ""
        if form is not None:
            said, self.grammars = form_of(form, bounds=self._bounds)
            channels = channel_texts(self._dialect.calls)
            said = said if channels is None else channels.around(self.rules, said)
        calls, choice = self._dialect.calls, self._request.tool_choice
        if not offered_tools(self._request):
            return said
        if choice.mode == "none":
            return said or self._no_calls()
        if calls is None or not can_constrain(calls):
            if choice.mode == "required":
                reason = (
                    "the form in which this model calls tools is not known, so that no call can be "
                    "enforced"
                )
                raise InvalidRequest(f"`tool_choice`: {reason}", field="tool_choice")
            return said
        return self._calls(said)

    def _calls(self, said: str) -> str:
        form, choice = self._dialect.calls, self._request.tool_choice
        assert form is not None
        assert isinstance(self._request.prompt, ChatPrompt)
        enforce_all = self._constrain_all or choice.mode == "required"
        tools = callable_tools(
            self._request.prompt, choice, bounds=self._bounds, enforce_all=enforce_all
        )
        block = call_block(self.rules, form, tools)
        self.unenforced = unenforced(tools, block)
        if choice.mode == "required":  # who names one tool wants one call of it
            return only_calls(
                self.rules, block, parallel=choice.parallel and len(choice.names) != 1
            )
        if said:
            return f"({said} | {only_calls(self.rules, block, parallel=choice.parallel)})"
        return text_or_calls(self.rules, form, block, parallel=choice.parallel)

    def _no_calls(self) -> str:
        """Tools are in the prompt, so that it stays the same, but none may be called: what opens a
        call is not drawn.
        """
        calls = self._dialect.calls
        if calls is None:
            return ""
        self.banned, words = tokens_of_openers(self.rules, calls)
        return "" if self.banned else text_without_calls(self.rules, calls) if words else ""
