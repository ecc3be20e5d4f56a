"""POST /v1/chat/completions: what it takes, and what that asks the gateway for."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from holdfast.config import LimitsSettings
from holdfast.http.openai.chat_answer import ChatAnswer
from holdfast.http.openai.fields import GenerationFields, MaxTokens, refuse_above
from holdfast.http.openai.messages import ChatMessage, refuse_what_is_not_text
from holdfast.http.openai.shapes import ChatCompletion
from holdfast.http.server.answers import AnswerPlan
from holdfast.http.server.body import parse
from holdfast.http.server.dialect import operation
from holdfast.http.server.generation import generate
from holdfast.http.server.openapi import answers_of, request_of
from holdfast.http.server.problem import RequestRefused
from holdfast.http.server.services import Services
from holdfast.messages.requests import ChatPrompt, GenerationRequest

_SET_BY_THE_SERVER = ("messages", "tools", "add_generation_prompt")


class ChatCompletionRequest(GenerationFields):
    """A conversation to be answered."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] = Field(
        description="The conversation so far, oldest first."
    )
    max_completion_tokens: MaxTokens | None = Field(None, description="The newer name of max_tokens.")
    logprobs: bool | None = Field(None, description="Give the log-probability of each token of the answer.")
    top_logprobs: Annotated[int, Field(ge=0)] | None = Field(None, description="And of so many of the likeliest at its place.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the model's chat template.")
    enable_thinking: bool | None = Field(None, description="Whether the model is to think first; the template decides how.")
    reasoning_effort: str | None = Field(None, description="Given to the chat template, which may know it or not.")
    add_generation_prompt: bool | None = Field(None, description="False only together with continue_final_message.")
    continue_final_message: bool | None = Field(None, description="Continue the last assistant message instead of answering it.")
    parallel_tool_calls: bool | None = Field(None, description="Accepted, without effect.")
    verbosity: str | None = Field(None, description="Accepted, without effect.")

    def plan(self, services: Services) -> AnswerPlan:
        """What to generate and how to answer. Raises RequestRefused naming the field that cannot be served."""
        self.refuse_what_cannot_be_served(services.limits)
        self._refuse_contradictions(services.limits)
        refuse_what_is_not_text(self.messages)
        form = ChatAnswer(choices=self.choices, shows_logprobs=bool(self.logprobs), **self.answer_options(services))
        prompt = ChatPrompt(
            messages=tuple(dict(message) for message in self.messages),
            template_options=self._template_options(),
            continue_last=bool(self.continue_final_message),
        )
        request = GenerationRequest(
            request_id=form.id,
            model=form.model,
            prompt=prompt,
            max_tokens=self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens,
            want_logprobs=bool(self.logprobs),
            top_logprobs=self.top_logprobs or 0,
            prompt_field="messages",
            **self.request_options(),
        )
        return self.plan_of([request], form)

    def _refuse_contradictions(self, limits: LimitsSettings) -> None:
        refuse_above(self.top_logprobs, limits.max_top_logprobs, field="top_logprobs")
        if self.top_logprobs and not self.logprobs:
            raise RequestRefused("`top_logprobs` is allowed only with `logprobs`", field="top_logprobs")
        if self.continue_final_message and self.messages[-1]["role"] != "assistant":
            raise RequestRefused("`continue_final_message` needs a last message of the assistant", field="continue_final_message")
        if self.add_generation_prompt is False and not self.continue_final_message:
            reason = "`add_generation_prompt`: false is allowed only with `continue_final_message`"
            raise RequestRefused(reason, field="add_generation_prompt")
        for name in _SET_BY_THE_SERVER:
            if name in (self.chat_template_kwargs or {}):
                field = f"chat_template_kwargs.{name}"
                raise RequestRefused(f"`{field}`: this variable is set by the server", field=field)

    def _template_options(self) -> dict[str, Any]:
        options = {"reasoning_effort": self.reasoning_effort, "enable_thinking": self.enable_thinking}
        given = {name: value for name, value in options.items() if value is not None}
        return {**given, **(self.chat_template_kwargs or {})}


@operation(
    "POST",
    "/v1/chat/completions",
    request_of(ChatCompletionRequest),
    answers_of(ChatCompletion, chunk=ChatCompletion),
    summary="conversations, as OpenAI's",
)
async def create_chat_completion(request: Request, services: Services) -> Response:
    """Answer a conversation."""
    return await generate(request, services, lambda body: parse(ChatCompletionRequest, body).plan(services))
