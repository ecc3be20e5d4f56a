"""The fields that OpenAI's endpoints share: sampling, limits and structured output; and the fields
that are not supported.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag

from holdfast import __version__
from holdfast.config import LimitsSettings
from holdfast.front.request import OutputFormat, sampling_options
from holdfast.front.server.context import RequestContext
from holdfast.front.server.fields import (
    INT32_MAX,
    INT64_MAX,
    MANY,
    ONE,
    STRICT,
    TAG_MARK,
    MaxTokens,
    Model,
    SharedFields,
    UnsupportedFields,
    one_or_many,
    optional,
    refuse_too_many,
    sampled,
)
from holdfast.front.server.problem import RequestRefused, invalid_field, missing_field
from holdfast.front.server.services import model_of
from holdfast.wire.requests import SAMPLING_RANGES, SamplingParams

# tags of unions
_TEXT, _OBJECT, _SWITCH = (TAG_MARK + name for name in ("text", "object", "switch"))
_FORMAT_TYPES = ("text", "json_object", "json_schema")
_MOST_CHOICES = 4096
_TEXTS, _TOKENS, _TOKEN_LISTS = (TAG_MARK + name for name in ("texts", "tokens", "token_lists"))
_PATIENT_TIERS = ("flex", "batch")  # values of `service_tier` that mean batch priority
_MOST_BIASES = 4096
_MOST_DIGITS = 9  # of a token id

# Unsupported fields that clients send, some of them fields of other endpoints. They are refused,
# unless their value has no effect: an empty one, false, or (_NEVER) none but null.
_EMPTY = (
    "grammar json_schema guided_whitespace_pattern structural_tag mm_processor_kwargs "
    "media_io_kwargs stop_token_ids bad_words moderation "
    "logits_processors logit_processors documents role_mapping adapters draft_model"
)
_OFF = (
    "use_beam_search early_stopping include_stop_str_in_output return_token_ids "
    "return_tokens_as_token_ids"
)
_NEVER = (
    "audio web_search_options allowed_token_ids truncate_prompt_tokens prompt_logprobs "
    "repetition_context_size "
    "repeat_penalty repeat_last_n n_predict num_predict num_ctx chat_template prompt_embeds "
    "num_draft_tokens"
)
# values of each field that change nothing and are therefore accepted; null is always accepted
KNOWN: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(_NEVER.split(), ()),
    **dict.fromkeys(_EMPTY.split(), ([], {}, "")),
    **dict.fromkeys(_OFF.split(), (False,)),
    **dict.fromkeys(("tools", "functions"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(
        ("parallel_tool_calls", "include_reasoning", "separate_reasoning", "parse_tool_calls"),
        (True,),
    ),
    **dict.fromkeys(
        ("reasoning_effort", "enable_thinking", "thinking", "think", "reasoning"),
        (False, "none", "off", {}),
    ),
    **dict.fromkeys(
        ("thinking_budget", "thinking_token_budget", "thinking_budget_tokens"), (0, -1)
    ),
    **dict.fromkeys(("messages", "chat_template_kwargs"), ([], {})),
    **dict.fromkeys(("continue_final_message", "add_generation_prompt"), (False,)),
    **dict.fromkeys(("prompt", "suffix"), ("", [])),
    "prediction": (),
    "echo": (False,),
    "best_of": (1,),
    "reasoning_format": ("auto", "deepseek"),
    **dict.fromkeys(("min_tokens", "mirostat"), (0,)),
    **dict.fromkeys(("xtc_probability", "dry_multiplier", "top_a"), (0, 0.0)),
    **dict.fromkeys(("length_penalty", "typical_p", "tfs_z"), (1, 1.0)),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
}
_CHAT_FIELDS = (
    "prediction tools functions tool_choice function_call messages chat_template_kwargs "
    "continue_final_message add_generation_prompt "
    "reasoning_effort enable_thinking thinking think reasoning thinking_budget "
    "thinking_token_budget thinking_budget_tokens"
)
_REASONS = {
    **dict.fromkeys(
        _CHAT_FIELDS.split(), "this field is for conversations, see /v1/chat/completions"
    ),
    **dict.fromkeys(
        ("prompt", "suffix", "echo", "best_of"), "this field is for raw text, see /v1/completions"
    ),
    "prompt_logprobs": "use `echo` with `logprobs` on /v1/completions",
    "repetition_context_size": "`repetition_penalty` here covers the whole prompt and answer",
    "repeat_penalty": "the field is called `repetition_penalty` here",
    "repeat_last_n": "`repetition_penalty` here covers the whole prompt and answer",
    "n_predict": "the field is called `max_tokens` here",
    "num_predict": "the field is called `max_tokens` here",
    "num_ctx": "the context size is a setting of the server",
    "truncate_prompt_tokens": "use `truncation` to have the middle of a long prompt left out",
    "chat_template": "the model's own template is used",
    "moderation": "this field is part of OpenAI's own service",
}

UNSUPPORTED = UnsupportedFields(neutral=KNOWN, reasons=_REASONS)


def _schema_tag(value: Any) -> str:
    """The discriminator of `Schema`."""
    if isinstance(value, dict):
        return _OBJECT
    return _SWITCH if isinstance(value, bool) else _TEXT


def _object_or_switch(value: Any) -> str:
    """The discriminator of `SchemaProper`."""
    return _SWITCH if isinstance(value, bool) else _OBJECT


Schema = Annotated[
    Annotated[dict[str, Any], Tag(_OBJECT)]
    | Annotated[bool, Tag(_SWITCH)]
    | Annotated[str, Tag(_TEXT)],
    Discriminator(_schema_tag),
]
SchemaProper = Annotated[
    Annotated[dict[str, Any], Tag(_OBJECT)] | Annotated[bool, Tag(_SWITCH)],
    Discriminator(_object_or_switch),
]
Choices = Annotated[list[str], Field(max_length=_MOST_CHOICES, fail_fast=True)]


class JsonSchemaFormat(BaseModel):
    """A JSON schema with a name."""

    model_config = STRICT

    name: str | None = optional("Accepted, but has no effect.")
    description: str | None = optional("Accepted, but has no effect.")
    schema_: SchemaProper | None = Field(
        None, alias="schema", description="The schema that the answer must match."
    )
    strict: bool | None = optional("Has no effect: the schema is always enforced.")


class ResponseFormat(BaseModel):
    """OpenAI's field `response_format`: text, any JSON object, or JSON that matches a schema."""

    model_config = STRICT

    type: str = Field(description="text, json_object or json_schema.")
    json_schema: JsonSchemaFormat | None = optional("For json_schema.")
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="A schema for json_object, as in llama.cpp."
    )


