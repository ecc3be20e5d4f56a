"""The forms of a visible answer that a client may ask for: JSON, a pattern, a grammar of its own,
one of some choices.
"""

from __future__ import annotations

from typing import Final

from holdfast.errors import InvalidRequest
from holdfast.front.structured.bounds import MOST_REPETITIONS, names_too_small, repetitions
from holdfast.front.structured.checked import checked_schema
from holdfast.front.structured.lark import grammar_text, json_value, literal, one_of, pattern
from holdfast.front.structured.schema import SchemaBounds, SchemaFault
from holdfast.front.structured.trial import fault_of
from holdfast.wire.requests import OutputFormat

_MOST_CHARACTERS: Final = 20_000  # of a regular expression, a grammar, or all choices together


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
