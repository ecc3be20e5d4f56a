"""What an answer has to look like, as the grammar that its tokens are drawn by: a thought in front, then the form asked for."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.config import LimitsSettings
from holdfast.errors import InvalidRequest
from holdfast.intake.grammars.checked import checked_schema
from holdfast.intake.grammars.lark import grammar_text, json_value, literal, pattern
from holdfast.intake.grammars.schema import Schema, SchemaBounds, SchemaFault
from holdfast.intake.grammars.thought import thought_rules, thought_state
from holdfast.intake.grammars.trial import fault_of
from holdfast.messages.requests import GenerationRequest, OutputFormat
from holdfast.parsing.dialect import ModelDialect


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerGrammar:
    """What the worker draws by. `unenforced`: places in schemas of keywords that no grammar enforces."""

    text: str = ""  # of llguidance; empty: all is allowed
    unenforced: tuple[str, ...] = ()


UNCONSTRAINED = AnswerGrammar()


def is_constrained(request: GenerationRequest) -> bool:
    """Whether the answer is to have a form, so that a grammar has to be made."""
    return request.output_format is not None


def answer_grammar(
    request: GenerationRequest, dialect: ModelDialect, *, prompt_text: str, limits: LimitsSettings
) -> AnswerGrammar:
    """The grammar of an answer. Raises InvalidRequest for a form that cannot be had. Costs milliseconds: off the event loop.

    prompt_text: as rendered; its end tells whether the answer begins within a thought.
    """
    if request.output_format is None:
        return UNCONSTRAINED
    body, others = _form(request.output_format, limits=limits)
    lark = [*thought_rules(dialect, thought_state(prompt_text, dialect)), f"start: thought {body}"]
    return AnswerGrammar(text=grammar_text("\n".join(lark) + "\n", **others))


def _form(form: OutputFormat, *, limits: LimitsSettings) -> tuple[str, dict[str, str]]:
    """The visible answer as an expression, and the grammar that it refers to."""
    match form.kind:
        case "json_object":
            return json_value({"type": "object"}), {}
        case "json_schema":
            return json_value(_schema(form, limits=limits)), {}
        case "choice":
            return _tried(form, "(" + " | ".join(literal(choice) for choice in form.choices) + ")"), {}
        case "regex":
            return _tried(form, pattern(form.pattern)), {}
        case "lark":
            _try(form, form.pattern)
            return "@form", {"form": form.pattern}


def _schema(form: OutputFormat, *, limits: LimitsSettings) -> Schema | bool:
    bounds = SchemaBounds(parts=limits.max_schema_parts, depth=limits.max_schema_depth)
    try:
        return checked_schema(form.schema, bounds=bounds, strict=True).schema
    except SchemaFault as fault:
        raise InvalidRequest(f"`{form.field}`: {fault.reason}", field=form.field, shown=fault.where) from None


def _tried(form: OutputFormat, expression: str) -> str:
    _try(form, f"start: {expression}")
    return expression


def _try(form: OutputFormat, lark: str) -> None:
    fault = fault_of(grammar_text(lark))
    if fault:
        raise InvalidRequest(f"`{form.field}`: {form.kind} cannot be served", field=form.field, shown=f": {fault.strip()}")