class StructuredOutputs(BaseModel):
    """vLLM's field `structured_outputs`. At most one of its fields may be set."""

    model_config = STRICT

    json_: Schema | None = Field(
        None, alias="json", description="A JSON schema, as an object or as JSON text."
    )
    regex: str | None = optional("A regular expression.")
    choice: Choices | None = optional("The possible answers.")
    grammar: str | None = optional("A Lark grammar in llguidance's syntax.")
    json_object: bool | None = optional("True: any JSON object.")


class FormatFields(BaseModel):
    """The fields that request structured output."""

    response_format: ResponseFormat | None = optional("The format of the answer: text or JSON.")
    structured_outputs: StructuredOutputs | None = optional("The format of the answer, as in vLLM.")
    guided_json: Schema | None = optional("Older form of structured_outputs.json.")
    guided_regex: str | None = optional("Older form of structured_outputs.regex.")
    guided_choice: Choices | None = optional("Older form of structured_outputs.choice.")
    guided_grammar: str | None = optional("Older form of structured_outputs.grammar.")

    def output_format(self) -> OutputFormat | None:
        """Return the format to enforce, or None if any text is allowed.

        Raises RequestRefused for more than one format and for an unsupported format.
        """
        formats = [*self._requested_formats()]
        if len(formats) > 1:
            reason = f"not allowed together with `{formats[0].field}`"
            raise invalid_field(formats[1].field, reason)
        return formats[0] if formats else None

    def _requested_formats(self) -> Iterator[OutputFormat]:
        """Iterate over the formats that any of the fields requests. Raises RequestRefused."""
        if self.response_format is not None:
            yield from _response_format(self.response_format)
        if (structured := self.structured_outputs) is not None:
            for name, value in (structured.model_extra or {}).items():
                if value:
                    field = f"structured_outputs.{name}"
                    raise invalid_field(field, "not supported", code="unsupported_parameter")
            if structured.json_object:
                yield OutputFormat(kind="json_object", field="structured_outputs.json_object")
            yield from _vllm_formats(
                "structured_outputs.{}",
                structured.json_,
                regex=structured.regex,
                choice=structured.choice,
                grammar=structured.grammar,
            )
        yield from _vllm_formats(
            "guided_{}",
            self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
        )


