"""The grammar of a whole answer: an optional thought, then text, JSON or calls as requested.

An expression is a piece of a grammar, as text (`Rules`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from holdfast.config import LimitsSettings, ToolsSettings
from holdfast.errors import InvalidRequest
from holdfast.front.request import ChatPrompt, GenerationRequest, OutputFormat, PromptText
from holdfast.front.structured.calls import (
    bare_calls,
    call_blocks,
    call_start_tokens,
    callable_tools,
    in_channel,
    is_strict,
    lenient_call_blocks,
    only_calls,
    text_or_calls,
    text_without_calls,
    thought_channel,
    unenforced,
    with_end,
)
from holdfast.front.structured.grammar_check import checked_schema, fault_of, fault_of_composed
from holdfast.front.structured.keywords import MOST_REPETITIONS, has_too_small, repetitions
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
from holdfast.front.structured.values import CallableTool
from holdfast.front.toolcalls.dialect import PLAIN, ModelDialect
from holdfast.front.toolcalls.incoming import markers_in

_MOST_CHARACTERS: Final = 20_000  # maximum for a regex, a grammar, or all choices together
_LONGEST_FAULT: Final = 300  # maximum characters of an error from llguidance in a message
ThoughtState: TypeAlias = Literal["open", "possible", "none"]
"""Whether an answer begins inside a thought ("open"), may begin with a thought, or has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerGrammar:
    """The grammar that restricts what the worker may sample.

    text: a grammar in llguidance's syntax; if empty, everything is allowed. banned_token_ids:
    tokens that may not be sampled. unenforced: paths of keywords in the tools' schemas that the
    grammar does not enforce.
    """

    text: str = ""
    banned_token_ids: tuple[int, ...] = ()
    unenforced: tuple[str, ...] = ()


UNCONSTRAINED: Final = AnswerGrammar()


def is_constrained(request: GenerationRequest, *, tools: ToolsSettings) -> bool:
    """Whether the answer needs a grammar."""
    if request.output_format is not None:
        return True
    choice, tools_in_prompt = request.tool_choice, prompt_tools(request)
    is_requested = (
        choice.mode != "auto"
        or bool(choice.names or choice.enforced_names)
        or tools.constrain == "auto"
    )
    return bool(tools_in_prompt) and (is_requested or any(map(is_strict, tools_in_prompt)))


def prompt_tools(request: GenerationRequest) -> Sequence[Mapping[str, Any]]:
    """Return the tools in the request's prompt."""
    return request.prompt.tools if isinstance(request.prompt, ChatPrompt) else ()


def answer_grammar(
    request: GenerationRequest,
    dialect: ModelDialect,
    *,
    prompt: PromptText,
    limits: LimitsSettings,
    tools: ToolsSettings,
) -> AnswerGrammar:
    """Build the grammar of an answer to a rendered prompt.

    Takes milliseconds, so do not call it on the event loop.

    Raises InvalidRequest for an output format that cannot be enforced.
    """
    if not is_constrained(request, tools=tools):
        return UNCONSTRAINED
    if not isinstance(request.prompt, ChatPrompt):
        dialect = PLAIN  # a text completion has neither thoughts nor calls
    bounds = SchemaBounds(parts=limits.max_schema_parts, depth=limits.max_schema_depth)
    body = _AnswerBody(request, dialect, bounds=bounds, constrain_all=tools.constrain == "auto")
    body_expression = body.expression()
    if not body_expression:
        return AnswerGrammar(banned_token_ids=body.banned_token_ids)
    lead = _thought_expression(body.rules, dialect, thought_state(prompt, dialect))
    channels = dialect.calls.channels if dialect.calls is not None else None
    if channels is not None and not lead:
        lead = thought_channel(body.rules, channels)
    text = grammar_text(body.rules.lark(f"{lead} {body_expression}"), **body.grammars)
    fault = fault_of_composed(text)
    if fault:
        raise _joint_refusal(request, fault)
    return AnswerGrammar(
        text=text, banned_token_ids=body.banned_token_ids, unenforced=body.unenforced
    )


