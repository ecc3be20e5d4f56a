"""The fields and options of Ollama's requests, with their ranges."""

from __future__ import annotations

import abc
import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag

from holdfast.config import LimitsSettings
from holdfast.front.ollama.answer import OllamaAnswer
from holdfast.front.ollama.models import Capability, capabilities, served_model, shown_name
from holdfast.front.openai.fields import Stop
from holdfast.front.request import (
    GenerationRequest,
    OutputFormat,
    Thinking,
    new_request_id,
    sampling_options,
)
from holdfast.front.server.answers import GenerationPlan
from holdfast.front.server.context import RequestContext
from holdfast.front.server.fields import (
    INT32_MAX,
    STRICT,
    TAG_MARK,
    CacheSaltField,
    LogprobFields,
    SharedFields,
    Switch,
    UnsupportedFields,
    optional,
    refuse_too_many,
    sampled,
    thinking_of,
)
from holdfast.front.server.problem import RequestRefused
from holdfast.front.server.services import Services
from holdfast.wire.requests import SamplingParams

_UNLIMITED = -1  # for top_k: all tokens
_ENGINE_OPTIONS = (
    "num_ctx num_keep num_batch num_ubatch num_gpu main_gpu low_vram f16_kv logits_all vocab_only "
    "use_mmap use_mlock numa "
    "num_thread embedding_only draft_num_predict mirostat mirostat_tau mirostat_eta tfs_z "
    "typical_p penalize_newline"
)
# options for Ollama's own engine, which clients send with every request
_WITHOUT_EFFECT = frozenset(_ENGINE_OPTIONS.split())
# fields of the request itself, which are refused among the options
_MISPLACED = tuple(f"options.{name}" for name in SharedFields.model_fields)
_OPTIONS = UnsupportedFields(
    neutral=dict.fromkeys(_MISPLACED, ()),
    reasons=dict.fromkeys(_MISPLACED, "this is a field of the request, beside `options`"),
)
_WORD = TAG_MARK + "word"
_SCHEMA = TAG_MARK + "schema"
_NUMBER = r"(?:\d+\.?\d*|\.\d+)"
_UNIT = "(?:ns|us|µs|μs|ms|s|m|h)"
_DURATION = re.compile(rf"[-+]?(?:{_NUMBER}|(?:{_NUMBER}{_UNIT})+)", re.ASCII)
_LONGEST_DURATION = 64
_UNSUPPORTED = UnsupportedFields(
    neutral={
        "template": ("",),
        "suffix": ("",),
        **dict.fromkeys(("width", "height", "steps"), (0,)),
    },
    reasons={
        "template": "the model's own template is used; to format the prompt yourself, use `raw`",
        "suffix": "no model here is known to fill in the middle of a text",
        **dict.fromkeys(("width", "height", "steps"), "no model here generates images"),
    },
)


def _whole_number(value: Any) -> Any:
    """Validator: a float without a fraction becomes an integer."""
    # JavaScript clients and Home Assistant send 40.0 for 40, which Ollama accepts.
    return int(value) if isinstance(value, float) and value.is_integer() else value


WholeNumber = Annotated[int, BeforeValidator(_whole_number)]


class OllamaOptions(BaseModel):
    """Sampling options and limits. The defaults come from the model's generation_config.json, not
    from Ollama.
    """

    model_config = STRICT

    num_predict: Annotated[WholeNumber, Field(ge=-2, le=INT32_MAX)] | None = optional(
        "Maximum number of tokens of the answer; 0, -1 and -2: as many as the context allows."
    )
    temperature: float | None = sampled("temperature")
    top_k: WholeNumber | None = sampled("top_k", ge=_UNLIMITED)
    top_p: float | None = sampled("top_p")
    min_p: float | None = sampled("min_p")
    seed: Annotated[WholeNumber, Field(ge=-(2**63), le=2**64 - 1)] | None = optional(
        "The same seed gives the same answer; -1: a random seed."
    )
    stop: Stop | None = optional("Strings that end the answer. The answer does not include them.")
    repeat_penalty: float | None = sampled("repetition_penalty")
    repeat_last_n: Annotated[WholeNumber, Field(ge=-1, le=INT32_MAX)] | None = optional(
        "0 switches repeat_penalty off. With other values, it covers the whole prompt and answer."
    )
    presence_penalty: float | None = sampled("presence_penalty")
    frequency_penalty: float | None = sampled("frequency_penalty")

    @property
    def max_tokens(self) -> int | None:
        """Maximum number of tokens of the answer; None for as many as the context allows."""
        return None if self.num_predict is None or self.num_predict <= 0 else self.num_predict

    def request_options(self, limits: LimitsSettings) -> dict[str, Any]:
        """Return fields of a GenerationRequest. Raises RequestRefused for too many stop strings."""
        extras = (self.model_extra or {}).items()
        _OPTIONS.refuse(
            {f"options.{name}": value for name, value in extras if name not in _WITHOUT_EFFECT}
        )
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        refuse_too_many(stop, limits.max_stop_strings, field="options.stop")
        sampling = {
            name: getattr(self, name)
            for name in SamplingParams.__struct_fields__
            if name in OllamaOptions.model_fields
        }
        sampling["repetition_penalty"] = 1.0 if self.repeat_last_n == 0 else self.repeat_penalty
        if self.top_k == _UNLIMITED:
            sampling["top_k"] = 0  # all tokens
        return {"max_tokens": self.max_tokens, "stop": stop, **sampling_options(sampling)}


