"""The endpoints of OpenAI's API: chat completions, completions, embeddings and the model list."""

from __future__ import annotations

import base64
import os
from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from holdfast.config import LimitsSettings
from holdfast.front.fleet.residency import ModelStatus
from holdfast.front.openai.answer import (
    ChatAnswer,
    ChatCompletion,
    CompletionAnswer,
    ErrorBody,
    PromptTokensDetails,
    TextCompletion,
    openai_error,
)
from holdfast.front.openai.fields import FormatFields, GenerationFields, PromptField, prompts_of
from holdfast.front.openai.messages import (
    ChatMessage,
    ChoiceField,
    FunctionCallField,
    Functions,
    Prediction,
    Tools,
    checked_functions,
    checked_tools,
    function_call_of,
    history,
    predicted_text,
    tool_choice_of,
)
from holdfast.front.output import Embedding, TextRead
from holdfast.front.request import (
    ChatPrompt,
    EmbeddingRequest,
    GenerationRequest,
    Prompt,
    ToolChoice,
    new_request_id,
)
from holdfast.front.server.access import caller_of
from holdfast.front.server.answers import GenerationPlan
from holdfast.front.server.context import RequestContext
from holdfast.front.server.dialect import Dialect, ModelShapes, operation
from holdfast.front.server.fields import (
    INT32_MAX,
    THINKING_FIELDS,
    Budget,
    CacheSaltField,
    EffortWord,
    LogprobFields,
    MaxTokens,
    Model,
    ReasoningOptions,
    Switch,
    UnsupportedFields,
    optional,
    refuse_above,
    refuse_too_many,
    thinking_of,
)
from holdfast.front.server.generation import (
    SESSION_FIELDS,
    EmbeddingPlan,
    embed,
    generation_response,
)
from holdfast.front.server.openapi import accepts, returns
from holdfast.front.server.problem import RequestRefused, invalid_field
from holdfast.front.server.request import json_response, parse, read_json
from holdfast.front.server.services import Services, model_of
from holdfast.models.quality import QualityReport, find_quality
from holdfast.wire.requests import Pooling

# variables of chat templates that clients may not set
_SET_BY_THE_SERVER = ("messages", "tools", "add_generation_prompt")
_DEFAULT_MAX_TOKENS = 16  # OpenAI's default for /v1/completions
_UNSUPPORTED_FOR_EMBEDDINGS = UnsupportedFields(
    neutral={
        **SESSION_FIELDS,
        "messages": ([],),
        "normalize": (True,),
        **dict.fromkeys(("input_type", "task", "prompt_name", "instruction"), ()),
        **dict.fromkeys(("late_chunking", "return_multivector"), (False,)),
        "add_special_tokens": (True,),
        "truncate_prompt_tokens": (-1,),
    },
    reasons={
        **dict.fromkeys(
            ("input_type", "task", "prompt_name", "instruction"),
            "write the instruction at the beginning of the text",
        ),
        "messages": "send the text of the conversation as `input`",
        "normalize": "vectors are always normalized here",
        "add_special_tokens": "send token ids as `input` instead",
        "truncate_prompt_tokens": (
            "only -1 is supported: it shortens inputs to what the model can read"
        ),
    },
)


