"""Texts and conversations as tokens. Errors have OpenAI's form."""

from __future__ import annotations

from holdfast.front.openai.answers import ErrorBody, openai_error
from holdfast.front.server.dialect import Dialect
from holdfast.front.tokens.tokenize import apply_template, detokenize, tokenize

TOKENS = Dialect(
    name="The API for tokens",
    error=openai_error,
    error_shape=ErrorBody,
    prefixes=("/tokenize", "/detokenize", "/apply-template"),
    serves="tokens: /tokenize, /detokenize, /apply-template",
    operations=(tokenize, detokenize, apply_template),
)