def _joint_refusal(request: GenerationRequest, fault: str) -> InvalidRequest:
    """Build the error for schemas that can each be enforced alone, but not all together."""
    field = request.output_format.field if request.output_format else "tools"
    problem = "this schema cannot be enforced"
    if tools := prompt_tools(request):
        problem = f"this schema and those of {len(tools)} tools cannot be enforced together"
    # the lines after the first one quote the whole grammar
    cause = fault.partition("\n")[0].rpartition("JSON schema: ")[2]
    return InvalidRequest(f"`{field}`: {problem}", field=field, shown=f": {cause[:_LONGEST_FAULT]}")


def thought_state(prompt: PromptText, dialect: ModelDialect) -> ThoughtState:
    """Return whether an answer to this prompt begins inside a thought.

    A prompt that ends right after a closed thought tells the model not to think.
    """
    if dialect.reasoning is None:
        return "none"
    if prompt.in_reasoning:
        return "open"
    start, end = dialect.reasoning.start.strip(), dialect.reasoning.end.strip()
    text_before_end = prompt.text.rstrip().removesuffix(end)
    if len(text_before_end) == len(prompt.text.rstrip()):
        return "possible"
    # an end marker that contains the header of an answer ends every prompt, even without a thought
    is_header = len(markers_in(end)) > 1
    return "possible" if is_header and not text_before_end.rstrip().endswith(start) else "none"


def _thought_expression(rules: Rules, dialect: ModelDialect, state: ThoughtState) -> str:
    """An expression for a thought before the visible answer; empty if there can be no thought.

    It includes the markers of the thought and the white space after it.
    """
    if dialect.reasoning is None or state == "none":
        return ""
    start, end = dialect.reasoning.start.strip(), dialect.reasoning.end.strip()
    gap = rules.terminal(GAP)
    inner = f"{rules.text_before(end)} {gap}"
    if state == "open":
        return inner
    # a model that chooses whether to think may write the end alone, as some templates do
    return f"({gap} ({rules.literal(start)} {inner} | {rules.literal(end)} {gap}))?"


class _AnswerBody:
    """Builds the grammar expression for the visible answer and the calls, and the rules for it."""

    def __init__(
        self,
        request: GenerationRequest,
        dialect: ModelDialect,
        *,
        bounds: SchemaBounds,
        constrain_all: bool,
    ) -> None:
        self.rules = Rules(
            dialect.markup_ids, message_ends=dialect.message_ends, turn_ends=dialect.turn_ends
        )
        # these three are filled in by `expression`; grammars: those that it refers to, by name
        self.grammars: dict[str, str] = {}
        self.banned_token_ids: tuple[int, ...] = ()
        self.unenforced: tuple[str, ...] = ()
        self._request = request
        self._dialect = dialect
        self._bounds = bounds
        self._constrain_all = constrain_all

    def expression(self) -> str:
        """The expression for the visible answer and the calls; empty if everything is allowed."""
        output_format = self._request.output_format
        calls, choice = self._dialect.calls, self._request.tool_choice
        expression = ""
        if output_format is not None:
            expression, self.grammars = _format_expression(output_format, bounds=self._bounds)
            if calls is not None and calls.channels is not None:
                expression = in_channel(self.rules, calls.channels, expression)
            expression = with_end(
                self.rules, expression, calls.channels if calls is not None else None
            )
        if not prompt_tools(self._request):
            return expression
        if choice.mode == "none":
            return expression or self._forbid_calls()
        if calls is None or not calls.grammar_layouts:
            if choice.mode == "required":
                reason = (
                    "the form in which this model calls tools is not known, so calls cannot be "
                    "enforced; use auto"
                )
                raise InvalidRequest(f"`tool_choice`: {reason}", field="tool_choice")
            return expression
        return self._calls_expression(expression)

    def _calls_expression(self, expression: str) -> str:
        """The expression for an answer that may, or must, call tools.

        expression: the output format; empty if there is none.
        """
        family, choice = self._dialect.calls, self._request.tool_choice
        assert family is not None
        assert isinstance(self._request.prompt, ChatPrompt)
        tools = callable_tools(
            self._request.prompt,
            choice,
            bounds=self._bounds,
            enforce_all=self._constrain_all or choice.mode == "required",
        )
        blocks = call_blocks(self.rules, family, tools)
        self.unenforced = unenforced(tools, blocks[0])
        if choice.mode == "required":
            # a tool that is required by name is called once
            parallel = choice.parallel and len(choice.names) != 1
            return only_calls(self.rules, blocks, parallel=parallel)
        if not expression:
            return text_or_calls(self.rules, family, blocks, parallel=choice.parallel)
        return self._format_or_calls(expression, tools)

    def _format_or_calls(self, expression: str, tools: Sequence[CallableTool]) -> str:
        """Allow the output format, or calls in every form that the reader accepts and that cannot
        be mistaken for the format.
        """
        output_format, parallel = self._request.output_format, self._request.tool_choice.parallel
        assert output_format is not None
        is_json = output_format.kind in ("json_object", "json_schema")
        call_expressions = []
        for call_format in self._dialect.readable_formats:
            # where the format is JSON, `bare_calls` below covers calls without markers
            blocks = [
                block
                for block in lenient_call_blocks(
                    self.rules, call_format, tools, is_own=call_format is self._dialect.calls
                )
                if not (is_json and block.is_bare_json)
            ]
            if blocks:
                call_expressions.append(only_calls(self.rules, blocks, parallel=parallel))
            if is_json and call_format.bare_keys is not None and call_format.channels is None:
                call_expressions.append(
                    bare_calls(self.rules, call_format.bare_keys, tools, parallel=parallel)
                )
        return one_of((expression, *call_expressions))

    def _forbid_calls(self) -> str:
        """Forbid calls. The tools stay in the prompt, so that its cached prefix can be used."""
        calls = self._dialect.calls
        if calls is None or not calls.grammar_layouts:
            return ""
        self.banned_token_ids, some_begin_with_text = call_start_tokens(self.rules, calls)
        if self.banned_token_ids or not some_begin_with_text:
            return ""
        return text_without_calls(self.rules, calls)