class ChatCompletionRequest(GenerationFields, LogprobFields, FormatFields):
    """A request to answer a conversation."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] = Field(
        description="The conversation so far, oldest first."
    )
    max_completion_tokens: MaxTokens | None = optional("Newer name for max_tokens.")
    chat_template_kwargs: dict[str, Any] | None = optional(
        "Variables for the model's chat template."
    )
    tools: Tools | None = optional("The tools that the model may call.")
    tool_choice: ChoiceField | None = optional(
        "Whether the model may, must or must not call tools, and which tools."
    )
    parallel_tool_calls: bool | None = optional("False: at most one call per answer.")
    functions: Functions | None = optional("Older form of `tools`.")
    function_call: FunctionCallField | None = optional("Older form of `tool_choice`.")
    reasoning_effort: EffortWord | None = optional("How much to think before the answer.")
    enable_thinking: bool | None = optional("Whether to think before the answer.")
    thinking: Switch | None = optional(
        "Like enable_thinking; sent by DeepSeek's and Anthropic's clients."
    )
    think: Switch | None = optional("Like enable_thinking; sent by Ollama's clients.")
    reasoning: ReasoningOptions | None = optional(
        "Like enable_thinking; sent by OpenRouter's clients."
    )
    thinking_budget: Budget | None = optional(
        "Maximum number of tokens for thinking; after that, thinking is ended. -1: no limit."
    )
    thinking_token_budget: Budget | None = optional("Another name for thinking_budget.")
    thinking_budget_tokens: Budget | None = optional("Another name for thinking_budget.")
    add_generation_prompt: bool | None = optional(
        "May be false only together with continue_final_message."
    )
    continue_final_message: bool | None = optional(
        "Continue the last assistant message instead of answering it."
    )
    prediction: Prediction | None = optional(
        "What the answer is expected to be. Changes only how fast it is generated."
    )
    verbosity: str | None = optional("Accepted, but has no effect.")

    def plan(self, context: RequestContext) -> GenerationPlan:
        """Return what to generate, and the format of the answer.

        Raises RequestRefused, which names the invalid field.
        """
        request = GenerationRequest(
            request_id=new_request_id("chatcmpl-"),
            **self.conversation_fields(context.services.limits),
            **self.request_options(context),
        )
        answer_format = ChatAnswer(
            answer_id=request.request_id,
            model=request.model,
            choices=request.choices,
            calls_functions=bool(self.functions),
            shows_logprobs=request.want_logprobs,
            **self.answer_options(),
        )
        return [request], answer_format

    def conversation_fields(self, limits: LimitsSettings) -> dict[str, Any]:
        """Return the fields of a GenerationRequest that only chat has. Raises RequestRefused."""
        self.refuse_what_cannot_be_served(limits)
        self._refuse_contradictions()
        messages, has_images = history(self.messages)
        tools, choice = self._tools(limits)
        max_tokens = self.max_completion_tokens
        if max_tokens is None:
            max_tokens = self.max_tokens
        prompt = ChatPrompt(
            messages=messages,
            has_images=has_images,
            tools=tools,
            template_options=self.chat_template_kwargs or {},
            continue_last=bool(self.continue_final_message),
        )
        return {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "tool_choice": choice,
            "thinking": thinking_of(values=self._thinking_fields()),
            "output_format": self.output_format(),
            "prediction": predicted_text(self.prediction) if self.prediction else "",
            "prompt_field": "messages",
            **self.logprob_options(limits),
        }

    def _refuse_contradictions(self) -> None:
        """Raise RequestRefused for fields that contradict each other or the messages."""
        if self.continue_final_message and self.messages[-1]["role"] != "assistant":
            reason = "`continue_final_message` requires that the last message is the assistant's"
            raise RequestRefused(reason, field="continue_final_message")
        if self.add_generation_prompt is False and not self.continue_final_message:
            raise invalid_field(
                "add_generation_prompt", "false is allowed only with `continue_final_message`"
            )
        for name in _SET_BY_THE_SERVER:
            if name in (self.chat_template_kwargs or {}):
                field = f"chat_template_kwargs.{name}"
                raise invalid_field(field, "this variable is set by the server")

    def _tools(self, limits: LimitsSettings) -> tuple[tuple[dict[str, Any], ...], ToolChoice]:
        """Return the tools, in OpenAI's newer or older form, and the tool choice."""
        if self.functions or isinstance(self.function_call, dict):
            if self.tools and self.functions:
                raise invalid_field("functions", "not allowed together with `tools`")
            tools = checked_functions(self.functions or (), limits=limits)
            return tools, function_call_of(self.function_call, tools=tools)
        tools = checked_tools(self.tools or (), limits=limits)
        parallel = self.parallel_tool_calls is not False
        return tools, tool_choice_of(self.tool_choice, tools=tools, parallel=parallel)

    def _thinking_fields(self) -> dict[str, Any]:
        """Return the fields about thinking, by name. Variables of the template override them."""
        options = self.chat_template_kwargs or {}
        values = {name: getattr(self, name) for name in (*THINKING_FIELDS, "reasoning")}
        return values | {
            name: options[name] for name in THINKING_FIELDS if options.get(name) is not None
        }