def _vllm_formats(
    field_pattern: str,
    schema: dict[str, Any] | bool | str | None,
    *,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
) -> Iterator[OutputFormat]:
    """Iterate over the formats that vLLM's fields request. Empty fields are skipped.

    field_pattern: the pattern of the field names, such as `guided_{}`.
    """
    if schema is not None and schema != "":
        yield _schema_format(schema, field=field_pattern.format("json"))
    if choice:
        yield OutputFormat(
            kind="choice", choices=tuple(choice), field=field_pattern.format("choice")
        )
    if regex:
        yield OutputFormat(kind="regex", pattern=regex, field=field_pattern.format("regex"))
    if grammar:
        yield OutputFormat(kind="lark", pattern=grammar, field=field_pattern.format("grammar"))


def _response_format(response_format: ResponseFormat) -> Iterator[OutputFormat]:
    """Yield the format that `response_format` requests; nothing for text. Raises RequestRefused."""
    if response_format.type not in _FORMAT_TYPES:
        raise invalid_field(
            "response_format.type",
            "must be text, json_object or json_schema",
            code="unsupported_parameter",
            shown=f", got {response_format.type[:40]!r}",
        )
    json_schema = response_format.json_schema
    if response_format.type == "text":
        return
    if response_format.type == "json_object" and response_format.schema_ is None:
        yield OutputFormat(kind="json_object", field="response_format")
    elif json_schema is not None and json_schema.schema_ is not None:
        field = "response_format.json_schema.schema"
        yield OutputFormat(kind="json_schema", schema=json_schema.schema_, field=field)
    elif response_format.schema_ is not None:
        field = "response_format.schema"
        yield OutputFormat(kind="json_schema", schema=response_format.schema_, field=field)
    else:
        field = "response_format.json_schema"
        raise missing_field(field if json_schema is None else f"{field}.schema")


