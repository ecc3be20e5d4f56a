"""POST /v1/completions: what it takes, and what that asks the gateway for."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from holdfast.config import LimitsSettings
from holdfast.front.openai.completions_answer import CompletionAnswer
from holdfast.front.openai.fields import GenerationFields
from holdfast.front.openai.formats import FormatFields
from holdfast.front.openai.prompts import PromptField, prompts_of
from holdfast.front.openai.shapes import TextCompletion
from holdfast.front.server.answers import AnswerPlan
from holdfast.front.server.body import parse
from holdfast.front.server.dialect import operation
from holdfast.front.server.fields import MaxTokens, refuse_above
from holdfast.front.server.generation import generate
from holdfast.front.server.openapi import answers_of, request_of
from holdfast.front.server.problem import RequestRefused
from holdfast.front.server.services import Services
from holdfast.wire.requests import GenerationRequest, Prompt

_DEFAULT_MAX_TOKENS = 16  # OpenAI's, for this endpoint


class CompletionRequest(GenerationFields, FormatFields):
    """Text or token ids to be continued."""

    prompt: PromptField = Field(
        description="A text, several texts, token ids, or several lists of them."
    )
    max_tokens: MaxTokens | None = Field(
        None, description="Most tokens for each choice; 16 if not given."
    )
    logprobs: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Log-probabilities of each token and so many of the likeliest."
    )
    echo: bool | None = Field(None, description="Give the prompt back in front of the completion.")
    best_of: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Not supported, unless it is the same as `n`."
    )
    suffix: str | None = Field(None, description="Not supported.")
    add_special_tokens: bool | None = Field(None, description="Only true is supported.")

    def plan(self, services: Services) -> AnswerPlan:
        """What to generate and how to answer.

        Raises RequestRefused naming the field that cannot be served.
        """
        self.refuse_what_cannot_be_served(services.limits)
        self._refuse_contradictions(services.limits)
        prompts = prompts_of(self.prompt)
        self._refuse_too_many(len(prompts), services.limits)
        form = CompletionAnswer(
            shows_logprobs=self.logprobs is not None, **self.answer_options(services)
        )
        places = [f".{place}" for place in range(len(prompts))] if len(prompts) > 1 else [""]
        requests = [
            self._request(prompt, form, place=place)
            for prompt, place in zip(prompts, places, strict=True)
        ]
        return self.plan_of(requests, form, choices=self.choices)

    def _refuse_too_many(self, prompts: int, limits: LimitsSettings) -> None:
        """Each answer is a sequence: thousands of them would hold up the event loop before the
        queue could refuse them.
        """
        most = limits.max_batch_prompts
        if prompts > most:
            raise RequestRefused(f"`prompt`: at most {most} prompts, got {prompts}", field="prompt")
        if prompts * self.choices > most:
            reason = (
                f"`n`: one request may have {most} answers, but {prompts} prompts with "
                f"{self.choices} answers each were sent"
            )
            raise RequestRefused(reason, field="n")

    def _refuse_contradictions(self, limits: LimitsSettings) -> None:
        refuse_above(self.logprobs, limits.max_top_logprobs, field="logprobs")
        if self.suffix:
            raise RequestRefused(
                "`suffix`: this version does not support it yet",
                code="unsupported_parameter",
                field="suffix",
            )
        if self.best_of is not None and self.best_of != self.choices:
            reason = "`best_of`: this version does not support it yet, other than the same as `n`"
            raise RequestRefused(reason, code="unsupported_parameter", field="best_of")
        if self.add_special_tokens is False:
            reason = "`add_special_tokens`: send token ids as `prompt` instead"
            raise RequestRefused(reason, code="unsupported_parameter", field="add_special_tokens")

    def _request(self, prompt: Prompt, form: CompletionAnswer, *, place: str) -> GenerationRequest:
        return GenerationRequest(
            request_id=form.id + place,
            model=form.model,
            prompt=prompt,
            max_tokens=_DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens,
            want_logprobs=self.logprobs is not None,
            top_logprobs=self.logprobs or 0,
            echo=bool(self.echo),
            output_format=self.output_format(),
            prompt_field="prompt" + place,
            **self.request_options(),
        )


@operation(
    "POST",
    "/v1/completions",
    request_of(CompletionRequest),
    answers_of(TextCompletion, chunk=TextCompletion),
    summary="completions (OpenAI)",
)
async def create_completion(request: Request, services: Services) -> Response:
    """Continue a text."""
    return await generate(
        request, services, lambda body: parse(CompletionRequest, body).plan(services)
    )
