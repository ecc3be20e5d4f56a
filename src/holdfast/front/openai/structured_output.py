"""The fields that ask for structured output: OpenAI's `response_format` and vLLM's fields."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel, Discriminator, Field, Tag

from holdfast.front.server.fields import STRICT, TAG_MARK
from holdfast.front.server.problem import RequestRefused
from holdfast.wire.requests import OutputFormat

_TEXT, _OBJECT, _SWITCH = (TAG_MARK + name for name in ("text", "object", "switch"))
_KINDS = ("text", "json_object", "json_schema")
_MOST_CHOICES = 4096
_WANTED = "a JSON schema is an object"


def _kind(value: Any) -> str:
    return _OBJECT if isinstance(value, dict) else _SWITCH if isinstance(value, bool) else _TEXT


def _object_or_switch(value: Any) -> str:
    return _SWITCH if isinstance(value, bool) else _OBJECT


Schema = Annotated[
    Annotated[dict[str, Any], Tag(_OBJECT)]
    | Annotated[bool, Tag(_SWITCH)]
    | Annotated[str, Tag(_TEXT)],
    Discriminator(_kind),
]
SchemaProper = Annotated[
    Annotated[dict[str, Any], Tag(_OBJECT)] | Annotated[bool, Tag(_SWITCH)],
    Discriminator(_object_or_switch),
]
Choices = Annotated[list[str], Field(max_length=_MOST_CHOICES, fail_fast=True)]


class JsonSchemaFormat(BaseModel):
    """A schema with a name."""

    model_config = STRICT

    name: str | None = Field(None, description="Accepted, without effect.")
    description: str | None = Field(None, description="Accepted, without effect.")
    schema_: SchemaProper | None = Field(
        None, alias="schema", description="The schema that the answer has to fit."
    )
    strict: bool | None = Field(None, description="The answer fits the schema either way.")


class ResponseFormat(BaseModel):
    """OpenAI's: text, any JSON object, or JSON that fits a schema."""

    model_config = STRICT

    type: str = Field(description="text, json_object or json_schema.")
    json_schema: JsonSchemaFormat | None = Field(None, description="For json_schema.")
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="A schema for json_object, as llama.cpp's."
    )


class StructuredOutputs(BaseModel):
    """vLLM's: one of them."""

    model_config = STRICT

    json_: Schema | None = Field(
        None, alias="json", description="A JSON schema, as an object or as text."
    )
    regex: str | None = Field(None, description="A regular expression.")
    choice: Choices | None = Field(None, description="The answers that there may be.")
    grammar: str | None = Field(None, description="A Lark grammar as llguidance knows it.")
    json_object: bool | None = Field(None, description="Any JSON object.")


class FormatFields(BaseModel):
    """The fields that ask for a form of the answer."""

    response_format: ResponseFormat | None = Field(
        None, description="The form of the answer: text, or JSON."
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="The form of the answer, as vLLM's."
    )
    guided_json: Schema | None = Field(None, description="Older form of structured_outputs.json.")
    guided_regex: str | None = Field(None, description="Older form of structured_outputs.regex.")
    guided_choice: Choices | None = Field(
        None, description="Older form of structured_outputs.choice."
    )
    guided_grammar: str | None = Field(
        None, description="Older form of structured_outputs.grammar."
    )

    def output_format(self) -> OutputFormat | None:
        """The form that is asked for; None: any.

        Raises RequestRefused for two of them, or one that is not served.
        """
        asked = [*self._asked()]
        if len(asked) > 1:
            raise RequestRefused(
                f"`{asked[1].field}`: `{asked[0].field}` asks for a form already",
                field=asked[1].field,
            )
        return asked[0] if asked else None

    def _asked(self) -> Iterator[OutputFormat]:
        if (
            self.response_format is not None
            and (found := _response_format(self.response_format)) is not None
        ):
            yield found
        if (new := self.structured_outputs) is not None:
            for name, value in (new.model_extra or {}).items():
                if value:
                    field = f"structured_outputs.{name}"
                    raise RequestRefused(
                        f"`{field}`: this is not supported",
                        code="unsupported_parameter",
                        field=field,
                    )
            if new.json_object:
                yield OutputFormat(kind="json_object", field="structured_outputs.json_object")
            yield from _formats(
                "structured_outputs.{}",
                new.json_,
                regex=new.regex,
                choice=new.choice,
                grammar=new.grammar,
            )
        yield from _formats(
            "guided_{}",
            self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
        )


def _formats(
    form: str,
    schema: dict[str, Any] | bool | str | None,
    *,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
) -> Iterator[OutputFormat]:
    """vLLM's ways, of which each asks for nothing when it is empty.

    `form`: how their fields are called.
    """
    if schema is not None and schema != "":
        yield _schema_format(schema, field=form.format("json"))
    if choice:
        yield OutputFormat(kind="choice", choices=tuple(choice), field=form.format("choice"))
    if regex:
        yield OutputFormat(kind="regex", pattern=regex, field=form.format("regex"))
    if grammar:
        yield OutputFormat(kind="lark", pattern=grammar, field=form.format("grammar"))


def _response_format(given: ResponseFormat) -> OutputFormat | None:
    if given.type not in _KINDS:
        raise RequestRefused(
            "`response_format.type`: one of text, json_object and json_schema",
            code="unsupported_parameter",
            field="response_format.type",
            shown=f", got {given.type[:40]!r}",
        )
    if given.type == "json_object" and given.schema_ is None:
        return OutputFormat(kind="json_object", field="response_format")
    if given.type == "text":
        return None
    if given.json_schema is not None and given.json_schema.schema_ is not None:
        schema, field = given.json_schema.schema_, "response_format.json_schema.schema"
    elif given.schema_ is not None:
        schema, field = given.schema_, "response_format.schema"
    else:
        missing = "response_format.json_schema" + (
            ".schema" if given.json_schema is not None else ""
        )
        raise RequestRefused(
            f"`{missing}` is required", code="missing_required_parameter", field=missing
        )
    return OutputFormat(kind="json_schema", schema=schema, field=field)


def _schema_format(schema: dict[str, Any] | bool | str, *, field: str) -> OutputFormat:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise RequestRefused(f"`{field}`: the text is not valid JSON", field=field) from None
    if not isinstance(schema, dict | bool):
        raise RequestRefused(f"`{field}`: {_WANTED}", code="invalid_type", field=field)
    return OutputFormat(kind="json_schema", schema=schema, field=field)
