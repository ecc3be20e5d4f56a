"""POST /v1/chat/completions: its fields, its answers (streamed and whole), and
/v1/chat/completions/control, which ends the thought of an answer as llama.cpp's server does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from holdfast.config import LimitsSettings
from holdfast.front.openai.answers import (
    AnswerMessage,
    AnswerToolCall,
    CalledFunction,
    ChatChoice,
    ChatCompletion,
    ChatEndWord,
    ChatLogprobs,
    ContentLogprob,
    OpenAIAnswer,
    shown_logprob,
)
from holdfast.front.openai.fields import GenerationFields
from holdfast.front.openai.messages import (
    ChatMessage,
    ChoiceField,
    FunctionCallField,
    Functions,
    Tools,
    checked_functions,
    checked_tools,
    function_call_of,
    history,
    refuse_what_is_not_text,
    tool_choice_of,
)
from holdfast.front.openai.structured_output import FormatFields
from holdfast.front.server.access import caller_of
from holdfast.front.server.answers import AnswerPlan, Explanation, TokenCounts, WholeChoice
from holdfast.front.server.dialect import answers_of, operation, request_of
from holdfast.front.server.fields import (
    SPOKEN,
    Budget,
    EffortWord,
    MaxTokens,
    ReasoningOptions,
    Switch,
    refuse_above,
    thinking_of,
)
from holdfast.front.server.generation import generate
from holdfast.front.server.problem import RequestRefused
from holdfast.front.server.request import json_response, parse, read_body
from holdfast.front.server.services import Services
from holdfast.wire.output import (
    ChoiceFinished,
    EndWord,
    OutputDelta,
    TextDelta,
    TokenText,
    ToolArgumentsDelta,
    ToolCallStarted,
)
from holdfast.wire.requests import ChatPrompt, GenerationRequest, ToolChoice

_SET_BY_THE_SERVER = ("messages", "tools", "add_generation_prompt")
_encode = msgspec.json.encode
_EMPTY = b"{}"


class ChatCompletionRequest(GenerationFields, FormatFields):
    """A conversation to be answered."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] = Field(
        description="The conversation so far, oldest first."
    )
    max_completion_tokens: MaxTokens | None = Field(
        None, description="The newer name of max_tokens."
    )
    logprobs: bool | None = Field(
        None, description="Give the log-probability of each token of the answer."
    )
    top_logprobs: Annotated[int, Field(ge=0)] | None = Field(
        None, description="And of so many of the likeliest at its place."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables for the model's chat template."
    )
    tools: Tools | None = Field(None, description="What the model may call.")
    tool_choice: ChoiceField | None = Field(
        None, description="Whether it may, must or must not, and which of them."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="False: one call in an answer at most."
    )
    functions: Functions | None = Field(None, description="Older form of tools.")
    function_call: FunctionCallField | None = Field(None, description="Older form of tool_choice.")
    reasoning_effort: EffortWord | None = Field(
        None, description="How much the model is to think first."
    )
    enable_thinking: bool | None = Field(
        None, description="Whether it is to think first; its chat template decides how."
    )
    thinking: Switch | None = Field(
        None, description="The same, as DeepSeek's and Anthropic's clients say it."
    )
    think: Switch | None = Field(None, description="The same, as Ollama's clients say it.")
    reasoning: ReasoningOptions | None = Field(
        None, description="The same, as OpenRouter's clients say it."
    )
    thinking_budget: Budget | None = Field(
        None, description="Most tokens of thought; then it is ended. -1: no bound."
    )
    thinking_token_budget: Budget | None = Field(
        None, description="Another name of thinking_budget."
    )
    thinking_budget_tokens: Budget | None = Field(
        None, description="Another name of thinking_budget."
    )
    add_generation_prompt: bool | None = Field(
        None, description="False only together with continue_final_message."
    )
    continue_final_message: bool | None = Field(
        None, description="Continue the last assistant message instead of answering it."
    )
    verbosity: str | None = Field(None, description="Accepted, without effect.")

    def plan(self, services: Services) -> AnswerPlan:
        """What to generate and how to answer.

        Raises RequestRefused naming the field that cannot be served.
        """
        self.refuse_what_cannot_be_served(services.limits)
        self._refuse_contradictions(services.limits)
        refuse_what_is_not_text(self.messages)
        tools, choice = self._tools(services.limits)
        asks_by_functions = bool(self.functions)
        form = ChatAnswer(
            choices=self.choices,
            calls_functions=asks_by_functions,
            shows_logprobs=bool(self.logprobs),
            **self.answer_options(services),
        )
        prompt = ChatPrompt(
            messages=history(self.messages),
            tools=tools,
            template_options=self.chat_template_kwargs or {},
            continue_last=bool(self.continue_final_message),
        )
        request = GenerationRequest(
            request_id=form.id,
            model=form.model,
            prompt=prompt,
            max_tokens=self.max_completion_tokens
            if self.max_completion_tokens is not None
            else self.max_tokens,
            want_logprobs=bool(self.logprobs),
            top_logprobs=self.top_logprobs or 0,
            tool_choice=choice,
            thinking=thinking_of(said=self._said_of_thinking()),
            output_format=self.output_format(),
            prompt_field="messages",
            **self.request_options(),
        )
        return self.plan_of([request], form, choices=self.choices)

    def _refuse_contradictions(self, limits: LimitsSettings) -> None:
        refuse_above(self.top_logprobs, limits.max_top_logprobs, field="top_logprobs")
        if self.top_logprobs and not self.logprobs:
            raise RequestRefused(
                "`top_logprobs` is allowed only with `logprobs`", field="top_logprobs"
            )
        if self.continue_final_message and self.messages[-1]["role"] != "assistant":
            raise RequestRefused(
                "`continue_final_message` needs a last message of the assistant",
                field="continue_final_message",
            )
        if self.add_generation_prompt is False and not self.continue_final_message:
            reason = "`add_generation_prompt`: false is allowed only with `continue_final_message`"
            raise RequestRefused(reason, field="add_generation_prompt")
        for name in _SET_BY_THE_SERVER:
            if name in (self.chat_template_kwargs or {}):
                field = f"chat_template_kwargs.{name}"
                raise RequestRefused(f"`{field}`: this variable is set by the server", field=field)

    def _tools(self, limits: LimitsSettings) -> tuple[tuple[dict[str, Any], ...], ToolChoice]:
        """The tools of either form, and what is asked of them."""
        if self.functions or isinstance(self.function_call, dict):
            if self.tools and self.functions:
                raise RequestRefused("`functions`: there are `tools` already", field="functions")
            tools = checked_functions(self.functions or (), limits=limits)
            return tools, function_call_of(self.function_call, tools=tools)
        tools = checked_tools(self.tools or (), limits=limits)
        parallel = self.parallel_tool_calls is not False
        return tools, tool_choice_of(self.tool_choice, tools=tools, parallel=parallel)

    def _said_of_thinking(self) -> dict[str, Any]:
        """By name; what the variables of the template say goes before the fields."""
        options = self.chat_template_kwargs or {}
        said = {name: getattr(self, name) for name in (*SPOKEN, "reasoning")}
        return said | {name: options[name] for name in SPOKEN if options.get(name) is not None}


