"""The options of the library's methods, and the neutral request that they come to."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, get_args

from holdfast.errors import InvalidRequest
from holdfast.front.prompt.limits import tenant_of
from holdfast.wire.requests import (
    ChatPrompt,
    EmbeddingRequest,
    GenerationRequest,
    OutputFormat,
    Pooling,
    Prompt,
    SamplingParams,
    Thinking,
    ThinkingEffort,
    ToolChoice,
)

TextOrTokens: TypeAlias = str | Sequence[int]
Messages: TypeAlias = str | Sequence[Mapping[str, Any]]
FormatOption: TypeAlias = OutputFormat | Mapping[str, Any]
ChoiceOption: TypeAlias = ToolChoice | str
ThinkingOption: TypeAlias = Thinking | ThinkingEffort | bool


class GenerationOptions(TypedDict, total=False):
    """How to generate. What is left out: the model's own recommendation, or no effect."""

    max_tokens: int  # left out: as many as fit the context window
    temperature: float  # 0: the most likely token every time
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[int, float]
    seed: int
    stop: str | Sequence[str]
    top_logprobs: int  # given (0 too): log-probabilities of the drawn tokens, and of so many rivals
    ignore_eos: bool
    # {"type": "json_object"}, {"type": "json_schema", …} as OpenAI's, or a JSON schema itself
    response_format: FormatOption
    session_id: str  # the session that it belongs to; one that is not there is opened
    tenant: str  # nothing that one tenant has read is there for another


class ChatOptions(GenerationOptions, total=False):
    """How to answer a conversation."""

    # OpenAI-shaped: {"type": "function", "function": {"name", "parameters", …}}
    tools: Sequence[Mapping[str, Any]]
    tool_choice: ChoiceOption  # "auto", "none", "required", or the name of a tool
    thinking: ThinkingOption  # whether to think first, or how much: "low", "high", …
    template_options: Mapping[str, Any]  # variables for the chat template


class EmbeddingOptions(TypedDict, total=False):
    """How to make vectors of texts."""

    # which hidden states count: the "mean" of all, or the "last"; left out: as the model was
    # trained
    pooling: Pooling
    dimensions: int  # so many of the first ones
    truncates: bool  # a text that is longer than the context window is cut; else it is refused


def embedding_request(
    texts: Sequence[TextOrTokens], options: Mapping[str, Any], *, is_list: bool
) -> EmbeddingRequest:
    """The request for the vectors of texts.

    Raises InvalidRequest, and TypeError for an option that there is none of.
    """
    if unknown := options.keys() - EmbeddingOptions.__annotations__.keys():
        raise TypeError(
            f"unknown options: {', '.join(unknown)}; there are "
            f"{', '.join(EmbeddingOptions.__annotations__)}"
        )
    if options.get("pooling") not in (None, *get_args(Pooling)):
        raise InvalidRequest(f"pooling: one of {', '.join(get_args(Pooling))}", field="pooling")
    inputs = tuple(text if isinstance(text, str) else tuple(text) for text in texts)
    return EmbeddingRequest(
        request_id=uuid.uuid4().hex,
        model="",
        inputs=inputs,
        input_field="texts",
        is_list=is_list,
        **options,
    )


def request_of(prompt: Prompt, options: Mapping[str, Any]) -> GenerationRequest:
    """The request for an answer to a prompt.

    Raises InvalidRequest, and TypeError for an option that there is none of.
    """
    given = dict(options)
    stop = given.pop("stop", ())
    names = SamplingParams.__struct_fields__
    sampling = {name: given.pop(name) for name in names if name in given}
    request = {
        name: given.pop(name)
        for name in ("max_tokens", "top_logprobs", "ignore_eos", "session_id")
        if name in given
    }
    tenant = tenant_of(api_key="", name=given.pop("tenant", ""), cache_salt="")
    form, choice, thinking = (
        given.pop(name, None) for name in ("response_format", "tool_choice", "thinking")
    )
    if given:
        raise TypeError(
            f"unknown options: {', '.join(given)}; there are "
            f"{', '.join(ChatOptions.__annotations__)}"
        )
    return GenerationRequest(
        request_id=uuid.uuid4().hex,
        model="",
        prompt=prompt,
        tenant=tenant,
        sampling=SamplingParams(**sampling),
        unset_sampling=tuple(name for name in names if name not in sampling),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        want_logprobs="top_logprobs" in request,
        tool_choice=_tool_choice(choice, prompt),
        thinking=_thinking(thinking),
        output_format=_output_format(form),
        prompt_field="messages" if isinstance(prompt, ChatPrompt) else "prompt",
        **request,
    )


def chat_request(messages: Messages, options: Mapping[str, Any]) -> GenerationRequest:
    """The request for an answer to a conversation; a text is one message of the user."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    given = dict(options)
    prompt = ChatPrompt(
        messages=tuple(dict(message) for message in messages),
        tools=tuple(dict(tool) for tool in given.pop("tools", ())),
        template_options=dict(given.pop("template_options", None) or {}),
    )
    for place, tool in enumerate(prompt.tools):
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequest(
                "a tool must have a function with a name", field=f"tools.{place}.function"
            )
    return request_of(prompt, given)


def _tool_choice(choice: ChoiceOption | None, prompt: Prompt) -> ToolChoice:
    names = (
        [tool["function"]["name"] for tool in prompt.tools]
        if isinstance(prompt, ChatPrompt)
        else []
    )
    match choice:
        case None | "auto":
            return ToolChoice()
        case "none":
            return ToolChoice(mode="none")
        case str():
            made = ToolChoice(mode="required", names=() if choice == "required" else (choice,))
        case ToolChoice():
            made = choice
        case _:
            raise InvalidRequest(
                'tool_choice: "auto", "none", "required", or the name of a tool',
                field="tool_choice",
            )
    if missing := [name for name in made.names if name not in names]:
        raise InvalidRequest(f"there is no tool {missing[0]!r}", field="tool_choice")
    if made.mode == "required" and not names:
        raise InvalidRequest("there are no tools to choose from", field="tool_choice")
    return made


def _thinking(thinking: ThinkingOption | None) -> Thinking:
    if isinstance(thinking, Thinking):
        return thinking
    if isinstance(thinking, bool):
        return Thinking(effort="on" if thinking else "off")
    if thinking is not None and thinking not in get_args(ThinkingEffort):
        raise InvalidRequest(
            f"thinking: true, false or one of {', '.join(get_args(ThinkingEffort))}",
            field="thinking",
        )
    return Thinking(effort=thinking)


def _output_format(form: FormatOption | None) -> OutputFormat | None:
    if form is None or isinstance(form, OutputFormat):
        return form
    match form:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return OutputFormat(kind="json_object")
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return OutputFormat(kind="json_schema", schema=schema)
        case {"type": "json_schema"}:
            raise InvalidRequest(
                "response_format: there is no json_schema.schema",
                field="response_format.json_schema.schema",
            )
        case _:
            return OutputFormat(kind="json_schema", schema=dict(form))
