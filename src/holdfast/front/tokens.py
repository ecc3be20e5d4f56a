"""POST /tokenize, /detokenize and /apply-template, with the fields of vLLM and of llama.cpp.

These endpoints do not need the model to be loaded.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from msgspec import Struct
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from holdfast.front.openai.answer import ErrorBody, openai_error
from holdfast.front.openai.endpoints import ChatCompletionRequest
from holdfast.front.openai.fields import TokenId
from holdfast.front.openai.messages import ChatMessage
from holdfast.front.prompt.limits import check_token_ids
from holdfast.front.prompt.tokenize import Tokenizer
from holdfast.front.request import EncodedPrompt
from holdfast.front.server.context import context_of
from holdfast.front.server.dialect import Dialect, operation
from holdfast.front.server.fields import STRICT, Model, optional
from holdfast.front.server.openapi import accepts, returns
from holdfast.front.server.problem import RequestRefused
from holdfast.front.server.request import json_response, read_json
from holdfast.front.server.services import Services, base_model_id, model_of
from holdfast.front.telemetry.request_log import RECORD
from holdfast.wire.requests import TokenIds

MAX_CHARACTERS = 8_000_000  # per text; tokenization takes about 1 µs per character


class TokenizeBody(ChatCompletionRequest):
    """The body of /tokenize: a text, or a conversation with all fields of a chat request."""

    content: str | None = optional(
        "A text, as llama.cpp's clients send it; by default without special tokens around it."
    )
    prompt: str | None = optional(
        "A text, as vLLM's clients send it; by default with special tokens around it."
    )
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] | None = optional(  # type: ignore[assignment]
        "A conversation, which the chat template renders."
    )
    add_special: bool | None = optional(
        "Whether to put the tokenizer's special tokens around a text."
    )
    add_special_tokens: bool | None = optional("Another name of add_special.")
    parse_special: bool | None = optional(
        "If false, names of special tokens within the text are treated as plain text."
    )
    with_pieces: bool | None = optional(
        "Return the text of each token, or its bytes if they are not valid UTF-8."
    )
    return_token_strs: bool | None = optional("Also return each token as the vocabulary spells it.")

    def text(self) -> str | None:
        """The text to tokenize; None if a conversation was sent.

        Raises RequestRefused unless exactly one of `content`, `prompt` and `messages` is given.
        """
        sources = {
            name: value
            for name in ("content", "prompt", "messages")
            if (value := getattr(self, name)) is not None
        }
        if len(sources) != 1:
            raise RequestRefused(
                "exactly one of `content`, `prompt` and `messages` is required",
                field=next(iter(sources), "content"),
            )
        text = self.content if self.content is not None else self.prompt
        if text is not None and len(text) > MAX_CHARACTERS:
            reason = f"a text may have at most {MAX_CHARACTERS:,} characters, got {len(text):,}"
            raise RequestRefused(reason, field=next(iter(sources)))
        return text

    def adds_special_tokens(self) -> bool:
        """Whether to put special tokens around a text."""
        if self.add_special is not None:
            return self.add_special
        if self.add_special_tokens is not None:
            return self.add_special_tokens
        return self.content is None


class DetokenizeBody(BaseModel):
    """The body of /detokenize: the tokens to decode."""

    model_config = STRICT

    tokens: Annotated[list[TokenId], Field(fail_fast=True)] = Field(description="Token ids.")
    model: Model | None = optional("A model that /v1/models lists. Default: the first one.")


class TokenPiece(Struct, frozen=True, kw_only=True):
    """A token with its text, or with its bytes if they are not valid UTF-8."""

    id: int
    piece: str | list[int]


class TokenList(Struct, frozen=True, kw_only=True):
    """The tokens of a text."""

    tokens: list[int | TokenPiece]
    count: int
    max_model_len: int | None = None  # None: the model is not loaded yet
    token_strs: list[str] | None = None


class PlainText(Struct, frozen=True, kw_only=True):
    """The decoded text, in the field that llama.cpp uses and in the field that vLLM uses."""

    content: str
    prompt: str


class RenderedPrompt(Struct, frozen=True, kw_only=True):
    """A conversation, rendered by the chat template."""

    prompt: str


@operation(
    "POST",
    "/tokenize",
    accepts(TokenizeBody),
    returns(TokenList),
    summary="the tokens of a text or conversation",
)
async def tokenize(request: Request, services: Services) -> Response:
    """Tokenize a text, or a conversation as the model would read it."""
    body = await read_json(request, TokenizeBody, services.limits)
    text, model = body.text(), model_of(services, body.model)
    tokenizer = await services.gateway.tokenizer_of(model)
    request.scope[RECORD].model = model
    if text is None:
        token_ids = (await _encode_conversation(request, services, body)).token_ids
    else:
        text = tokenizer.guard(text) if body.parse_special is False else text
        token_ids = TokenIds.of(
            await asyncio.to_thread(
                tokenizer.encode, text, add_special_tokens=body.adds_special_tokens()
            )
        )
    loaded_model = base_model_id(services, model)
    info = next(
        (status.info for status in services.models.statuses() if status.id == loaded_model), None
    )
    context_tokens = None if info is None else info.context_tokens
    return await asyncio.to_thread(
        _token_list_response, body, tokenizer, token_ids, max_model_len=context_tokens
    )


@operation(
    "POST", "/detokenize", accepts(DetokenizeBody), returns(PlainText), summary="the text of tokens"
)
async def detokenize(request: Request, services: Services) -> Response:
    """Decode tokens to text. The text contains the special tokens."""
    body = await read_json(request, DetokenizeBody, services.limits)
    model = model_of(services, body.model)
    tokenizer = await services.gateway.tokenizer_of(model)
    request.scope[RECORD].model = model
    check_token_ids(tuple(body.tokens), vocab_size=tokenizer.vocab_size, field="tokens")
    text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
    return json_response(PlainText(content=text, prompt=text))


@operation(
    "POST",
    "/apply-template",
    accepts(ChatCompletionRequest),
    returns(RenderedPrompt),
    summary="a conversation as text",
)
async def apply_template(request: Request, services: Services) -> Response:
    """Render a conversation as the model would read it."""
    body = await read_json(request, ChatCompletionRequest, services.limits)
    return json_response(
        RenderedPrompt(prompt=(await _encode_conversation(request, services, body)).text)
    )


def _token_list_response(
    body: TokenizeBody, tokenizer: Tokenizer, token_ids: TokenIds, *, max_model_len: int | None
) -> Response:
    """The response with the tokens, in the form that the body asks for."""
    vocabulary_text = tokenizer.backend.id_to_token
    return json_response(
        TokenList(
            tokens=[_token_piece(tokenizer, each) for each in token_ids]
            if body.with_pieces
            else list(token_ids),
            count=len(token_ids),
            max_model_len=max_model_len,
            token_strs=[vocabulary_text(each) or "" for each in token_ids]
            if body.return_token_strs
            else None,
        )
    )


async def _encode_conversation(
    request: Request, services: Services, body: ChatCompletionRequest
) -> EncodedPrompt:
    """Encode the conversation in the body as the prompt of a chat request."""
    context = context_of(request, services, cache_salt=body.cache_salt)
    (generation_request,), _ = body.plan(context)
    context.time_limit_seconds()  # refuses an invalid header, although no limit applies here
    request.scope[RECORD].model = generation_request.model
    return await services.gateway.encode(generation_request)


def _token_piece(tokenizer: Tokenizer, token_id: int) -> TokenPiece:
    """A token with its text, or with its bytes if they are not valid UTF-8."""
    token_bytes = tokenizer.pieces.all_bytes(token_id)
    try:
        piece: Any = token_bytes.decode()
    except UnicodeDecodeError:
        piece = list(token_bytes)
    return TokenPiece(id=token_id, piece=piece)


TOKENS = Dialect(
    name="The API for tokens",
    error=openai_error,
    error_shape=ErrorBody,
    prefixes=("/tokenize", "/detokenize", "/apply-template"),
    serves="tokens: /tokenize, /detokenize, /apply-template",
    operations=(tokenize, detokenize, apply_template),
)