@operation(
    "POST",
    "/v1/chat/completions",
    request_of(ChatCompletionRequest),
    answers_of(ChatCompletion, chunk=ChatCompletion),
    summary="chat (OpenAI)",
)
async def create_chat_completion(request: Request, services: Services) -> Response:
    """Answer a conversation."""
    return await generate(
        request, services, lambda body: parse(ChatCompletionRequest, body).plan(services)
    )


class ChatAnswer(OpenAIAnswer):
    """AnswerFormat of a chat answer.

    calls_functions: a call is shown in the form that belongs to the request's `functions`, of which
    an answer has one.
    """

    id_prefix, chunk_object = "chatcmpl", "chat.completion.chunk"
    no_news = b'"delta":{}'

    def __init__(self, *, choices: int, calls_functions: bool = False, **given: Any) -> None:
        super().__init__(**given)
        self._calls_functions = calls_functions
        self._choices = [
            self._chunk_begin + b'{"index":%d,"delta":' % index for index in range(choices)
        ]

    def keep_alive(self) -> bytes:
        """A chunk that says nothing: some clients give up on a stream whose events cease, and do
        not see comments.
        """
        return self._choices[0] + b'{},"logprobs":null,"finish_reason":null}' + self._chunk_end()

    def opening(self, *, prompt_tokens: int) -> bytes:
        """One chunk per choice that says who speaks."""
        super().opening(prompt_tokens=prompt_tokens)
        said = (
            b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
            + self._chunk_end()
        )
        return b"".join(choice + said for choice in self._choices)

    def delta(self, event: OutputDelta) -> bytes:
        """News of a choice.

        The end of a call has no form of its own; its tokens have log-probabilities, though, and
        count.
        """
        said = self._said(event)
        logprobs = _encode(_chat_logprobs(event.logprobs)) if event.logprobs else b"null"
        end = self._chunk_end(len(event.token_ids))
        if said == _EMPTY and not event.logprobs:
            return b""
        return b'%b%b,"logprobs":%b,"finish_reason":null}%b' % (
            self._choices[event.index],
            said,
            logprobs,
            end,
        )

    def finish(self, event: ChoiceFinished) -> bytes:
        """The end of a choice."""
        end = (
            b'{},"logprobs":null,"finish_reason":"%b"}'
            % self._end_word(event.finish_reason).encode()
        )
        return self._choices[event.index] + end + self._chunk_end()

    def whole(
        self, choices: Sequence[WholeChoice], counts: TokenCounts, explanation: Explanation | None
    ) -> bytes:
        """The whole as JSON."""
        shown = [
            ChatChoice(
                index=index,
                message=self._message(choice),
                logprobs=_chat_logprobs(choice.logprobs) if self._shows_logprobs else None,
                finish_reason=self._end_word(choice.finish_reason),
            )
            for index, choice in enumerate(choices)
        ]
        return _encode(ChatCompletion(choices=shown, **self._around_choices(counts, explanation)))

    def _said(self, event: OutputDelta) -> bytes:
        """What an event says, as the `delta` of a chunk."""
        if isinstance(event, TextDelta):
            text = _encode(event.appended)
            return (
                b'{"content":%b}' % text
                if event.kind == "text"
                else b'{"reasoning_content":%b,"reasoning":%b}' % (text, text)
            )
        if isinstance(event, ToolCallStarted):
            function = CalledFunction(name=event.name, arguments="")
            call = AnswerToolCall(index=event.call, id=event.id, type="function", function=function)
        elif isinstance(event, ToolArgumentsDelta):
            function = CalledFunction(arguments=event.text)
            call = AnswerToolCall(index=event.call, function=function)
        else:
            return _EMPTY
        if self._calls_functions:
            return b'{"function_call":%b}' % _encode(function)
        return b'{"tool_calls":[%b]}' % _encode(call)

    def _message(self, choice: WholeChoice) -> AnswerMessage:
        content, reasoning, calls = choice.text(), choice.text("reasoning"), choice.tool_calls
        functions = [CalledFunction(name=call.name, arguments=call.arguments) for call in calls]
        in_use = [
            AnswerToolCall(id=call.id, type="function", function=function)
            for call, function in zip(calls, functions, strict=True)
        ]
        return AnswerMessage(
            role="assistant",
            content=content or (None if reasoning or calls else ""),
            refusal=None,
            reasoning_content=reasoning or msgspec.UNSET,
            reasoning=reasoning or msgspec.UNSET,
            tool_calls=in_use if calls and not self._calls_functions else msgspec.UNSET,
            function_call=functions[0] if calls and self._calls_functions else msgspec.UNSET,
        )

    def _end_word(self, word: EndWord) -> ChatEndWord:
        return "function_call" if self._calls_functions and word == "tool_calls" else word