@operation(
    "POST",
    "/v1/chat/completions",
    accepts(ChatCompletionRequest),
    returns(ChatCompletion, chunk=ChatCompletion),
    summary="chat (OpenAI)",
)
async def create_chat_completion(request: Request, services: Services) -> Response:
    """Answer a conversation (chat)."""
    return await generation_response(request, services, partial(parse, ChatCompletionRequest))


class ControlRequest(BaseModel):
    """An action on an answer that is still being generated."""

    model_config = ConfigDict(strict=True, defer_build=True)

    id: str = Field(description="Id of the answer, as in its stream. Works for all protocols.")
    action: Literal["reasoning_end"] = Field(
        description="reasoning_end: end the thinking now, and begin the visible answer."
    )
    model: str | None = optional("Accepted, but has no effect.")


class ControlAnswer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whether the action succeeded. If it did not, `message` gives the reason."""

    success: bool = msgspec.field()
    message: str = ""


@operation("POST", "/v1/chat/completions/control", accepts(ControlRequest), returns(ControlAnswer))
async def control_chat_completion(request: Request, services: Services) -> Response:
    """End the thinking of an answer that is being generated. A finished answer does not change."""
    body = await read_json(request, ControlRequest, services.limits)
    active = services.answers.active.find_by_answer_id(body.id, key=caller_of(request).key_name)
    if active is None or active.stream is None:
        reason = "no answer with this id is being generated"
        return json_response(ControlAnswer(success=False, message=reason))
    if not active.stream.end_thoughts():
        reason = "this model has no token that ends a thought"
        return json_response(ControlAnswer(success=False, message=reason))
    return json_response(ControlAnswer(success=True))


class CompletionRequest(GenerationFields, FormatFields):
    """A request to continue text or token ids."""

    prompt: PromptField = Field(
        description="A text, several texts, a list of token ids, or several such lists."
    )
    max_tokens: MaxTokens | None = optional("Maximum number of tokens of each choice; default: 16.")
    logprobs: Annotated[int, Field(ge=0)] | None = optional(
        "Return the log-probability of each token, and list this number of most likely tokens."
    )
    echo: bool | None = optional("Return the prompt before the completion.")
    best_of: Annotated[int, Field(ge=1)] | None = optional("Must be equal to `n`.")
    suffix: str | None = optional("Not supported.")
    add_special_tokens: bool | None = optional("Only true is supported.")

    def plan(self, context: RequestContext) -> GenerationPlan:
        """Return what to generate, and the format of the answer.

        Raises RequestRefused, which names the invalid field.
        """
        limits = context.services.limits
        self.refuse_what_cannot_be_served(limits)
        self._refuse_contradictions(limits)
        prompts = prompts_of(self.prompt)
        self._refuse_too_many(len(prompts), limits)
        answer_id = new_request_id("cmpl-")
        # what distinguishes the prompts in ids and in names of fields
        suffixes = [f".{index}" for index in range(len(prompts))] if len(prompts) > 1 else [""]
        shared = {"output_format": self.output_format(), **self.request_options(context)}
        requests = [
            self._request(prompt, request_id=answer_id + suffix, field="prompt" + suffix, **shared)
            for prompt, suffix in zip(prompts, suffixes, strict=True)
        ]
        answer_format = CompletionAnswer(
            answer_id=answer_id,
            model=requests[0].model,
            shows_logprobs=requests[0].want_logprobs,
            **self.answer_options(),
        )
        return requests, answer_format

    def _refuse_too_many(self, prompts: int, limits: LimitsSettings) -> None:
        """Raise RequestRefused for too many prompts or answers. Each answer is a sequence, and
        thousands would block the event loop before the queue could refuse them.
        """
        most_answers = limits.max_batch_prompts
        if prompts > most_answers:
            raise invalid_field("prompt", f"at most {most_answers} prompts, got {prompts}")
        if prompts * self.choices > most_answers:
            reason = (
                f"at most {most_answers} answers per request, but {prompts} prompts with "
                f"{self.choices} answers each were requested"
            )
            raise invalid_field("n", reason)

    def _refuse_contradictions(self, limits: LimitsSettings) -> None:
        """Raise RequestRefused for values that the field types do not exclude."""
        refuse_above(self.logprobs, limits.max_top_logprobs, field="logprobs")
        field = reason = ""
        if self.suffix:
            field = "suffix"
            reason = "this version does not support it yet"
        elif self.best_of is not None and self.best_of != self.choices:
            field = "best_of"
            reason = "this version supports only the same value as for `n`"
        elif self.add_special_tokens is False:
            field = "add_special_tokens"
            reason = "send token ids as `prompt` instead"
        if field:
            raise invalid_field(field, reason, code="unsupported_parameter")

    def _request(
        self, prompt: Prompt, *, request_id: str, field: str, **shared: Any
    ) -> GenerationRequest:
        """The request for one prompt. field: of the prompt. shared: what all prompts share."""
        return GenerationRequest(
            request_id=request_id,
            prompt=prompt,
            max_tokens=_DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens,
            want_logprobs=self.logprobs is not None,
            top_logprobs=self.logprobs or 0,
            echo=bool(self.echo),
            prompt_field=field,
            **shared,
        )


@operation(
    "POST",
    "/v1/completions",
    accepts(CompletionRequest),
    returns(TextCompletion, chunk=TextCompletion),
    summary="completions (OpenAI)",
)
async def create_completion(request: Request, services: Services) -> Response:
    """Continue a text."""
    return await generation_response(request, services, partial(parse, CompletionRequest))


class ReadUsage(Struct, frozen=True, kw_only=True):
    """Token counts of a request that does not generate anything."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class VectorEntry(Struct, frozen=True, kw_only=True):
    """An embedding vector: a list of numbers, or their float32 bytes in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class VectorList(Struct, frozen=True, kw_only=True):
    """The vectors of all inputs, in the order of the inputs."""

    object: Literal["list"] = "list"
    data: list[VectorEntry]
    model: str
    usage: ReadUsage


class EmbeddingsRequest(CacheSaltField):
    """A request to embed texts or token ids."""

    input: PromptField = Field(
        description="A text, several texts, a list of token ids, or several such lists."
    )
    model: Model | None = optional("Id of a model in /v1/models; default: the first one there.")
    encoding_format: Literal["float", "base64"] | None = optional(
        "float: numbers; base64: their float32 bytes in base64."
    )
    dimensions: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = optional(
        "Number of leading dimensions to keep; the vector is then normalized again."
    )
    pooling: Pooling | None = optional(
        "Use the mean of all hidden states, or the last one; default: as the model was trained."
    )
    user: str | None = optional("Accepted, but has no effect.")

    def plan(self, context: RequestContext) -> EmbeddingPlan:
        """Return what to embed, and the format of the answer.

        Raises RequestRefused, which names the invalid field.
        """
        extras = self.model_extra or {}
        _UNSUPPORTED_FOR_EMBEDDINGS.refuse(extras)
        inputs = prompts_of(self.input)
        refuse_too_many(inputs, context.services.limits.max_inputs, field="input")
        request = EmbeddingRequest(
            request_id=new_request_id("embd-"),
            model=model_of(context.services, self.model),
            inputs=inputs,
            pooling=self.pooling,
            dimensions=self.dimensions,
            truncates=extras.get("truncate_prompt_tokens") == -1,
            is_list=isinstance(self.input, list) and not isinstance(self.input[0], int),
            tenant=context.tenant,
            service=context.service(),
        )
        return request, lambda vectors: self._encode_vectors(request.model, vectors)

    def _encode_vectors(self, model: str, vectors: Sequence[Embedding]) -> bytes:
        """The body of the answer. vectors: of all inputs, in order."""
        encode_vector = _base64 if self.encoding_format == "base64" else _numbers
        answer = VectorList(
            # encode one by one, because encoding thousands together would hold the GIL for too long
            data=[
                msgspec.Raw(
                    msgspec.json.encode(
                        VectorEntry(index=index, embedding=encode_vector(each.vector))
                    )
                )  # type: ignore[misc]
                for index, each in enumerate(vectors)
            ],
            model=model,
            usage=usage_of(vectors),
        )
        return msgspec.json.encode(answer)


def usage_of(results: Sequence[TextRead]) -> ReadUsage:
    """Return the token counts over all texts."""
    tokens = sum(each.prompt_tokens for each in results)
    details = PromptTokensDetails(
        cached_tokens=sum(each.cache_report.cached_tokens for each in results)
    )
    return ReadUsage(prompt_tokens=tokens, total_tokens=tokens, prompt_tokens_details=details)


def _base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode()


def _numbers(vector: bytes) -> list[float]:
    return array("f", vector).tolist()


@operation(
    "POST",
    "/v1/embeddings",
    accepts(EmbeddingsRequest),
    returns(VectorList),
    summary="embeddings (OpenAI)",
)
async def create_embedding(request: Request, services: Services) -> Response:
    """Compute an embedding vector for each text."""
    return await embed(request, services, partial(parse, EmbeddingsRequest))


class Modalities(Struct, frozen=True, kw_only=True):
    """What a model takes and gives, as OpenRouter's clients look for it: `text`, `image`."""

    input_modalities: tuple[str, ...]
    output_modalities: tuple[str, ...] = ("text",)


