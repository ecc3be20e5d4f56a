"""How agents react to a failed request, according to their source code (read in November 2026).

Each rule is a fact about an agent: which statuses, codes and words lead to which reaction. Sources:
opencode packages/opencode/src/provider/error.ts; Goose crates/goose/src/providers/
openai_compatible.rs; Hermes agent/error_classifier.py; Codex codex-rs/codex-api/src/sse/responses.rs
and api_bridge.rs; Claude Code as documented in docs/guides, and the retries of Anthropic's SDK.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Reaction: TypeAlias = Literal["compact", "shrink", "retry", "stop"]
_SDK_RETRIES = frozenset({408, 409, 429})
_OPENCODE_OVERFLOW = re.compile(
    r"prompt is too long|input is too long for requested model|exceeds the context window"
    r"|input token count.*exceeds the maximum|maximum prompt length is \d+"
    r"|reduce the length of the messages|maximum context length is \d+ tokens"
    r"|exceeds the limit of \d+|exceeds the available context size"
    r"|greater than the context length|context window exceeds limit|exceeded model token limit"
    r"|context[_ ]length[_ ]exceeded|request entity too large|context length is only \d+ tokens"
    r"|input length.*exceeds.*context length|prompt too long; exceeded (?:max )?context length"
    r"|too large for model with \d+ maximum context length|model_context_window_exceeded",
    re.IGNORECASE,
)
_GOOSE_OVERFLOW = (
    "too long",
    "context length",
    "context_length_exceeded",
    "reduce the length",
    "token count",
    "exceeds",
    "exceed context limit",
    "input length",
    "max_tokens",
    "decrease input length",
    "context limit",
    "maximum prompt length",
)
_HERMES_OVERFLOW = (
    "context length",
    "context size",
    "maximum context",
    "token limit",
    "too many tokens",
    "reduce the length",
    "exceeds the limit",
    "context window",
    "prompt is too long",
    "prompt exceeds max length",
    "max_tokens",
    "maximum number of tokens",
    "max_model_len",
    "prompt length",
    "input is too long",
    "maximum model length",
    "truncating input",
    "slot context",
    "n_ctx_slot",
    "max input token",
    "input token",
)
_HERMES_IMAGE = (
    "image exceeds",
    "image too large",
    "image_too_large",
    "image size exceeds",
    "image dimensions exceed",
    "dimensions exceed max allowed size",
)
_HERMES_UNKNOWN_MODEL = (
    "is not a valid model",
    "invalid model",
    "model not found",
    "model_not_found",
    "does not exist",
    "no such model",
    "unknown model",
    "unsupported model",
)
_HERMES_BAD_PARAMETER = ("unknown parameter", "unsupported parameter", "unrecognized request")
_HERMES_BAD_CODES = frozenset({"unknown_parameter", "unsupported_parameter"})
_HERMES_RATE_LIMIT = ("rate limit", "rate_limit", "too many requests", "throttled", "try again in")
_CLAUDE_IMAGE = re.compile(r"image exceeds .* maximum|image dimensions exceed|image too large")


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A failed request as its client sees it."""

    status: int
    headers: Mapping[str, str]
    body: Mapping[str, Any]

    @property
    def detail(self) -> Mapping[str, Any]:
        """The error object; Ollama's errors are plain text."""
        error = self.body["error"]
        return error if isinstance(error, dict) else {"message": error}

    @property
    def message(self) -> str:
        return str(self.detail["message"])

    @property
    def code(self) -> str:
        return str(self.detail.get("code") or self.detail.get("type") or "")

    @property
    def sdk_text(self) -> str:
        """The text of the exception that the SDKs of OpenAI and Anthropic raise."""
        return f"error code: {self.status} - {json.dumps(self.body)}".lower()


def _is_retried_by_sdk(refusal: Refusal) -> bool:
    asked = refusal.headers.get("x-should-retry")
    if asked is not None:
        return asked == "true"
    return refusal.status in _SDK_RETRIES or refusal.status >= 500


def opencode(refusal: Refusal) -> Reaction:
    if (
        _OPENCODE_OVERFLOW.search(refusal.message)
        or refusal.status == 413
        or refusal.code == "context_length_exceeded"
    ):
        return "compact"
    return "retry" if refusal.status in _SDK_RETRIES or refusal.status >= 500 else "stop"


def goose(refusal: Refusal) -> Reaction:
    text = refusal.message.lower()
    if refusal.status == 413:
        return "compact"
    if refusal.status == 400:
        return "compact" if any(phrase in text for phrase in _GOOSE_OVERFLOW) else "stop"
    return "retry" if refusal.status == 429 or refusal.status >= 500 else "stop"


def hermes(refusal: Refusal) -> Reaction:
    text = refusal.sdk_text
    is_overflow = any(phrase in text for phrase in _HERMES_OVERFLOW)
    match refusal.status:
        case 404:
            return "stop" if any(each in text for each in _HERMES_UNKNOWN_MODEL) else "retry"
        case 413:
            return "compact"
        case 429:
            return "retry"
        case 400:
            return _hermes_of_400(refusal, text, is_overflow=is_overflow)
        case 500 | 502 | 503 | 529 if is_overflow:
            return "compact"
    return "retry" if refusal.status >= 500 else "stop"


def _hermes_of_400(refusal: Refusal, text: str, *, is_overflow: bool) -> Reaction:
    if any(phrase in text for phrase in _HERMES_IMAGE):
        return "shrink"
    if refusal.code in _HERMES_BAD_CODES or any(each in text for each in _HERMES_BAD_PARAMETER):
        return "stop"
    if is_overflow:
        return "compact"
    if any(phrase in text for phrase in _HERMES_UNKNOWN_MODEL):
        return "stop"
    return "retry" if any(phrase in text for phrase in _HERMES_RATE_LIMIT) else "stop"


def codex(refusal: Refusal) -> Reaction:
    """Only the code counts at the end of a stream (`response.failed`), and only the status
    otherwise.
    """
    if refusal.status == 200:
        if refusal.code == "context_length_exceeded":
            return "compact"
        is_final = refusal.code in ("insufficient_quota", "invalid_prompt", "usage_not_included")
        return "stop" if is_final else "retry"
    return "retry" if refusal.status == 429 or refusal.status >= 500 else "stop"


def claude_code(refusal: Refusal) -> Reaction:
    if "prompt is too long" in refusal.message or refusal.status == 413:
        return "compact"
    if refusal.status == 400 and _CLAUDE_IMAGE.search(refusal.message):
        return "shrink"
    return "retry" if _is_retried_by_sdk(refusal) else "stop"


AGENTS: Mapping[str, Callable[[Refusal], Reaction]] = {
    "opencode": opencode,
    "Goose": goose,
    "Hermes": hermes,
    "Codex": codex,
    "Claude Code": claude_code,
}
# the protocols in which each agent can use a server
PROTOCOLS: Mapping[str, tuple[str, ...]] = {
    "opencode": ("chat", "responses", "messages"),
    "Goose": ("chat", "messages", "ollama"),
    "Hermes": ("chat", "responses", "messages", "ollama"),
    "Codex": ("responses",),
    "Claude Code": ("messages",),
}