def _chat_logprobs(tokens: Sequence[TokenText]) -> ChatLogprobs:
    return ChatLogprobs(content=content_logprobs(tokens))


def content_logprobs(tokens: Sequence[TokenText]) -> list[ContentLogprob]:
    """Drawn tokens as OpenAI shows them, each with the likeliest at its place."""
    return [
        msgspec.structs.replace(
            _bare_logprob(token), top_logprobs=[_bare_logprob(rival) for rival in token.top]
        )
        for token in tokens
    ]


def _bare_logprob(token: TokenText) -> ContentLogprob:
    return ContentLogprob(
        token=token.text, logprob=shown_logprob(token.logprob), bytes=list(token.raw)
    )


class ControlRequest(BaseModel):
    """What an answer under way is to do."""

    model_config = ConfigDict(strict=True)

    id: str = Field(
        description="The id of the answer, as its stream or its head says it; of any protocol."
    )
    action: Literal["reasoning_end"] = Field(
        description="reasoning_end: the thought ends now, and the answer begins."
    )
    model: str | None = Field(None, description="Accepted, without effect.")


class ControlAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whether it is done; `message` says why not."""

    success: bool = msgspec.field()
    message: str = ""


@operation(
    "POST", "/v1/chat/completions/control", request_of(ControlRequest), answers_of(ControlAnswer)
)
async def control_chat_completion(request: Request, services: Services) -> Response:
    """End the thought of an answer that is being made. An answer that has ended is left as it is."""
    asked = parse(
        ControlRequest, await read_body(request, limit_bytes=services.limits.max_body_bytes)
    )
    found = services.active.answering(asked.id, key=caller_of(request).key_name)
    if found is None or found.thinker is None:
        return json_response(
            ControlAnswer(success=False, message="no answer with this id is being made")
        )
    if not found.thinker.end_thoughts():
        reason = "this model has no token that ends a thought"
        return json_response(ControlAnswer(success=False, message=reason))
    return json_response(ControlAnswer(success=True))
