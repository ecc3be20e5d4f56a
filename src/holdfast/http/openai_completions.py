"""POST /v1/completions: what it takes, and what that asks the gateway for."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from holdfast.config import LimitsSettings
from holdfast.http.answers import AnswerPlan, StreamFormat, WholeAnswer, new_head
from holdfast.http.body import TAG_MARK
from holdfast.http.errors import RequestRefused
from holdfast.http.openai_completions_answer import CompletionStream, WholeCompletion
from holdfast.http.openai_fields import GenerationFields, refuse_above
from holdfast.messages.requests import GenerationRequest, Prompt, TextPrompt, TokenPrompt

_DEFAULT_MAX_TOKENS = 16  # OpenAI's, for this endpoint
_TEXT, _TEXTS, _TOKENS, _TOKEN_LISTS = (TAG_MARK + name for name in ("text", "texts", "tokens", "token_lists"))
_INT32_MAX = 2**31 - 1


def _kind_of_prompt(value: Any) -> str:
    if not isinstance(value, list):
        return _TEXT
    if value and isinstance(value[0], list):
        return _TOKEN_LISTS
    return _TOKENS if value and isinstance(value[0], int | float) else _TEXTS


TokenId = Annotated[int, Field(ge=0, le=_INT32_MAX)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
PromptField = Annotated[
    Annotated[str, Tag(_TEXT)]
    | Annotated[list[str], Field(min_length=1, fail_fast=True), Tag(_TEXTS)]
    | Annotated[TokenIds, Tag(_TOKENS)]
    | Annotated[list[TokenIds], Field(fail_fast=True), Tag(_TOKEN_LISTS)],
    Discriminator(_kind_of_prompt),
]


class CompletionRequest(GenerationFields):
    """Text or token ids to be continued."""

    prompt: PromptField = Field(description="A text, several texts, token ids, or several lists of them.")
    max_tokens: Annotated[int, Field(ge=0, le=_INT32_MAX)] | None = Field(
        None, description="Most tokens for each choice; 16 if not given."
    )
    logprobs: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Log-probabilities of each token and so many of the likeliest."
    )
    echo: bool | None = Field(None, description="Give the prompt back in front of the completion.")
    best_of: Annotated[int, Field(ge=1)] | None = Field(None, description="Not supported, unless it is the same as `n`.")
    suffix: str | None = Field(None, description="Not supported.")
    add_special_tokens: bool | None = Field(None, description="Only true is supported.")

    def plan(self, limits: LimitsSettings, *, default_model: str, version: str) -> AnswerPlan:
        """What to generate and how to answer. Raises RequestRefused naming the field that cannot be served."""
        self.refuse_what_cannot_be_served(limits)
        self._refuse_contradictions(limits)
        prompts = self._prompts()
        if len(prompts) > limits.max_batch_prompts:
            raise RequestRefused(f"`prompt`: at most {limits.max_batch_prompts} prompts, got {len(prompts)}", field="prompt")
        head = new_head("cmpl", model=self.model or default_model, version=version)
        several = len(prompts) > 1
        requests = tuple(
            self._request(
                prompt,
                model=head.model,
                request_id=f"{head.id}.{place}" if several else head.id,
                field=f"prompt.{place}" if several else "prompt",
            )
            for place, prompt in enumerate(prompts)
        )
        form: StreamFormat | WholeAnswer
        if self.streams:
            form = CompletionStream(head, shows_usage=self.streams_usage, shows_counts=self.streams_counts)
        else:
            form = WholeCompletion(head, choices=len(prompts) * self.choices, shows_logprobs=self.logprobs is not None)
        return AnswerPlan(requests=requests, choices_per_prompt=self.choices, form=form, explains=self.explains)

    def _refuse_contradictions(self, limits: LimitsSettings) -> None:
        refuse_above(self.logprobs, limits.max_top_logprobs, field="logprobs")
        if self.suffix:
            raise RequestRefused("`suffix`: this version does not support it yet", code="unsupported_parameter", field="suffix")
        if self.best_of is not None and self.best_of != self.choices:
            reason = "`best_of`: this version does not support it yet, other than the same as `n`"
            raise RequestRefused(reason, code="unsupported_parameter", field="best_of")
        if self.add_special_tokens is False:
            reason = "`add_special_tokens`: send token ids as `prompt` instead"
            raise RequestRefused(reason, code="unsupported_parameter", field="add_special_tokens")

    def _prompts(self) -> list[Prompt]:
        given: Any = self.prompt
        if isinstance(given, str):
            return [TextPrompt(text=given)]
        if isinstance(given[0], int):
            return [TokenPrompt(token_ids=tuple(given))]
        return [TextPrompt(text=one) if isinstance(one, str) else TokenPrompt(token_ids=tuple(one)) for one in given]

    def _request(self, prompt: Prompt, *, model: str, request_id: str, field: str) -> GenerationRequest:
        return GenerationRequest(
            request_id=request_id,
            model=model,
            prompt=prompt,
            max_tokens=_DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens,
            choices=self.choices,
            sampling=self.sampling(),
            unset_sampling=self.unset_sampling(),
            stop=self.stop_strings(),
            want_logprobs=self.logprobs is not None,
            top_logprobs=self.logprobs or 0,
            echo=bool(self.echo),
            ignore_eos=bool(self.ignore_eos),
            prompt_field=field,
        )