class ModelCard(Struct, frozen=True, kw_only=True):
    """A served model.

    max_model_len, context_length, context_window: the longest prompt and answer together that fit
        the memory for KV, under the names that clients of vLLM, OpenRouter and others look for.
        Before the model is loaded, its context window; null if that is unknown.
    max_context_length: the context that the model was trained for, as LM Studio calls it; null if
        unknown.
    max_output_tokens: the answer length that agents should plan for; not a limit.
    default_sampling: the sampling parameters of requests that set none: the recommendations of the
        model or of its entry in `models.toml`, else Holdfast's defaults; null until its files are
        there.
    architecture: whether the model takes images. Before it is loaded: whether that is likely.
    can_chat: whether the model has a chat template; a base model, which has none, only completes
        text. True if its files are not here yet.
    state: as in /health.
    weights_read: while the model is being loaded, the share of its weights read so far, from 0 to
        1; otherwise null.
    aliases: further names that requests may use for the model.
    parent: for a LoRA adapter, the id of its model; otherwise null.
    kv_quality: what `holdfast quality` measured for the model; null if it was not measured, or if
        the model, Holdfast or MLX has changed since, or before the model is loaded.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "holdfast"
    max_model_len: int | None = None
    context_length: int | None = None
    context_window: int | None = None
    max_context_length: int | None = None
    max_output_tokens: int | None = None
    default_sampling: Mapping[str, float] | None = None
    architecture: Modalities
    can_chat: bool = True
    state: str
    weights_read: float | None = None
    aliases: tuple[str, ...] = ()
    parent: str | None = None
    kv_quality: QualityReport | None = None


class ModelList(Struct, frozen=True, kw_only=True):
    """All served models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