def _format_expression(
    output_format: OutputFormat, *, bounds: SchemaBounds
) -> tuple[str, dict[str, str]]:
    """Return an output format as an expression, and the grammars that the expression refers to."""
    match output_format.kind:
        case "json_object":
            return json_value({"type": "object"}), {}
        case "json_schema":
            try:
                schema = checked_schema(output_format.schema, bounds=bounds, strict=True).schema
            except SchemaFault as fault:
                raise InvalidRequest(
                    f"`{output_format.field}`: {fault.reason}",
                    field=output_format.field,
                    shown=fault.where,
                ) from None
            return json_value(schema), {}
        case "choice":
            _check_size(output_format, sum(map(len, output_format.choices)))
            expression = one_of(map(literal, output_format.choices))
            _check_compiles(output_format, f"start: {expression}")
            return expression, {}
        case "regex":
            _check_size(output_format, len(output_format.pattern))
            expression = pattern(output_format.pattern)
            _check_compiles(output_format, f"start: {expression}")
            return expression, {}
        case "lark":
            _check_size(output_format, len(output_format.pattern))
            if has_too_small(output_format.pattern):
                reason = "a schema contains a number below the 64-bit range"
                raise InvalidRequest(
                    f"`{output_format.field}`: {reason}", field=output_format.field
                )
            _check_compiles(output_format, output_format.pattern)
            return "@form", {"form": output_format.pattern}


def _check_size(output_format: OutputFormat, characters: int) -> None:
    """Raise InvalidRequest if a format is too long, or repeats a pattern too often."""
    if characters > _MOST_CHARACTERS:
        reason = f"may have at most {_MOST_CHARACTERS:,} characters, got {characters:,}"
        raise InvalidRequest(f"`{output_format.field}`: {reason}", field=output_format.field)
    if repetitions(output_format.pattern) > MOST_REPETITIONS:
        raise InvalidRequest(
            f"`{output_format.field}`: a pattern repeats too often; use smaller repetition counts",
            field=output_format.field,
        )


def _check_compiles(output_format: OutputFormat, lark: str) -> None:
    """Raise InvalidRequest if the grammar of a format is faulty."""
    fault = fault_of(grammar_text(lark))
    if fault:
        reason = "this output format cannot be enforced"
        raise InvalidRequest(
            f"`{output_format.field}`: {reason}",
            field=output_format.field,
            shown=f": {fault.strip()}",
        )