def _format_tag(value: Any) -> str:
    """The discriminator of `FormatField`."""
    return _SCHEMA if isinstance(value, dict) else _WORD


def _duration(value: Any) -> Any:
    """Validator of `keep_alive`: a number of seconds, or a duration in Go's notation."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("a duration must be a number of seconds, or a text such as 5m or 1h30m")
    if isinstance(value, str) and (
        len(value) > _LONGEST_DURATION or not _DURATION.fullmatch(value)
    ):
        raise ValueError("a duration must be written like 5m, 1h30m, 300 or -1")
    return value


FormatField = Annotated[
    Annotated[Literal["", "json"], Tag(_WORD)] | Annotated[dict[str, Any], Tag(_SCHEMA)],
    Discriminator(_format_tag),
]
KeepAlive = Annotated[int | float | str, BeforeValidator(_duration)]


class OllamaRequest(CacheSaltField):
    """The fields of all requests that name a model."""

    model: str | None = optional("A served model, with or without :latest; default: the first one.")
    keep_alive: KeepAlive | None = optional(
        "0: unload the model as soon as it is idle, if the client is an administrator. Other "
        "values have no effect."
    )

    def shown_model(self, services: Services) -> str:
        """Return the model's name as the client wrote it.

        Raises RequestRefused if this server does not serve the model.
        """
        model = served_model(self.model, services)
        return self.model or shown_name(model.id)

    @property
    def asks_to_unload(self) -> bool:
        """Whether the client asks to unload the model when it becomes idle."""
        return self.keep_alive is not None and re.search("[1-9]", str(self.keep_alive)) is None


class OllamaGeneration(SharedFields, LogprobFields, OllamaRequest, abc.ABC):
    """The fields of both endpoints that generate text."""

    stream: bool | None = optional("False: one JSON object. Otherwise: a stream of JSON lines.")
    format: FormatField | None = optional('The format of the answer: "json", or a JSON schema.')
    options: OllamaOptions | None = optional("Sampling and limits.")
    think: Switch | None = optional(
        "Whether to think first: true, false, low, medium, high or max."
    )
    truncate: bool | None = optional(
        "True: leave out the middle of a prompt that does not fit the context. Otherwise, such a "
        "prompt is refused. `truncation` takes precedence."
    )
    shift: bool | None = optional("Has no effect: an answer ends when the context is full.")

    @property
    @abc.abstractmethod
    def only_loads(self) -> bool:
        """Whether there is no prompt, so that the model is only loaded or unloaded."""

    @abc.abstractmethod
    def answer_format(self, services: Services) -> OllamaAnswer:
        """Return the format of the answer."""

    @abc.abstractmethod
    def plan(self, context: RequestContext) -> GenerationPlan:
        """Return what to generate, and the format of the answer.

        Raises RequestRefused, which names the invalid field.
        """

    @property
    def streams(self) -> bool:
        """Whether the answer is streamed."""
        return self.stream is not False

    @property
    def shortens_prompt(self) -> bool:
        """Whether to leave out the middle of a prompt that does not fit the context."""
        return bool(self.truncate) if self.truncation is None else super().shortens_prompt

    def request(self, context: RequestContext, **prompt: Any) -> GenerationRequest:
        """Return what to generate. prompt: the request's prompt fields. Raises RequestRefused."""
        services = context.services
        _UNSUPPORTED.refuse(self.model_extra)
        return GenerationRequest(
            request_id=new_request_id("ollama-"),
            model=served_model(self.model, services).id,
            **self.logprob_options(services.limits),
            thinking=self._thinking(services),
            output_format=self._output_format(),
            **(self.options or OllamaOptions.model_validate({})).request_options(services.limits),
            **prompt,
            **self.request_options(context),
        )

    def refuse_without(self, capability: Capability, services: Services) -> None:
        """Raise RequestRefused, with Ollama's message, if the model lacks a capability."""
        model = served_model(self.model, services)
        if capability not in capabilities(model.id, services):
            name = json.dumps(self.shown_model(services), ensure_ascii=False)
            raise RequestRefused(
                f"{name} does not support {capability}", code="unsupported_parameter"
            )

    def _thinking(self, services: Services) -> Thinking:
        """The thinking settings. Raises RequestRefused if the model cannot think but must."""
        thinking = thinking_of(values={"think": self.think})
        if thinking.effort not in (None, "off"):
            self.refuse_without("thinking", services)
        return thinking

    def _output_format(self) -> OutputFormat | None:
        if isinstance(self.format, dict):
            return OutputFormat(kind="json_schema", schema=self.format, field="format")
        return OutputFormat(kind="json_object", field="format") if self.format else None
