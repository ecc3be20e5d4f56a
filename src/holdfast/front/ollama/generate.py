"""POST /api/generate: what it takes, and what that asks the gateway for."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from holdfast.front.ollama.answer import GenerateLines
from holdfast.front.ollama.context import unpacked
from holdfast.front.ollama.fields import OllamaGeneration
from holdfast.front.ollama.load import answered
from holdfast.front.ollama.shapes import GenerateLine
from holdfast.front.server.answers import AnswerPlan
from holdfast.front.server.dialect import operation
from holdfast.front.server.openapi import answers_of, request_of
from holdfast.front.server.problem import RequestRefused
from holdfast.front.server.services import Services
from holdfast.wire.requests import ChatPrompt, Prompt


class OllamaGenerate(OllamaGeneration):
    """A prompt to be answered as a user's message, or, with `raw`, a text to be continued.

    Without one the model is loaded.
    """

    prompt: str | None = Field(None, description="What the user says.")
    system: str | None = Field(None, description="The system message before it.")
    raw: bool | None = Field(
        None, description="Continue the prompt as it is, without the model's template."
    )
    context: Annotated[list[int], Field(fail_fast=True)] | None = Field(
        None, description="Of an earlier answer, as it came, to go on from there."
    )

    @property
    def asks_nothing(self) -> bool:
        """Whether there is nothing to be answered."""
        return not self.prompt

    def form(self, services: Services) -> GenerateLines:
        """How the answer looks."""
        return GenerateLines(model=self.shown_model(services), shows_logprobs=bool(self.logprobs))

    def plan(self, services: Services) -> AnswerPlan:
        """What to generate and how to answer.

        Raises RequestRefused naming the field that cannot be served.
        """
        prompt, form = self._asked(services), self.form(services)
        if isinstance(prompt, ChatPrompt):
            form.turns = prompt.messages
        return self.plan_of(self.request(services, prompt=prompt, prompt_field="prompt"), form)

    def _asked(self, services: Services) -> Prompt:
        text = self.prompt or ""
        if self.raw:
            for field in ("system", "context"):
                if getattr(self, field):
                    raise RequestRefused(
                        f"`{field}`: a prompt that is sent with `raw` has all of it in itself",
                        field=field,
                    )
            return text
        past = (
            unpacked(self.context, limit_bytes=services.limits.max_body_bytes)
            if self.context
            else ()
        )
        if self.system:  # clients send it with every prompt: it takes the place of the earlier one
            past = (
                {"role": "system", "content": self.system},
                *(turn for turn in past if turn["role"] != "system"),
            )
        return ChatPrompt(messages=(*past, {"role": "user", "content": text}))


@operation(
    "POST",
    "/api/generate",
    request_of(OllamaGenerate),
    answers_of(GenerateLine, chunk=GenerateLine, chunk_type=GenerateLines.stream_type),
    summary="completions (Ollama)",
)
async def ollama_generate(request: Request, services: Services) -> Response:
    """Answer a prompt; as lines of JSON unless `stream` is false."""
    return await answered(request, services, OllamaGenerate)