def _schema_format(schema: dict[str, Any] | bool | str, *, field: str) -> OutputFormat:
    """The format of a JSON schema, which may be JSON text. Raises RequestRefused."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise invalid_field(field, "the text is not valid JSON") from None
    if not isinstance(schema, dict | bool):
        raise invalid_field(field, "a JSON schema must be an object", code="invalid_type")
    return OutputFormat(kind="json_schema", schema=schema, field=field)


def _prompt_tag(value: Any) -> str:
    """The discriminator of `PromptField`, which depends on the first item only."""
    if not isinstance(value, list):
        return _TEXT
    if value and isinstance(value[0], list):
        return _TOKEN_LISTS
    return _TOKENS if value and isinstance(value[0], int | float) else _TEXTS


TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
TokenIdList = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
PromptField = Annotated[
    Annotated[str, Tag(_TEXT)]
    | Annotated[list[str], Field(min_length=1, fail_fast=True), Tag(_TEXTS)]
    | Annotated[TokenIdList, Tag(_TOKENS)]
    | Annotated[list[TokenIdList], Field(fail_fast=True), Tag(_TOKEN_LISTS)],
    Discriminator(_prompt_tag),
]


def prompts_of(field_value: Any) -> tuple[str | tuple[int, ...], ...]:
    """Return the prompts in a PromptField, each as a text or as token ids."""
    if isinstance(field_value, str):
        return (field_value,)
    if isinstance(field_value[0], int):
        return (tuple(field_value),)
    return tuple(each if isinstance(each, str) else tuple(each) for each in field_value)


def _limited_biases(value: Any) -> Any:
    """Validator of `logit_bias`: refuse too many tokens."""
    # Checked before the entries: each invalid entry becomes an error, and a million errors take
    # gigabytes.
    if isinstance(value, dict) and len(value) > _MOST_BIASES:
        raise ValueError(f"at most {_MOST_BIASES} tokens, got {len(value)}")
    return value


def _token_key(value: Any) -> Any:
    """Validator of a key in `logit_bias`: a token id, as text."""
    if not (
        isinstance(value, str)
        and value.isascii()
        and value.isdigit()
        and len(value) <= _MOST_DIGITS
    ):
        raise ValueError("the keys must be token ids")
    return value


TokenKey = Annotated[str, BeforeValidator(_token_key)]
Bias = Annotated[
    float, Field(ge=SAMPLING_RANGES["logit_bias"].lowest, le=SAMPLING_RANGES["logit_bias"].highest)
]
StopString = Annotated[str, Field(min_length=1)]
Stop = Annotated[
    Annotated[StopString, Tag(ONE)] | Annotated[list[StopString], Field(fail_fast=True), Tag(MANY)],
    Discriminator(one_or_many),
]


class StreamOptions(BaseModel):
    """What a stream contains besides the answer."""

    model_config = STRICT

    include_usage: bool | None = optional("Send the token counts in a last chunk before [DONE].")
    continuous_usage_stats: bool | None = optional(
        "With include_usage, as in vLLM: every chunk has the current counts; only the last one has "
        "the cached tokens."
    )


class SamplingFields(SharedFields):
    """The sampling and priority fields that chat, completions and Responses share."""

    model: Model | None = optional("Id of a model in /v1/models; default: the first one there.")
    stream: bool | None = optional("Send the answer as server-sent events while it is generated.")
    temperature: float | None = sampled("temperature", le=2)
    top_p: float | None = sampled("top_p", gt=0)
    top_k: int | None = sampled("top_k")
    min_p: float | None = sampled("min_p")
    presence_penalty: float | None = sampled("presence_penalty")
    frequency_penalty: float | None = sampled("frequency_penalty")
    repetition_penalty: float | None = sampled("repetition_penalty")
    logit_bias: Annotated[dict[TokenKey, Bias], BeforeValidator(_limited_biases)] | None = optional(
        SAMPLING_RANGES["logit_bias"].meaning
    )
    seed: Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = optional(
        "The same seed and request give the same answer; -1: a random seed."
    )
    ignore_eos: bool | None = optional("Continue after the model's end-of-text tokens.")
    user: str | None = optional("Accepted, but has no effect.")
    metadata: dict[str, Any] | None = optional("Accepted, but has no effect.")
    store: bool | None = optional("Accepted, but has no effect.")
    service_tier: str | None = optional(
        "`flex` or `batch`: nobody waits for this answer, so other requests go first."
    )
    priority: Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = optional(
        "As in vLLM: if above 0, other requests go first."
    )
    safety_identifier: str | None = optional("Accepted, but has no effect.")
    prompt_cache_retention: str | None = optional("Accepted, but has no effect.")
    prompt_cache_options: dict[str, Any] | None = optional("Accepted, but has no effect.")

    @property
    def streams(self) -> bool:
        """Whether the answer is streamed."""
        return bool(self.stream)

    @property
    def is_batch(self) -> bool:
        """Whether the body asks for batch priority."""
        return self.service_tier in _PATIENT_TIERS or (self.priority or 0) > 0

    def body_options(self) -> dict[str, Any]:
        """Return the fields of a GenerationRequest that chat, completions and Responses share."""
        sampling = {name: getattr(self, name) for name in SamplingParams.__struct_fields__}
        if self.logit_bias:
            sampling["logit_bias"] = {int(key): bias for key, bias in self.logit_bias.items()}
        return {
            **sampling_options(sampling),
            "ignore_eos": bool(self.ignore_eos),
            **super().body_options(),
        }


class GenerationFields(SamplingFields):
    """The fields that chat and completions share, in addition to SamplingFields."""

    stream_options: StreamOptions | None = None
    return_progress: bool | None = optional(
        "In a stream, report the progress of prefill with `prompt_progress`, like llama.cpp's "
        "server."
    )
    max_tokens: MaxTokens | None = optional("Maximum number of tokens of each choice.")
    n: Annotated[int, Field(ge=1)] | None = optional("Number of answers to each prompt.")
    stop: Stop | None = optional("Strings that end the answer. The answer does not include them.")

    @property
    def choices(self) -> int:
        """Number of answers per prompt."""
        return self.n or 1

    def stop_strings(self) -> tuple[str, ...]:
        """Return the stop strings as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def request_options(self, context: RequestContext) -> dict[str, Any]:
        """Return the fields of a GenerationRequest that chat and completions share."""
        model = model_of(context.services, self.model)
        return {"model": model, **super().request_options(context)}

    def body_options(self) -> dict[str, Any]:
        """Return the fields that the body alone determines."""
        return {
            "choices": self.choices,
            "stop": self.stop_strings(),
            "reports_progress": bool(self.return_progress and self.stream),
            **super().body_options(),
        }

    def answer_options(self) -> dict[str, Any]:
        """Return the arguments of an OpenAIAnswer that do not depend on the generated tokens."""
        options = self.stream_options or StreamOptions()
        shows_usage = bool(options.include_usage)
        return {
            "version": __version__,
            "shows_progress": bool(self.return_progress),
            "shows_usage": shows_usage,
            "shows_counts": shows_usage and bool(options.continuous_usage_stats),
        }

    def refuse_what_cannot_be_served(self, limits: LimitsSettings) -> None:
        """Raise RequestRefused for unsupported requests that the field types do not exclude."""
        UNSUPPORTED.refuse(self.model_extra)
        if self.stream_options is not None and not self.stream:
            reason = "`stream_options` is allowed only with `stream`"
            raise RequestRefused(reason, field="stream_options")
        if self.choices > limits.max_choices:
            reason = f"this server gives at most {limits.max_choices} choices, got {self.n}"
            raise invalid_field("n", reason)
        refuse_too_many(self.stop_strings(), limits.max_stop_strings, field="stop")