def model_card(model: ModelStatus) -> ModelCard:
    """Return a model in OpenAI's format."""
    context_tokens = model.context_tokens
    return ModelCard(
        id=model.id,
        created=model.created,
        max_model_len=context_tokens,
        context_length=context_tokens,
        context_window=context_tokens,
        max_context_length=model.own_context_tokens,
        max_output_tokens=model.answer_tokens,
        default_sampling=model.sampling,
        architecture=Modalities(input_modalities=model.input_modalities),
        can_chat=model.can_chat,
        state=model.state,
        weights_read=model.weights_read,
        aliases=model.aliases,
        parent=model.parent or None,
        kv_quality=_kv_quality(model),
    )


def _kv_quality(model: ModelStatus) -> QualityReport | None:
    """What was measured about the model's quantized keys and values; None if nothing was."""
    if model.info is None or model.parent:  # adapters are not measured
        return None
    return find_quality(model.info.fingerprint, os.environ)


def _model_list(models: Sequence[ModelStatus]) -> ModelList:
    return ModelList(data=[model_card(model) for model in models])


OPENAI = Dialect(
    name="OpenAI's API",
    error=openai_error,
    error_shape=ErrorBody,
    serves="OpenAI's /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/models",
    operations=(
        create_chat_completion,
        control_chat_completion,
        create_completion,
        create_embedding,
    ),
    models=ModelShapes(many_type=ModelList, one_type=ModelCard, many=_model_list, one=model_card),
)
OTHER_PARTS = Dialect(
    name="This part of OpenAI's API",
    error=openai_error,
    prefixes=(
        "/v1/audio",
        "/v1/images",
        "/v1/moderations",
        "/v1/files",
        "/v1/batches",
        "/v1/assistants",
        "/v1/threads",
    ),
)
