"""The format of a response's text: the field `text.format`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from holdfast.front.openai.structured_output import JsonSchemaFormat
from holdfast.front.server.fields import STRICT
from holdfast.front.server.problem import RequestRefused
from holdfast.wire.requests import OutputFormat


class TextFormat(JsonSchemaFormat):
    """Text, any JSON object, or JSON that fits a schema."""

    type: Literal["text", "json_object", "json_schema"]


class TextOptions(BaseModel):
    """What the visible text of a response is to be."""

    model_config = STRICT

    format: TextFormat | None = Field(None, description="Its form: text, or JSON.")
    verbosity: Annotated[str, Field(max_length=20)] | None = Field(
        None, description="Accepted, without effect."
    )

    def output_format(self) -> OutputFormat | None:
        """The form that is asked for; None: any.

        Raises RequestRefused for a schema that is missing.
        """
        given = self.format
        if given is None or given.type == "text":
            return None
        if given.type == "json_object":
            return OutputFormat(kind="json_object", field="text.format")
        field = "text.format.schema"
        if given.schema_ is None:
            raise RequestRefused(
                f"`{field}` is required", code="missing_required_parameter", field=field
            )
        return OutputFormat(kind="json_schema", schema=given.schema_, field=field)
