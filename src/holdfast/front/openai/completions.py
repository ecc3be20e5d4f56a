"""POST /v1/completions: its fields, and its answers, streamed and whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from holdfast.config import LimitsSettings
from holdfast.front.openai.answers import (
    CompletionChoice,
    CompletionLogprobs,
    OpenAIAnswer,
    TextCompletion,
    shown_logprob,
)
from holdfast.front.openai.fields import GenerationFields, PromptField, prompts_of
from holdfast.front.openai.structured_output import FormatFields
from holdfast.front.server.answers import AnswerPlan, Explanation, TokenCounts, WholeChoice
from holdfast.front.server.dialect import answers_of, operation, request_of
from holdfast.front.server.fields import MaxTokens, refuse_above
from holdfast.front.server.generation import generate
from holdfast.front.server.problem import RequestRefused
from holdfast.front.server.request import parse
from holdfast.front.server.services import Services
from holdfast.wire.output import ChoiceFinished, OutputDelta, TextDelta, TokenText
from holdfast.wire.requests import GenerationRequest, Prompt

_DEFAULT_MAX_TOKENS = 16  # OpenAI's, for this endpoint
_encode = msgspec.json.encode


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


class CompletionAnswer(OpenAIAnswer):
    """AnswerFormat of a completion, of all its prompts' choices."""

    id_prefix, chunk_object = "cmpl", "text_completion"
    no_news = b'"text":""'

    def keep_alive(self) -> bytes:
        """A chunk without text: some clients give up on a stream whose events cease, and do not see
        comments.
        """
        return (
            self._chunk_begin
            + b'{"index":0,"text":"","logprobs":null,"finish_reason":null}'
            + self._chunk_end()
        )

    def delta(self, event: OutputDelta) -> bytes:
        """New text of a choice."""
        if not isinstance(event, TextDelta):
            return b""
        logprobs = _encode(completion_logprobs(event.logprobs)) if event.logprobs else b"null"
        parts = (
            self._chunk_begin,
            event.index,
            _encode(event.text),
            logprobs,
            self._chunk_end(len(event.token_ids)),
        )
        return b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null}%b' % parts

    def finish(self, event: ChoiceFinished) -> bytes:
        """The end of a choice."""
        parts = (self._chunk_begin, event.index, event.finish_reason.encode(), self._chunk_end())
        return b'%b{"index":%d,"text":"","logprobs":null,"finish_reason":"%b"}%b' % parts

    def whole(
        self, choices: Sequence[WholeChoice], counts: TokenCounts, explanation: Explanation | None
    ) -> bytes:
        """The whole as JSON."""
        shown = [
            CompletionChoice(
                index=index,
                text=choice.text(),
                logprobs=completion_logprobs(choice.logprobs) if self._shows_logprobs else None,
                finish_reason=choice.finish_reason,
            )
            for index, choice in enumerate(choices)
        ]
        return _encode(TextCompletion(choices=shown, **self._around_choices(counts, explanation)))


def completion_logprobs(tokens: Iterable[TokenText]) -> CompletionLogprobs:
    """The older logprobs shape.

    NaN stands for a token that has no logprob: the first of an echoed prompt.
    """
    shape = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for token in tokens:
        name = _name(token)
        scored = not math.isnan(token.logprob)
        shape.text_offset.append(token.text_offset)
        shape.tokens.append(name)
        shape.token_logprobs.append(shown_logprob(token.logprob) if scored else None)
        shape.top_logprobs.append(_likeliest(name, token) if scored else None)
    return shape


def _likeliest(name: str, token: TokenText) -> dict[str, float]:
    likeliest: dict[str, float] = {}
    for rival in token.top:
        # two tokens may read alike; the likelier one stays
        likeliest.setdefault(_name(rival), shown_logprob(rival.logprob))
    # the chosen token is always among them
    likeliest.setdefault(name, shown_logprob(token.logprob))
    return likeliest


def _name(token: TokenText) -> str:
    try:
        token.raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.raw)  # a part of a character
    return token.text
