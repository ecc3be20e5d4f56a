"""What an answer has to look like, as the grammar that its tokens are drawn by: a thought in front,
then the form asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.config import LimitsSettings, ToolsSettings
from holdfast.errors import InvalidRequest
from holdfast.front.structured.calls import (
    call_block,
    can_constrain,
    only_calls,
    text_or_calls,
    text_without_calls,
    tokens_of_openers,
    unenforced,
)
from holdfast.front.structured.channel_frame import channel_texts
from holdfast.front.structured.forms import form_of
from holdfast.front.structured.lark import Rules, grammar_text
from holdfast.front.structured.schema import SchemaBounds
from holdfast.front.structured.thought import thought, thought_state
from holdfast.front.structured.tools import callable_tools, is_strict
from holdfast.front.structured.trial import fault_of_composed
from holdfast.front.toolcalls.dialect import PLAIN, ModelDialect
from holdfast.wire.prompt import PromptText
from holdfast.wire.requests import ChatPrompt, GenerationRequest


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
