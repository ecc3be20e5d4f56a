"""POST /v1/chat/completions: what it takes, and what that asks the gateway for."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from holdfast.config import LimitsSettings
from holdfast.front.openai.chat_answer import ChatAnswer
from holdfast.front.openai.fields import GenerationFields
from holdfast.front.openai.formats import FormatFields
from holdfast.front.openai.messages import ChatMessage, history, refuse_what_is_not_text
from holdfast.front.openai.shapes import ChatCompletion
from holdfast.front.openai.tools import (
    ChoiceField,
    FunctionCallField,
    Functions,
    Tools,
    checked_functions,
    checked_tools,
    function_call_of,
    tool_choice_of,
)
from holdfast.front.server.answers import AnswerPlan
from holdfast.front.server.body import parse
from holdfast.front.server.dialect import operation
from holdfast.front.server.fields import MaxTokens, refuse_above
from holdfast.front.server.generation import generate
from holdfast.front.server.openapi import answers_of, request_of
from holdfast.front.server.problem import RequestRefused
from holdfast.front.server.services import Services
from holdfast.front.server.thinking import (
    SPOKEN,
    Budget,
    EffortWord,
    ReasoningOptions,
    Switch,
    thinking_of,
)
from holdfast.wire.requests import ChatPrompt, GenerationRequest, ToolChoice

_SET_BY_THE_SERVER = ("messages", "tools", "add_generation_prompt")


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
