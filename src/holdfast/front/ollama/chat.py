"""POST /api/chat: what it takes, and what that asks the gateway for."""

from __future__ import annotations

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from holdfast.front.ollama.answer import ChatLines
from holdfast.front.ollama.fields import OllamaGeneration
from holdfast.front.ollama.load import answered
from holdfast.front.ollama.messages import OllamaMessages, OllamaTools, conversation, definitions
from holdfast.front.ollama.shapes import ChatLine
from holdfast.front.server.answers import AnswerPlan
from holdfast.front.server.dialect import operation
from holdfast.front.server.openapi import answers_of, request_of
from holdfast.front.server.services import Services
from holdfast.wire.requests import ChatPrompt


class OllamaChat(OllamaGeneration):
    """A conversation to be answered. Without messages the model is loaded, and nothing else."""

    messages: OllamaMessages | None = Field(
        None, description="The conversation so far, oldest first."
    )
    tools: OllamaTools | None = Field(None, description="What the model may call.")

    @property
    def asks_nothing(self) -> bool:
        """Whether there is nothing to be answered."""
        return not self.messages

    def form(self, services: Services) -> ChatLines:
        """How the answer looks."""
        return ChatLines(model=self.shown_model(services), shows_logprobs=bool(self.logprobs))

    def plan(self, services: Services) -> AnswerPlan:
        """What to generate and how to answer.

        Raises RequestRefused naming the field that cannot be served.
        """
        messages = conversation(self.messages or ())
        tools = definitions(self.tools or (), limits=services.limits)
        if tools:
            self.refuse_unless("tools", services)
        last = messages[-1]
        prompt = ChatPrompt(
            messages=messages,
            tools=tools,
            # As Ollama does: what the assistant has begun is gone on with.
            continue_last=last["role"] == "assistant"
            and bool(last["content"])
            and "tool_calls" not in last,
        )
        return self.plan_of(
            self.request(services, prompt=prompt, prompt_field="messages"), self.form(services)
        )


@operation(
    "POST",
    "/api/chat",
    request_of(OllamaChat),
    answers_of(ChatLine, chunk=ChatLine, chunk_type=ChatLines.stream_type),
    summary="chat (Ollama)",
)
async def ollama_chat(request: Request, services: Services) -> Response:
    """Answer a conversation; as lines of JSON unless `stream` is false."""
    return await answered(request, services, OllamaChat)
